"""Many steps of a small model in one call: ``step.run(state, batches, steps=k)``.

A call costs the host some microseconds however little there is to compute. So k batches are laid on top of
each other and one compiled call scans over them. Calls return before they are computed, so the next k batches
are read meanwhile. What does not fill such a group, or has another shape, runs step by step: the numbers are
those of single steps.

>>> import jax.numpy as jnp, onward as ow
>>> step = ow.compile(ow.SGD(0.5).minimize(lambda w, x: (w - x) ** 2, jnp.float32(0.0), jnp.float32(1.0)))
>>> state, outs = ManySteps(step).run(step.init(jnp.float32(0.0)), [1.0, 1.0, 0.0, 2.0, 2.0], steps=2)
>>> outs.loss.tolist(), float(state.parameters)
([1.0, 0.0, 1.0, 4.0, 0.0], 2.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from onward.core.compiler import calling
from onward.core.errors import ArgumentError
from onward.core.jaxprs.body import Body, Wire, body_of
from onward.core.jaxprs.equations import results_within
from onward.core.jaxprs.joining import as_one_call
from onward.core.primitives.table import of
from onward.core.program import Program, Replicas
from onward.core.structure import describe, expect_count
from onward.execute.feeds import Feeds, Key
from onward.execute.host_memory import in_pieces, keep_for_steps
from onward.execute.layout import Lending
from onward.execute.line import follow
from onward.execute.loop.groups import BatchGroup, Intake, StackableBatch, blaming, grouped
from onward.execute.loop.interrupt import uninterrupted, while_a_step_runs
from onward.execute.lying import lies_elsewhere
from onward.execute.memory.exhausted import is_exhausted, out_of_memory, wait_for
from onward.execute.nonfinite.checks import Arguments
from onward.execute.options import Value, all_options, refusal
from onward.execute.out import Out
from onward.execute.outs import Outs, OutsPart
from onward.execute.state import State


class OneStep(Protocol):
    """A step of any kind, as far as a run one by one needs it."""

    program: Program
    feeds: Feeds

    def __call__(self, state: State, /, *data: Any, **feed: Any) -> tuple[State, Out]:
        """One step."""


class Runnable(OneStep, Protocol):
    """A Step, as far as a run needs it."""

    @property
    def function(self) -> Callable[..., tuple[State, Out]]:
        """The pure function behind it."""


def run_apart(step: OneStep, state: State, batches: Iterable[Any], steps: int = 1) -> tuple[State, Outs]:
    """Run a step for each batch, one call each, whatever number of ``steps`` is asked for."""
    _expect(state, batches, steps)
    outs: list[OutsPart] = []
    state = _one_by_one(step, state, enumerate(batches), outs)
    return state, _of_some(outs)


class LoopSettings(NamedTuple):
    """How a Step's executables are compiled, for the loops over it: options, memory, devices."""

    options: Mapping[str, Value] = {}
    keep_memory: bool | None = None
    replicas: Replicas | None = None


class ManySteps:
    """Runs a Step over batches, k steps in one compiled call.

    Args:
        step: what runs one step.
        donates: let a call reuse the buffers of the State that it replaces.
        checks: look on the host whether labels and ids lie in their range.
        look: raises if a step before a State was not finite, as far as that is known without waiting.
        seen: is told of each call: the State before, that after it, what it returned, for which batches.
        settings: how a loop is compiled.
    """

    def __init__(
        self,
        step: Runnable,
        donates: bool = True,
        checks: bool = True,
        look: Callable[[State], None] = lambda state: None,
        seen: Callable[[State, State, Out, Sequence[Arguments]], None] = lambda *call: None,
        *,
        settings: LoopSettings = LoopSettings(),  # noqa: B008 - frozen
    ) -> None:
        self.step, self._donates, self._look, self._seen = step, donates, look, seen
        self._checks = checks and bool(step.program.bounds)
        self._settings = settings
        self._loops: dict[tuple[int, Key], list[_StepLoop]] = {}

    @property
    def compilations(self) -> int:
        """How many loops were compiled: one for each number of steps and shape of the data."""
        return sum(map(len, self._loops.values()))

    @cached_property
    def alone(self) -> str | None:
        """Why steps run one by one whatever is asked for; None if they need not.

        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.SGD(0.5).minimize(lambda w: w**2, jnp.float32(1.0)))
        >>> ManySteps(step).alone
        """
        replicas = self._settings.replicas or self.step.program.replicas
        if replicas is not None and replicas.count > 1:
            return f"it runs on {replicas.count} devices, which take their parts of every batch"
        if self.step.program.partition is not None:
            return f"it is partitioned over {self.step.program.partition}"
        if jax.default_backend() == "cpu" and _convolves(self.step.program):
            return "on a CPU a convolution in a loop takes several times as long as outside of one"
        return None

    def run(self, state: State, batches: Iterable[Any], steps: int = 1) -> tuple[State, Outs]:
        """Run a step for each batch; see ``Step.run``."""
        _expect(state, batches, steps)
        if steps == 1 or self.alone or lies_elsewhere(state.buffers):
            return run_apart(self.step, state, batches, steps)
        intake, outs = Intake(self.step.feeds, self._checks), list[OutsPart]()
        for group in grouped(map(intake, batches, count()), steps):
            state = self._together(state, group, outs)
        return state, _of_some(outs)

    def _together(self, state: State, group: BatchGroup, outs: list[OutsPart]) -> State:
        """Run a group in one call, or step by step where it has no stack."""
        stacked = None if lies_elsewhere(group.batches[0].values) else group.stacked
        if stacked is None or not (loop := self._loop(state, group)).closes:
            pairs = ((b.number, b.feed or b.data) for b in group.batches)
            return _one_by_one(self.step, state, pairs, outs)
        self._look(state)
        with while_a_step_runs():
            following, out = loop(state, stacked)
            follow(state, following)
        self._seen(state, following, out, [(b.data, b.feed) for b in group.batches])
        outs.append(OutsPart(out, len(group.batches)))
        return following

    @uninterrupted
    def _loop(self, state: State, group: BatchGroup) -> _StepLoop:
        tree: Any = jax.tree.structure(state)
        loops = self._loops.setdefault((len(group.batches), group.batches[0].key), [])
        for loop in loops:
            if loop.tree == tree:
                return loop
        loops.append(_StepLoop(self.step, state, group, self._donates, self._settings))
        return loops[-1]


class _StepLoop:
    """One compiled call of several steps: only what a step changes is carried, and donated.

    ``closes``: whether a step returns its State in the buffers in which it came; if not, the next one does.
    """

    def __init__(
        self, step: Runnable, state: State, group: BatchGroup, donates: bool, settings: LoopSettings
    ) -> None:
        self.tree: Any = jax.tree.structure(state)
        leaves = jax.tree.leaves(state)
        body = self._body(step, leaves, group.batches[0])
        changed = [i for i, wire in enumerate(body.wires[: len(leaves)]) if wire != Wire(input=i)]
        self.lending = Lending(changed, len(leaves))
        self.count = len(leaves)
        self.turn = as_one_call(body, step.program.name)
        arrays = (t for eqn in body.equations for t in results_within(eqn))
        self._options = in_pieces(arrays, settings.keep_memory) | all_options(settings.options)
        self.steps = len(group.batches)
        self.program, self.has_run = step.program, False
        self._settings = settings
        self._jitted = jax.jit(self._scan, donate_argnums=(0,) if donates else ())
        self._compiled: jax.stages.Compiled | None = None

    def _body(self, step: Runnable, leaves: Sequence[Any], batch: StackableBatch) -> Body:
        """A step from flat arrays to flat arrays."""
        ours, function = len(leaves), step.function

        def flat(*values: Any) -> list[Any]:
            state = jax.tree.unflatten(self.tree, values[:ours])
            following, out = function(state, *_data_of(step.feeds, values[ours:]))
            next_leaves, tree = jax.tree.flatten(following)
            self.closes = bool(tree == self.tree)
            results, self.out_tree = jax.tree.flatten(out)
            return [*next_leaves, *results]

        return body_of(flat, *map(_type, (*leaves, *batch.values)))

    def _scan(self, changed: Sequence[Any], kept: Sequence[Any], stacked: Sequence[Any]) -> Any:
        def turn(changed: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            found = self.turn(*self.lending.together(changed, kept), *values)
            return [found[i] for i in self.lending.reused], found[self.count :]

        return jax.lax.scan(turn, list(changed), list(stacked), length=self.steps)

    def _called(self, *arguments: Any) -> tuple[list[Any], list[Any]]:
        """Run the loop, which is compiled first, once."""
        if self._compiled is None:
            try:
                self._compiled = self._jitted.lower(*arguments).compile(self._options)
            except RuntimeError as error:
                raise refusal(error) or error from error
            keep_for_steps(self._compiled, self._settings.keep_memory, self._options)
        with calling():
            changed, results = self._compiled(*arguments)
        return changed, results

    def __call__(self, state: State, stacked: Sequence[Any]) -> tuple[State, Out]:
        leaves = jax.tree.leaves(state)
        given, kept = self.lending.apart(leaves)
        try:
            changed, results = self._called(given, kept, stacked)
            if not self.has_run:
                wait_for((changed, results))
                self.has_run = True
        except RuntimeError as error:
            if is_exhausted(error):
                raise out_of_memory(error, self.program, arrays=(*leaves, *stacked)) from error
            raise
        following = jax.tree.unflatten(self.tree, self.lending.together(changed, kept))
        return following, jax.tree.unflatten(self.out_tree, results)


def _one_by_one(
    step: OneStep, state: State, batches: Iterable[tuple[int, Any]], outs: list[OutsPart]
) -> State:
    arguments = Intake(step.feeds, False).arguments
    for number, batch in batches:
        data, feed = arguments(batch)
        try:
            state, out = step(state, *data, **feed)
        except ArgumentError as error:
            raise blaming(number, error) from error
        outs.append(OutsPart(out, None))
    return state


def _of_some(outs: list[OutsPart]) -> Outs:
    """The results of the steps; refused if there were none."""
    if not outs:
        raise ArgumentError(
            "step.run: batches is empty; expected at least one batch. An iterator can be read only once."
        )
    return Outs(outs)


def _expect(state: Any, batches: Any, steps: Any) -> None:
    """Raise unless these are a State that can be used, batches, and a number of steps."""
    expect_count(steps, "step.run: steps")
    if not isinstance(state, State):
        raise ArgumentError(
            f"step.run: the first argument is the State, not {describe(state)}. Begin with state = "
            "step.init(params); then state, outs = step.run(state, batches, steps=10)."
        )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        raise ArgumentError(
            "step.run reads batches on the host, which a function under jax.jit cannot. There, scan over the "
            "step itself: jax.lax.scan(lambda state, batch: step(state, *batch), state, stacked)."
        )
    state.expect_whole()
    if isinstance(batches, Mapping | str | bytes | np.ndarray | jax.Array) or not isinstance(
        batches, Iterable
    ):
        raise ArgumentError(
            f"step.run: batches is {describe(batches)}; expected an iterable of batches, each as one call of "
            "the step takes it. For arrays in memory: onward.batches(arrays, batch_size=32)."
        )


def _data_of(feeds: Feeds, values: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a step from the arrays that its Program reads."""
    at = dict(zip(feeds.program.inputs, values, strict=True))
    return tuple(s.unflatten(at.get(v, np.float32(0)) for v in s.variables) for s, _ in feeds.taken)


def _convolves(program: Program) -> bool:
    return any(of(name).is_slow_in_loop for op in program.ops for name in op.body.primitives)


def _type(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
