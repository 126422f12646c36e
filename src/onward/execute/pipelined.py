"""A pipeline on its devices: one executable for each stage and work, issued in the order of the schedule.

The host only issues: calls return before they are computed, so that the devices work at once, each in the
order of its own stage. A value is sent as soon as it is issued, and let go after its last reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from onward.core.errors import ArgumentError, NotPickled, StateError
from onward.core.lower import lower
from onward.core.program import Program, Variable
from onward.core.structure import describe
from onward.core.walk import Where, select
from onward.develop.accumulation.micro_batches import LoopPlan, LoopResult
from onward.distribute.pipeline.cut import Pipeline, Place
from onward.distribute.pipeline.schedule import StageWork
from onward.execute.checkpoint.checkpoints import Checkpoints
from onward.execute.checkpoint.loaded import Checkpoint
from onward.execute.feeds import Feeds, key_of
from onward.execute.initialize import first_values
from onward.execute.layout import Layout
from onward.execute.line import follow
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.options import OptionSet, Value, all_options, option_set
from onward.execute.out import Out, Results
from onward.execute.restore import restored
from onward.execute.state import State

Values = dict[Variable, Any]
_NOT_YET = (
    "compile: {word} says how one Program runs, and a Pipeline is one for each stage. Leave it out{instead}."
)


def pipelined(
    pipeline: Any,
    donate: bool | Iterable[Where],
    check_feeds: bool,
    options: Any,
    others: Mapping[str, bool],
) -> PipelineStep:
    """The Step of a Pipeline; ``others`` says which options of ``compile`` were given beside.

    Raises:
        ArgumentError: it is no Pipeline, an option that pipelines do not have, or too few devices.
    """
    if not isinstance(pipeline, Pipeline):
        raise ArgumentError(
            f"compile takes a Program, not {describe(pipeline)}. Make one: trace(function, params, *data), "
            "or optimizer.minimize(loss, params, *data) to train."
        )
    for word in (word for word, is_given in others.items() if is_given):
        instead = ": return it beside the loss (has_aux=True)" if word == "fetch" else ""
        raise ArgumentError(_NOT_YET.format(word=word, instead=instead))
    found: OptionSet = option_set(options)
    return PipelineStep(pipeline, donate, check_feeds, found.compiler)


class _Part(NamedTuple):
    """An executable of a stage, and what it takes and gives.

    Attributes:
        stage: its number.
        program: what it computes.
        call: from the arrays that it takes over, state, data and a scale to the sums, pieces and outputs.
        sums: the places of the sums that it adds to, among those of the loop.
        pieces: the places of what it gives a piece of, among what is joined.
        sends: its outputs that others read.
    """

    stage: int
    program: Program
    call: Any
    sums: tuple[int, ...]
    pieces: tuple[int, ...]
    sends: tuple[Variable, ...]


class PipelineStep(NotPickled):
    """A Pipeline compiled for one device a stage; made by ``compile``.

    ``state, out = step(state, *data)`` takes a whole batch. The State has the names and types that it has on
    one device, so that a checkpoint of either is one of the other; each value lies with the stage that owns
    it. ``out`` lies on the devices that made it.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(params, x):
        ...     return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)
        >>> params, x = {"w1": jnp.ones((3, 8)), "w2": jnp.ones((8, 2))}, jnp.ones((8, 3))
        >>> step = ow.compile(ow.pipeline(ow.SGD(0.1).minimize(loss, params, x), 2, micro_batches=4))
        >>> state, out = step(step.init(params), x)
        >>> round(float(out.loss), 3), state["params/w2"].devices() == {jax.devices()[1]}
        (63.371, True)
    """

    unpickled = ("A PipelineStep", "Make the Pipeline again where it is needed, and restore a checkpoint.")

    def __init__(
        self,
        pipeline: Pipeline,
        donate: bool | Iterable[Where] = True,
        check_feeds: bool = True,
        options: Mapping[str, Value] | None = None,
    ) -> None:
        self.pipeline, self.program = pipeline, pipeline.accumulated
        self.layout = Layout.of(self.program)
        self.devices = _devices(pipeline)
        self._options = dict(all_options(options or {}))
        self._checks = check_feeds and bool(self.program.bounds)
        self.feeds = Feeds(self.program)
        self._shapes = key_of(self.program.inputs)
        changed = self.layout.changed
        chosen = (
            (changed if donate else ()) if isinstance(donate, bool) else select(changed, donate, "donate")
        )
        self._donate = {v.name for v in chosen}
        self._home = {v.name: self.devices[pipeline.homes[v]] for v in self.program.state}
        self._results = Results(self.program.outputs, self.program.loss, self.program.signature)
        self._build()

    def _build(self) -> None:
        pipeline, loop = self.pipeline, self.pipeline.loop
        self._split = [v for v in loop.turn.inputs if v.name in loop.how.split]
        self._parts = {place: self._part(place, program) for place, program in pipeline.parts.items()}
        self._zeros = {place: self._zeros_of(part) for place, part in self._parts.items() if part.sums}
        self._last = {
            (v, stage): [work for of, work in places if of == stage][-1]
            for v, places in pipeline.readers.items()
            for stage in {of for of, _ in places}
        }
        self._order = [
            (moment.stage, *moment.task)
            for moment in pipeline.schedule.moments
            if (moment.stage, moment.task.work) in self._parts
        ]
        self._begin = self._beginning()
        self._updates = [_Update(self, phase, stage) for phase, stage in sorted(pipeline.updates)]

    def compiled(self, run: Any, stage: int, *types: Any) -> Any:
        """A function compiled for the device of a stage, which takes over its first argument."""
        sharding = SingleDeviceSharding(self.devices[stage])
        jitted = jax.jit(run, donate_argnums=(0,) if types else (), out_shardings=sharding)

        def placed(kind: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)

        return jitted.lower(*jax.tree.map(placed, types)).compile(self._options)

    def _part(self, place: Place, program: Program) -> _Part:
        loop, (stage, _) = self.pipeline.loop, place
        wanted = set(program.outputs)
        sums = tuple(i for i, r in enumerate(loop.sums) if r.part in wanted)
        pieces = tuple(i for i, r in enumerate(loop.joined) if r.part in wanted)
        sends = tuple(v for v in program.outputs if v in self.pipeline.readers)
        run = lower(program, program.outputs, at_once=True)

        def call(totals: Any, state: Any, inputs: Any, scale: Any) -> Any:
            found = dict(zip(program.outputs, run(state, inputs), strict=True))
            added = [_scaled(loop, loop.sums[i], found[loop.sums[i].part], scale) for i in sums]
            grown = [total + x.astype(total.dtype) for total, x in zip(totals, added, strict=True)]
            given = [_scaled(loop, loop.joined[i], found[loop.joined[i].part], scale) for i in pieces]
            return grown, given, [found[v] for v in sends]

        types = [[v.aval for v in group] for group in (program.state, program.inputs)]
        call.__name__ = program.name if program.name.isidentifier() else "stage"
        totals = [loop.sums[i].sum_type for i in sums]
        made = self.compiled(call, stage, totals, *types, self._scale)
        return _Part(stage, program, made, sums, pieces, sends)

    def _zeros_of(self, part: _Part) -> Any:
        kinds = [self.pipeline.loop.sums[i].sum_type for i in part.sums]
        return self.compiled(lambda: [jnp.zeros(kind.shape, kind.dtype) for kind in kinds], part.stage)

    @cached_property
    def _scale(self) -> Any:
        """The type of the share of a micro-batch; None where all count alike."""
        loop = self.pipeline.loop
        weights = [v for v in loop.whole.program.inputs if v.name == loop.how.weight]
        return jax.eval_shape(self._scales, [v.aval for v in weights])[0] if weights else None

    def _scales(self, weights: Sequence[Any]) -> Any:
        loop = self.pipeline.loop
        v = next(v for v in self._split if v.name == loop.how.weight)
        found = loop.scales(loop.pieces(weights[0], v))
        return [found[i] for i in range(loop.how.steps)]

    def _beginning(self) -> Any:
        """From the batch and what is handed on to the micro-batches, what is handed on, and their shares."""
        pipeline, loop = self.pipeline, self.pipeline.loop
        ahead, count = pipeline.ahead, loop.how.steps
        following = [ahead.next_state[v] for v in ahead.state]
        run = lower(ahead, (*following, *ahead.outputs))

        def call(_: Any, state: Any, batch: Any) -> Any:
            pieces = [loop.pieces(x, v) for x, v in zip(batch, self._split, strict=True)]
            handed = []
            for _i in range(count):
                found = run(state, ())
                state = found[: len(following)]
                handed.append(found[len(following) :])
            weights = [x for x, v in zip(batch, self._split, strict=True) if v.name == loop.how.weight]
            scales = self._scales(weights) if weights else [None] * count
            return [[x[i] for x in pieces] for i in range(count)], handed, state, scales

        batch = [self.program[v.name].aval for v in self._split]
        return self.compiled(call, 0, (), [v.aval for v in ahead.state], batch)

    @uninterrupted
    def init(self, parameters: Any = None, state: Any = None, *, seed: int = 0) -> State:
        """The State before the first step, each value with the stage that owns it; see ``Step.init``.

        Raises:
            ArgumentError: containers, shapes or dtypes that differ from the traced ones.
        """
        values = first_values(self.program, parameters, state, seed, self._placed)
        return State(self.layout, [values[v] for v in self.layout.variables])

    def restore(
        self,
        source: Checkpoint | Checkpoints | str | PathLike[str],
        *,
        which: Any = "latest",
        fallback: bool = False,
        reader: Any = None,
    ) -> State:
        """The State that ``checkpoints.save(state, ...)`` saved, on one device or several; see ``Step``.

        Raises:
            CheckpointError: nothing whole is there, or something that this step keeps is not in it.
        """
        values = restored(self.layout, source, which, fallback, reader)
        return State(self.layout, list(map(self._placed, self.layout.variables, values)))

    def plan(self) -> Pipeline:
        """The Pipeline, whose text says what each stage holds and does."""
        return self.pipeline

    def _placed(self, v: Variable, value: Any) -> Any:
        return jax.device_put(value, self._home[v.name])

    @uninterrupted
    def __call__(self, state: State, /, *data: Any, **feed: Any) -> tuple[State, Out]:
        """Run one step on a whole batch.

        Raises:
            ArgumentError: data of another number, structure, shape or dtype than was traced.
            StateError: a State that was given to a step before, or that lacks what this Program keeps.
        """
        values = self._fed(data, feed)
        own = self._own(state)
        fed = dict(zip((v.name for v in self.program.inputs), values, strict=True))
        run = _Run(self, own, fed)
        run.micro_batches()
        run.update()
        following = State(self.layout, [run.following(v) for v in self.layout.variables])
        follow(state, following)
        return following, Out(self._results, [run.value(v) for v in self.program.outputs])

    def _fed(self, data: tuple[Any, ...], feed: Mapping[str, Any]) -> Sequence[Any]:
        values = self.feeds.read(self.feeds.named(data, feed) if feed else data)
        if self._checks:
            self.feeds.check_bounds(values)
        values = self.feeds.convert(values)
        for v, x in zip(self.program.inputs, values, strict=True):
            if tuple(x.shape) != v.shape:
                raise ArgumentError(
                    f"{self.program.name}: {v.name!r} is {x.dtype}{list(x.shape)}; the pipeline was cut for "
                    f"{v.type}. Make one for batches of this length: pipeline(program traced for it, ...)."
                )
        return values

    def _own(self, state: State) -> dict[str, Any]:
        """The values of a State, each with the stage that owns it."""
        if not isinstance(state, State):
            raise ArgumentError(
                f"The first argument of a step is its State, not {describe(state)}. Begin with "
                "state = step.init(params); then state, out = step(state, *data)."
            )
        if any(isinstance(x, jax.core.Tracer) for x in state.buffers):
            raise ArgumentError(
                "The step of a pipeline is many executables on several devices, so it cannot be traced: call "
                "it outside of jax.jit, jax.lax.scan and jax.vmap."
            )
        state.expect_whole()
        if lacking := [v.name for v in self.layout.variables if v.name not in state.layout.position]:
            raise StateError(
                f"This State has no {', '.join(map(repr, lacking[:5]))}, which {self.program.name} keeps. "
                "Make one with this step's own init."
            )
        return {name: jax.device_put(state[name], device) for name, device in self._home.items()}

    def __repr__(self) -> str:
        schedule = self.pipeline.schedule
        return f"PipelineStep({self.program.name!r}, {schedule.stages} stages, {schedule.name})"


class _Update:
    """One phase of the update in one stage, compiled."""

    def __init__(self, step: PipelineStep, phase: int, stage: int) -> None:
        pipeline = step.pipeline
        self.stage, self.program = stage, pipeline.updates[phase, stage]
        self.results = {r.whole: r for r in pipeline.results}
        later = [part for key, part in pipeline.updates.items() if key > (phase, stage)]
        ends = {*step.program.outputs, *step.program.next_state.values()}
        self.taken = [v for v in self.program.state if self._may_take(step, v, later, ends)]
        given = (*self.program.state, *self.program.inputs)
        self.lent = [v for v in given if v not in set(self.taken)]
        run = lower(self.program, self.program.outputs, at_once=True)
        state = len(self.program.state)

        def call(taken: Any, lent: Any) -> Any:
            found = dict(zip((*self.taken, *self.lent), (*taken, *lent), strict=True))
            values = [self._whole(v, found[v]) for v in given]
            return run(values[:state], values[state:])

        call.__name__ = "update"
        types = [[self._type(step, v) for v in group] for group in (self.taken, self.lent)]
        self.call = step.compiled(call, stage, *types)

    def _may_take(
        self, step: PipelineStep, v: Variable, later: Collection[Program], ends: Collection[Variable]
    ) -> bool:
        """Whether the buffer of a state Variable may become that of its next value."""
        own = v.name in step._donate and step.pipeline.homes[v] == self.stage and v not in ends
        made = {o for op in self.program.ops for o in op.outputs}
        return own and step.program.next_state[v] in made and not any(v in part.state for part in later)

    def _type(self, step: PipelineStep, v: Variable) -> Any:
        """The type of what it is given for a Variable: a sum, or all pieces, of what micro-batches made."""
        result, loop = self.results.get(v), step.pipeline.loop
        if result is None:
            return v.aval
        if result.axis is None:
            return result.sum_type
        found = jax.eval_shape(
            lambda x, scale: _scaled(loop, result, x, scale), result.part.aval, step._scale
        )
        return [found] * loop.how.steps

    def _whole(self, v: Variable, value: Any) -> Any:
        """What micro-batches made, put together."""
        result = self.results.get(v)
        if result is None:
            return value
        return value.astype(v.dtype) if result.axis is None else result.joined(jnp.stack(value))


class _Run:
    """One step as it is issued.

    Attributes:
        at: for each stage and micro-batch the values that are there.
        given: for each micro-batch its part of the batch, and what was handed on to it.
        totals: the sums so far.
        pieces: of what is joined, those of all micro-batches.
        raw: the sums and pieces of all micro-batches.
        made: what the update has made.
    """

    def __init__(self, step: PipelineStep, own: dict[str, Any], fed: Mapping[str, Any]) -> None:
        self.step, self.own, self.fed = step, own, fed
        self.at: dict[tuple[int, int], Values] = {}
        self._borrowed: dict[tuple[str, int], Any] = {}
        pipeline = step.pipeline
        ahead = pipeline.ahead
        batch = [self._sent(fed[v.name], 0) for v in step._split]
        pieces, handed, last, self.scales = step._begin(
            (), [self._state(v.name, 0) for v in ahead.state], batch
        )
        self.given = [
            {**dict(zip(step._split, mine, strict=True)), **dict(zip(ahead.outputs, hers, strict=True))}
            for mine, hers in zip(pieces, handed, strict=True)
        ]
        self.made: Values = dict(zip((new for *_, new in pipeline.loop.threaded), last, strict=True))
        self.raw: Values = {}
        self.totals = {place: zeros() for place, zeros in step._zeros.items()}
        self.pieces: list[list[Any]] = [[None] * pipeline.loop.how.steps for _ in pipeline.loop.joined]

    def _sent(self, value: Any, stage: int) -> Any:
        return jax.device_put(value, self.step.devices[stage])

    def _state(self, name: str, stage: int) -> Any:
        """A value of state where a stage reads it; that of another stage is sent once a step."""
        device = self.step.devices[stage]
        if self.step._home[name] == device:
            return self.own[name]
        if (name, stage) not in self._borrowed:
            self._borrowed[name, stage] = jax.device_put(self.own[name], device)
        return self._borrowed[name, stage]

    def micro_batches(self) -> None:
        """Issue the work of all stages on all micro-batches."""
        for stage, work, i in self.step._order:
            self._work(stage, work, i)

    def _work(self, stage: int, work: StageWork, i: int) -> None:
        part = self.step._parts[stage, work]
        here = self.at.setdefault((stage, i), {})
        inputs = [self._input(v, stage, i, here) for v in part.program.inputs]
        state = [self._state(v.name, stage) for v in part.program.state]
        scale = self._scale(stage, i)
        grown, pieces, outputs = part.call(self.totals.get((stage, work), []), state, inputs, scale)
        if part.sums:
            self.totals[stage, work] = grown
        for place, piece in zip(part.pieces, pieces, strict=True):
            self.pieces[place][i] = piece
        for v, value in zip(part.sends, outputs, strict=True):
            for to in dict.fromkeys(of for of, _ in self.step.pipeline.readers[v]):
                self.at.setdefault((to, i), {})[v] = value if to == stage else self._sent(value, to)
        for v in part.program.inputs:
            if self.step._last[v, stage] is work:
                here.pop(v, None)

    def _input(self, v: Variable, stage: int, i: int, here: Values) -> Any:
        if v not in here:
            given = self.given[i].get(v)
            here[v] = self._sent(self.fed[v.name] if given is None else given, stage)
        return here[v]

    def _scale(self, stage: int, i: int) -> Any:
        return None if self.step._scale is None else self._sent(self.scales[i], stage)

    def update(self) -> None:
        """Issue the update, phase by phase."""
        loop = self.step.pipeline.loop
        for (stage, work), grown in self.totals.items():
            part = self.step._parts[stage, work]
            self.raw.update((loop.sums[i].whole, x) for i, x in zip(part.sums, grown, strict=True))
        self.raw.update((r.whole, pieces) for r, pieces in zip(loop.joined, self.pieces, strict=True))
        for phase in self.step._updates:
            found = phase.call(
                *([self._read(v, phase.stage) for v in group] for group in (phase.taken, phase.lent))
            )
            self.made.update(zip(phase.program.outputs, found, strict=True))

    def _read(self, v: Variable, stage: int) -> Any:
        """A value as a stage reads it in the update."""
        if v.name in self.own:
            return self._state(v.name, stage)
        return self._sent(self.raw[v] if v in self.raw else self.value(v), stage)

    def value(self, v: Variable) -> Any:
        """The value of a result, or of what a step is given."""
        if v in self.made:
            return self.made[v]
        return self.own[v.name] if v.name in self.own else self.fed[v.name]

    def following(self, v: Variable) -> Any:
        """The next value of state, with the stage that owns it."""
        new = self.step.program.next_state.get(v, v)
        return self.step._placed(v, self.value(new))


def _scaled(loop: LoopPlan, result: LoopResult, x: Any, scale: Any) -> Any:
    """What a micro-batch adds to a sum, or its piece of what is joined."""
    return loop.scaled(x, scale) if result.is_weighed else x


def _devices(pipeline: Pipeline) -> Sequence[Any]:
    found, count = jax.devices(), pipeline.schedule.stages
    if jax.process_count() > 1:
        raise ArgumentError(
            f"{pipeline.program.name} is a pipeline, whose stages lie on the devices of one process, and "
            f"there are {jax.process_count()}. Several take replicate(program, devices)."
        )
    if len(found) < count:
        raise ArgumentError(
            f"{pipeline.program.name} is cut into {count} stages, each on a device of its own, and JAX shows "
            f"{len(found)} ({found[0].platform}). Cut it into {len(found)}, or, to try more on the host, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX starts."
        )
    return found[:count]
