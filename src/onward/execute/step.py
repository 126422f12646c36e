"""One compiled training step: state and data in, state and results out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from onward.core.errors import NotPickled
from onward.core.first_use import at_first_call
from onward.core.pointing import Pointing
from onward.core.program import Op, Program, Variable
from onward.core.walk import Where, find, select
from onward.execute.executable import Executable
from onward.execute.executables import Executables
from onward.execute.initialize import first_values, where_it_is
from onward.execute.layout import Layout
from onward.execute.line import follow
from onward.execute.loop.interrupt import uninterrupted, while_a_step_runs
from onward.execute.lying import laid, lies_elsewhere
from onward.execute.many_steps import LoopSettings, ManySteps
from onward.execute.nonfinite.checks import Checks
from onward.execute.options import Value
from onward.execute.out import Out
from onward.execute.outs import Outs
from onward.execute.peers.deadline import deadline_of
from onward.execute.pinned import is_pinned
from onward.execute.places import Places
from onward.execute.spread import By
from onward.execute.state import State, expect_state
from onward.execute.tuning import StepPlan, Tuning

if TYPE_CHECKING:  # most steps run without a checkpoint
    from onward.execute.checkpoint.checkpoints import Checkpoints
    from onward.execute.checkpoint.loaded import Checkpoint

_restored = at_first_call("onward.execute.restore", "restored")


class Step(NotPickled, Pointing):
    """A Program compiled to one XLA computation; made by ``compile``.

    ``state, out = step(state, *data)`` runs it. Data of another shape is traced and compiled once more,
    then remembered. Where arrays were put on other devices, on one or sharded over several, the step runs
    there, as under ``jax.jit``: what the optimizer keeps of a parameter lies as the parameter does, and all
    state stays where it is. Under the user's own ``jax.jit``, ``jax.lax.scan`` or ``jax.vmap`` a Step is an
    ordinary pure function.
    """

    unpickled = ("A Step", "onward.save(step, path, state) writes both, onward.load_step(path) reads them.")
    advice: ClassVar[str] = "Give the one that it was made of, step.program; transforms come before compile."

    def __init__(
        self,
        program: Program,
        fetch: Sequence[str | Variable],
        donate: bool | Iterable[Where],
        check_feeds: bool = True,
        ahead: bool = True,
        tuning: Tuning | None = None,
        apart: Collection[str] | None = None,
        by: str = By.SHARD_MAP,
        deadline: float | None = None,
        keep_memory: bool | None = None,
        options: Mapping[str, Value] | None = None,
    ) -> None:
        self.program = program
        self._checks = Checks.of(program)
        fetch = fetch if self._checks is None else (*fetch, *self._checks.fetch)
        self.fetch = tuple(find(program, name).name for name in fetch)
        self.layout = Layout.of(program)
        self._donate = self._donated(donate)
        make = partial(
            Executable,
            fetch=self.fetch,
            donate=self._donate,
            by=By.of(by),
            deadline=deadline_of(deadline),
            keep_memory=keep_memory,
            options=options,
        )
        self._loops = LoopSettings(options or {}, keep_memory)
        self._known: set[Layout] = set()
        self._tuning = tuning or Tuning(is_on=False)
        tuned = partial(self._tuning, fetch=self.fetch)
        self._executables = Executables(program, make, tuned, apart, check_feeds)
        self.feeds, self.storage = self._executables.feeds, self._executables.storage
        self._first = self._executables.first
        self._places = Places(self.layout, self.storage)
        if ahead:
            self._executables.compile(self._first)

    @property
    def traces(self) -> int:
        """How often the function was traced again for data of another shape."""
        return self._executables.traces

    @uninterrupted
    def init(self, parameters: Any = None, state: Any = None, *, seed: int = 0) -> State:
        """The State before the first step: the parameters copied, everything else initialized.

        Args:
            parameters: as traced, with arrays at the leaves. They stay usable. Where the network declares its
                parameters, they need not be given; any of them can be, by name, in a dict.
            state: what the model itself carries, if the Program was traced with ``state=``.
            seed: what declared parameters are initialized from.

        Raises:
            ArgumentError: containers, shapes or dtypes that differ from the traced ones.
        """
        place = where_it_is if self.program.partition is None else self._first.place
        values = first_values(self.program, parameters, state, seed, place)
        return self._stored([values[v] for v in self.layout.variables])

    @uninterrupted
    def _stored(self, values: Sequence[Any]) -> State:
        """The State of these values as this Step stores it."""
        is_placed = self.program.replicas is not None or self.program.partition is not None
        if not is_placed:
            values = laid(self.program, self.layout.variables, values)
        if self.storage is None or (self.program.partition is None and lies_elsewhere(values)):
            placed = zip(self.layout.variables, values, strict=True)
            return State(self.layout, [self._first.place(v, x) for v, x in placed])
        named = {v.name: x for v, x in zip(self.layout.variables, values, strict=True)}
        buffers = zip(self.storage.buffers, self.storage.packed(named), strict=True)
        return State(self.layout, [self._first.place(b.variable, x) for b, x in buffers], self.storage)

    def __call__(self, state: State, /, *data: Any, **feed: Any) -> tuple[State, Out]:
        """Run one step.

        Args:
            state: what the step before returned, or ``init``.
            data: in the order in which the function takes or declares it.
            feed: data by name.

        Raises:
            ArgumentError: data of the wrong number, structure, shape or dtype.
            StateError: a State that was given to a step before, or that lacks what this Program keeps.
            NonFiniteError: an earlier step was not finite: see ``check_finite``, ``guard(program, "stop")``.
            OutOfMemoryError: a device has not the memory for it; the error says what would lie there.
        """
        whose, state = state, self._accepted(state)
        given = state
        if self._checks is not None:
            self._checks.look(state)
        executable, values, filling = self._executables.find(state, data, feed)
        own = self._places.own(state, executable)
        kinds = {*map(type, own), *map(type, values)}  # at C speed: a State may have thousands of arrays
        if any(issubclass(kind, jax.core.Tracer) for kind in kinds):
            changed, results = executable.function(own, values)
            following = self._places.following(state, executable, changed)
        else:
            if not executable.is_compiled:
                self._executables.compile(executable)
            with while_a_step_runs() if executable.is_alone else nullcontext():
                lying, changed, results = executable(own, values)
                if lying is not own:
                    state = self._places.following(state, executable, lying)
                following = self._places.following(state, executable, changed)
                follow(whose, following)
        if filling is not None:
            results = executable.emptied(results, filling)
        out = Out(executable.results, results)
        if self._checks is not None:
            self._checks.seen(given, following, out, [(data, feed)])
        return following, out

    def run(self, state: State, batches: Iterable[Any], steps: int = 1) -> tuple[State, Outs]:
        """Run a step for each batch, ``steps`` of them in one compiled call: for small models.

        The call of a small model costs more than its arithmetic. Nothing waits: calls return before they are
        computed, and the next batches are read meanwhile. The numbers are those of single steps. Batches that
        do not fill a call, or have another shape than those before them, run one by one; so do Programs for
        several devices, arrays that were put on other devices and, on a CPU, convolutions.

        Args:
            state: what the step before returned, or ``init``. It is spent, as by single steps.
            batches: any iterable, read to its end. A batch is a tuple of the data in the order in which the
                function takes it, a dict by name, or an array alone.
            steps: how many steps one call computes. Each number and shape of the data is compiled once.

        Returns:
            The State after the last step, and what the steps returned, one more axis in front.

        Raises:
            ArgumentError: no batches, or one of the wrong structure, shape or dtype, named by its number.
            StateError: a State that was given to a step before.
            NonFiniteError: an earlier step was not finite: see ``check_finite``, ``guard(program, "stop")``.

        Example:
            >>> import jax.numpy as jnp, onward as ow
            >>> one = jnp.float32(1.0)
            >>> step = ow.compile(ow.SGD(0.25).minimize(lambda w, x: (w - x) ** 2, one, one))
            >>> state, outs = step.run(step.init(one), [3.0, 2.0, 2.0, 1.0, 0.0], steps=2)
            >>> outs.loss.tolist(), float(state.parameters)
            ([4.0, 0.0, 0.0, 1.0, 2.25], 0.75)
        """
        state = self._in_memory(state) if isinstance(state, State) else state
        return self._many.run(state, batches, steps)

    def restore(
        self,
        source: Checkpoint | Checkpoints | str | PathLike[str],
        *,
        which: Any = "latest",
        fallback: bool = False,
        reader: Any = None,
    ) -> State:
        """The State that ``checkpoints.save(state, ...)`` saved, bit for bit.

        Args:
            source: a folder of checkpoints, or one of them: its path, or what ``checkpoints.load()`` gave.
            which: ``"latest"``, ``"best"``, or the path of one.
            fallback: where one is damaged, take the one before.
            reader: continues where the reader stood that was saved with the State.

        Raises:
            CheckpointError: nothing whole is there, or something that this step keeps is not in it.
            ArgumentError: no such source; a reader, and the checkpoint has no position.

        Example:
            >>> import tempfile, jax.numpy as jnp, onward as ow
            >>> step = ow.compile(ow.SGD(0.25).minimize(lambda w: w**2, jnp.float32(1.0)))
            >>> state, out = step(step.init(jnp.float32(1.0)))
            >>> with ow.Checkpoints(tempfile.mkdtemp()) as checkpoints:
            ...     path = checkpoints.save(state, 1)
            >>> float(step.restore(path).parameters)
            0.5
        """
        return self._stored(_restored(self.layout, source, which, fallback, reader))

    @property
    def compilations(self) -> int:
        """How many executables were compiled: for each shape of the data, each way to lie."""
        return self._executables.compilations

    @cached_property
    def _many(self) -> ManySteps:
        donates = self._donate == {v.name for v in self.layout.changed}
        looks = () if self._checks is None else (self._checks.look, self._checks.seen)
        settings = self._loops._replace(replicas=self._first.program.replicas)
        return ManySteps(self, donates, self._executables.checks, *looks, settings=settings)

    @property
    def function(self) -> Callable[..., tuple[State, Out]]:
        """The pure function behind the step, ``(state, *data) -> (state, out)``: never donates."""

        def pure(state: State, /, *data: Any, **feed: Any) -> tuple[State, Out]:
            state = self._accepted(state)
            state.expect_whole()
            executable, values, filling = self._executables.find(state, data, feed)
            changed, results = executable.function(self._places.own(state, executable), values)
            results = executable.emptied(results, filling)
            return self._places.following(state, executable, changed), Out(executable.results, results)

        return pure

    def plan(self) -> StepPlan:
        """The changes made to the Program before it was compiled, and the buffers that hold its state.

        Example:
            >>> import functools, jax.numpy as jnp, onward as ow
            >>> def loss(params, x):
            ...     return jnp.mean(functools.reduce(lambda h, w: h + jnp.tanh(h @ w), params, x) ** 2)
            >>> program = ow.SGD(0.1).minimize(loss, [jnp.eye(4)] * 6, jnp.ones((2, 4)))
            >>> print(ow.compile(program, roll=True).plan())
            loss: 55 ops, compiled as 11
            rolled: 6 layers of 3 ops in one loop, 1 parameter of each stacked
            lean: the backward pass computes again what is cheaper than to keep
            8 state Variables in 3 buffers
            params/*  float32[6,4,4]  6 stacked  a rolled run reads them as one
            2 others                  each in its own
        """
        alone = self._many.alone
        run = f"run: one step per call: {alone}" if alone else ""
        notes = (*self._executables.notes, *filter(None, (run, self._first.host_memory)))
        return StepPlan(self.program, self._first.program, notes, self.storage)

    def executable(self, state: State, /, *data: Any, **feed: Any) -> Executable:
        """The compiled Executable that runs this data, for inspection."""
        executable, _, _ = self._executables.find(self._accepted(state), data, feed)
        self._executables.compile(executable)
        return executable

    def prepared(self, state: State, /, *data: Any) -> tuple[Executable, Sequence[Any], Sequence[Any]]:
        """The Executable for this data, which need not be compiled, and the arrays that it takes."""
        state = self._accepted(state)
        executable, values, _ = self._executables.find(state, data, {})
        return executable, self._places.own(state, executable), self.feeds.convert(values)

    @property
    def cores(self) -> int:
        """How many cores of a CPU it may take, each as a device."""
        return 1 if self._tuning.cores is None else self._tuning.cores.count

    def uncompiled(self, fission: bool = True, attention: bool = False) -> Step:
        """The same Step before it is compiled, which donates all that changes."""
        tuning = replace(self._tuning, fission=fission, attention=attention)
        apart = None if self.storage is None else ()
        return Step(self.program, self.fetch, True, self._executables.checks, False, tuning, apart)

    def compiled_text(
        self, scopes: Callable[[Program], Mapping[Op, str]], state: State, /, *data: Any, **feed: Any
    ) -> tuple[str, Sequence[Any], Mapping[str, str]]:
        """The compiled XLA computation that runs these arrays where they lie, their shardings, and names.

        It is compiled once more, with its ops in these scopes.
        """
        state = self._accepted(state)
        found, values, _ = self._executables.find(state, data, feed)
        executable = self._executables.make(found.unpacked, storage=state.storage, scopes=scopes)
        executable.compile()
        text, shardings = executable.text_for(self._places.own(state, executable), values)
        return text, shardings, executable.argument_names

    def expect_going(self, state: State) -> None:
        """Wait for a State; raise ``NonFiniteError`` if ``guard(..., "stop")`` or a check stopped there."""
        if self._checks is not None:
            self._checks.look(self._accepted(state), wait=True)

    def _donated(self, donate: bool | Iterable[Where]) -> frozenset[str]:
        """The names of the Variables whose buffers a step may reuse."""
        if isinstance(donate, bool):
            return frozenset(v.name for v in self.layout.changed if donate)
        return frozenset(v.name for v in select(self.layout.changed, donate, "donate"))

    def _accepted(self, state: State) -> State:
        """A State that holds what this Program keeps, stored as this Step does if it is one of its own."""
        expect_state(state)
        if state.layout is self.layout:
            is_packed = state.storage is not None or self.storage is None or lies_elsewhere(state.buffers)
            return self._in_memory(state) if is_packed else self._stored(state.values)
        if state.layout not in self._known:
            begun = {} if self._checks is None else self._checks.begun
            added = {v: x for v, x in begun.items() if v.name not in state.layout.position}
            self.layout.expect_all(state.layout, self.program.name, added)
            if added:
                values = {v.name: jax.numpy.array(x, v.dtype) for v, x in added.items()}
                values |= {name: state[name] for name in state}
                return self._stored([values[v.name] for v in self.layout.variables])
            self._known.add(state.layout)
        return self._in_memory(state)

    def _in_memory(self, state: State) -> State:
        """The State with what lies in host memory between two steps there; the same State if it does."""
        names = self._first.pinned
        if not names:
            return state
        if state.storage is not None and state.storage.mixes(names):
            return self._stored([state[v.name] for v in self.layout.variables])
        held = (
            state.layout.variables if state.storage is None else [b.variable for b in state.storage.buffers]
        )
        pairs = zip(held, state.buffers, strict=True)
        buffers = [self._first.place(v, x) if v.name in names and not is_pinned(x) else x for v, x in pairs]
        is_same = all(x is y for x, y in zip(buffers, state.buffers, strict=True))
        return state if is_same else State(state.layout, buffers, state.storage)

    def __copy__(self) -> Step:
        return self

    def __deepcopy__(self, memo: Any) -> Step:
        return self

    def __repr__(self) -> str:
        return f"Step({self.program.name!r}, {self.compilations} compiled)"
