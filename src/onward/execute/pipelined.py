"""A pipeline on its devices: one executable for each stage and work, issued in the order of the schedule.

The host only issues: calls return before they are computed, so that the devices work at once, each in the
order of its own stage. A value is sent as soon as it is issued, and let go after its last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, ClassVar

import jax

from onward.core.compiler import calling
from onward.core.errors import ArgumentError, NotPickled
from onward.core.pointing import Pointing
from onward.core.program import Variable
from onward.core.structure import describe
from onward.core.walk import Where, select
from onward.distribute.pipeline.cut import Pipeline
from onward.distribute.split.in_words import fingerprint
from onward.execute.checkpoint.checkpoints import Checkpoints
from onward.execute.checkpoint.loaded import Checkpoint
from onward.execute.feeds import Feeds, key_of
from onward.execute.filler import BatchFiller
from onward.execute.initialize import first_values
from onward.execute.layout import Layout
from onward.execute.line import follow
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.many_steps import run_apart
from onward.execute.options import OptionSet, Value, option_set
from onward.execute.out import Out, Results
from onward.execute.outs import Outs
from onward.execute.peers.deadline import deadline_of
from onward.execute.peers.peers import Peers
from onward.execute.pipeline_run import PipelineRun
from onward.execute.processes import expect_alike, lies_in_a_stage, rows_of_all, step_label
from onward.execute.restore import restored
from onward.execute.stage_executables import StageExecutables
from onward.execute.state import State, expect_state

_NOT_YET = (
    "compile: {word} says how one Program runs, and a Pipeline is one for each stage. Leave it out{instead}."
)


def pipelined(
    pipeline: Any,
    donate: bool | Iterable[Where],
    check_feeds: bool,
    options: Any,
    deadline: float | None,
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
    return PipelineStep(pipeline, donate, check_feeds, found.compiler, deadline)


class PipelineStep(NotPickled, Pointing):
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
        >>> round(float(out.loss), 3), state["w2"].devices() == {jax.devices()[1]}
        (63.369, True)
    """

    unpickled = ("A PipelineStep", "Make the Pipeline again where it is needed, and restore a checkpoint.")
    advice: ClassVar[str] = (
        "Give the one that was cut, step.pipeline.program; transforms come before pipeline and compile."
    )
    fetch: tuple[str, ...] = ()
    traces = 0  # data of another shape is refused

    def __init__(
        self,
        pipeline: Pipeline,
        donate: bool | Iterable[Where] = True,
        check_feeds: bool = True,
        options: Mapping[str, Value] | None = None,
        deadline: float | None = None,
    ) -> None:
        self.pipeline, self.program = pipeline, pipeline.accumulated
        self.layout = Layout.of(self.program)
        self._checks = check_feeds and bool(self.program.bounds)
        self.feeds = Feeds(self.program)
        self._shapes = key_of(self.program.inputs)
        changed = self.layout.changed
        chosen = select(changed, () if isinstance(donate, bool) else donate, "donate")
        chosen = changed if donate is True else chosen
        self.stages = StageExecutables(pipeline, {v.name for v in chosen}, options or {})
        self._results = Results(self.program.outputs, self.program.loss, self.program.signature)
        self._split = {v.name for v in self.stages.split}
        self._deadline = deadline_of(deadline)
        self._peers = Peers.meet(self._deadline) if self.is_shared else None
        self._filler = None if self.is_shared else _filler(pipeline)
        self._fingerprint = fingerprint(self.program) if self.is_shared else ""

    @property
    def is_shared(self) -> bool:
        """Whether its stages lie on devices of several processes."""
        return self.stages.rows.is_shared

    @property
    def compilations(self) -> int:
        """How many executables were compiled: all before the first step."""
        return self.stages.compilations

    @uninterrupted
    def init(self, parameters: Any = None, state: Any = None, *, seed: int = 0) -> State:
        """The State before the first step, each value with the stage that owns it; see ``Step.init``.

        Raises:
            ArgumentError: containers, shapes or dtypes that differ from the traced ones.
        """
        values = first_values(self.program, parameters, state, seed, self._placed)
        return State(self.layout, [values[v] for v in self.layout.variables])

    def run(self, state: State, batches: Iterable[Any], steps: int = 1) -> tuple[State, Outs]:
        """Run a step for each batch, one by one, whatever number of ``steps``; see ``Step.run``.

        Raises:
            ArgumentError: no batches, or one of the wrong structure, shape or dtype, named by its number.
            StateError: a State that was given to a step before.
        """
        return run_apart(self, state, batches, steps)

    def expect_going(self, state: State) -> None:
        """Return, as ``Step`` does of a Program without checks: nothing stops a pipeline.

        Raises:
            ArgumentError: something else than a State.
        """
        expect_state(state)

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
        home = self.stages.home[v.name]
        if self.is_shared and not lies_in_a_stage(value) and getattr(value, "sharding", None) != home:
            expect_alike(self.program.name, v.name, value)
        return self.stages.rows.put(value, home)

    @uninterrupted
    def __call__(self, state: State, /, *data: Any, **feed: Any) -> tuple[State, Out]:
        """Run one step on a whole batch.

        Raises:
            ArgumentError: data of another number, structure, shape or dtype than was traced.
            StateError: a State that was given to a step before, or that lacks what this Program keeps.
        """
        values = self._fed(data, feed)
        filling = None if self._filler is None else self._filler.filling(values)
        if filling is not None and self._filler is not None:
            values = self._filler.filled(values, filling)
        own = self._own(state)
        if self._peers is None:
            changed, results = self._run(own, values)
        else:
            run = partial(self._run_together, own, values)
            changed, results = self._peers.run(run, self._deadline, self._label(values))
        following = State(self.layout, changed)
        follow(state, following)
        if filling is not None:
            results = filling.emptied(self._results.variables, results)
        return following, Out(self._results, results)

    def _run(self, own: dict[str, Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The state after a step on a whole batch, and its results."""
        self._expect_cut_for(values)
        with calling():
            run = PipelineRun(self.stages, own, dict(zip(self._names, values, strict=True)))
            run.micro_batches()
            run.update()
        changed = [run.following(v) for v in self.layout.variables]
        return changed, [run.result(v) for v in self.program.outputs]

    def _run_together(self, own: dict[str, Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run in all processes, each of which feeds its part of the batch."""
        pairs = zip(self._names, values, strict=True)
        found = self._run(own, [rows_of_all(x) if name in self._split else x for name, x in pairs])
        jax.block_until_ready(found)
        return found

    def _label(self, values: Sequence[Any]) -> str:
        """The Program and the data, in words that have to be the same in all processes."""
        fed = dict(zip(self._names, values, strict=True))
        return step_label(self._fingerprint, fed, lambda name: name not in self._split)

    @property
    def _names(self) -> list[str]:
        return [v.name for v in self.program.inputs]

    def _fed(self, data: tuple[Any, ...], feed: Mapping[str, Any]) -> Sequence[Any]:
        values = self.feeds.read(self.feeds.named(data, feed) if feed else data)
        if self._checks:
            self.feeds.check_bounds(values)
        return self.feeds.convert(values)

    def _expect_cut_for(self, values: Sequence[Any]) -> None:
        for v, x in zip(self.program.inputs, values, strict=True):
            if tuple(x.shape) != v.shape:
                raise ArgumentError(
                    f"{self.program.name}: {v.name!r} is {x.dtype}{list(x.shape)}; the pipeline was cut for "
                    f"{v.type}. Make one for batches of this length: pipeline(program traced for it, ...). A "
                    "shorter last batch is left out by batches(..., drop_last=True)."
                )

    def _own(self, state: State) -> dict[str, Any]:
        """The values of a State, each with the stage that owns it."""
        expect_state(state)
        if any(isinstance(x, jax.core.Tracer) for x in state.buffers):
            raise ArgumentError(
                "The step of a pipeline is many executables on several devices, so it cannot be traced: call "
                "it outside of jax.jit, jax.lax.scan and jax.vmap."
            )
        state.expect_whole()
        self.layout.expect_all(state.layout, self.program.name)
        return {v.name: self._placed(v, state[v.name]) for v in self.program.state}

    def __repr__(self) -> str:
        schedule = self.pipeline.schedule
        return f"PipelineStep({self.program.name!r}, {schedule.stages} stages, {schedule.name})"


def _filler(pipeline: Pipeline) -> BatchFiller | None:
    """The filler for batches shorter than the pipeline was cut for; None where nothing weighs examples."""
    how = pipeline.loop.how
    if how.weight is None:
        return None
    rows, parts = how.rows(pipeline.accumulated), f"the {how.steps} micro-batches of the pipeline"
    return BatchFiller(pipeline.program, how.split, how.weight, lambda fed: max(fed, rows), parts)
