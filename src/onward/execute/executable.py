"""A Program at one set of data shapes: as a pure function, and as one compiled XLA computation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec, Sharding

from onward.core.compiler import calling
from onward.core.errors import OutOfMemoryError, PeerError, StateError
from onward.core.homes import own_scopes
from onward.core.lower import lower
from onward.core.meshes import specs_of
from onward.core.placement import whole_shape
from onward.core.program import Op, Program, Variable
from onward.core.words import Placement
from onward.develop.watch.watch import watching_of
from onward.distribute.split.in_words import fingerprint
from onward.execute.host_memory import arrays_of, in_pieces, keep_for_steps
from onward.execute.layout import Layout, Lending
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.lying import Lying, fed_by_all, homes_of, lying, within
from onward.execute.memory.exhausted import is_exhausted, out_of_memory, wait_for
from onward.execute.meshed import Meshed
from onward.execute.options import Value, all_options, refusal
from onward.execute.out import Results
from onward.execute.peers.peers import Peers
from onward.execute.pinned import bringing, in_memory, on_the_device, pinned_names
from onward.execute.pinned import shardings as pinned_shardings
from onward.execute.portions import Filling
from onward.execute.processes import is_in_all, on_this_process, step_label
from onward.execute.spread import By, Spread
from onward.execute.state import SPENT, is_deleted
from onward.execute.storage.packing import packed
from onward.execute.storage.storage import Storage

if TYPE_CHECKING:  # most steps fill up nothing
    from onward.execute.filler import FilledEnd


class Executable:
    """A Program ready to run: by ``function`` under a trace, by a call on arrays.

    With a storage, its state is the buffers of that: ``layout`` is theirs, ``unpacked`` the Program before.
    ``scopes`` are those that its instructions have, for each op.
    """

    compilations = 0
    host_memory = ""  # what becomes of temporary arrays, in words
    _compiled: jax.stages.Compiled | None = None
    _peers: Peers | None = None
    _fingerprint = ""  # of what all processes have to run alike
    _has_run = False

    def __init__(
        self,
        program: Program,
        fetch: Sequence[str],
        donate: Collection[str],
        by: By = By.SHARD_MAP,
        deadline: float | None = None,
        storage: Storage | None = None,
        keep_memory: bool | None = None,
        scopes: Callable[[Program], Mapping[Op, str]] = own_scopes,
        options: Mapping[str, Value] | None = None,
    ) -> None:
        watching = watching_of(program)
        looked_at = (v for _, *pair in watching for v in pair)
        wanted = tuple(dict.fromkeys((*program.outputs, *(program[name] for name in fetch), *looked_at)))
        self.results = Results(wanted, program.loss, program.signature, watching)
        self.unpacked = program
        program, wanted, donate, specs = _stored(program, wanted, donate, storage)
        self.program = program
        self.layout = Layout.of(program)
        self.pinned = pinned_names(program)
        following = [program.next_state[v] for v in self.layout.changed]
        self._spread = _laid_out(program, by, specs, following, wanted)
        self.scopes = scopes(program)
        computed = [*following, *on_the_device(program, wanted)]
        run = bringing(lower(program, computed, at_once=True, scopes=self.scopes), program, computed)
        self._run = run if self._spread is None else self._spread.over_devices(run)
        self._order = [self.layout.position[v.name] for v in program.state]
        reused = [i for i, v in enumerate(self.layout.changed) if v.name in donate]
        self._lending = Lending(reused, len(self.layout.variables))
        self._returned = Lending(reused, len(self.layout.changed))
        # Host devices share one pool of threads: a second step in flight can starve the collectives.
        several = self._spread is not None and self._spread.mesh.size > 1
        self._waits = several and jax.default_backend() == "cpu"
        self._keep_memory, self._options = keep_memory, options or {}
        self._deadline = deadline
        self._elsewhere: dict[Lying, tuple[Lying, jax.stages.Compiled]] = {}

    def function(self, own: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The state that changed, and the results, from the whole state and the data."""
        found = self._run([own[i] for i in self._order], values)
        count = len(self.layout.changed)
        return found[:count], found[count:]

    @property
    def text(self) -> str:
        """The compiled XLA computation as text; empty before it is compiled."""
        found = self._compiled.as_text() if self._compiled is not None else None
        return found or ""

    @property
    def memory(self) -> Any:
        """The bytes that XLA plans to take on each device, as it tells them; None before it is compiled."""
        return None if self._compiled is None else self._compiled.memory_analysis()

    @property
    def is_compiled(self) -> bool:
        """Whether it can be called on arrays."""
        return self._compiled is not None

    @property
    def is_shared(self) -> bool:
        """Whether its arrays lie over several processes."""
        return self._spread is not None and self._spread.is_shared

    @property
    def is_alone(self) -> bool:
        """Whether it runs without waiting for other processes."""
        return self._peers is None

    def compile(self, options: Mapping[str, Value] | None = None) -> None:
        """Compile ahead of time, with the buffers of the changing state donated."""
        self._compiled = self._compiled_with(self._shardings, options)
        self.host_memory = keep_for_steps(self._compiled, self._keep_memory, self._all_options)
        if self.is_shared:
            self._peers = Peers.meet(self._deadline)
            self._fingerprint = fingerprint(self.program)

    @cached_property
    def _all_options(self) -> dict[str, Any]:
        return in_pieces(arrays_of(self.program), self._keep_memory) | all_options(self._options)

    @property
    def _shardings(self) -> Mapping[str, Any]:
        if self._spread is None:
            return pinned_shardings(self._groups, self.pinned)
        return self._spread.shardings(*self._groups)

    def lowered(self, shardings: Mapping[str, Any] | None = None) -> jax.stages.Lowered:
        """The step as XLA is given it; without shardings, as its Program is laid out."""
        lowered: jax.stages.Lowered = self.jitted(shardings).lower(*self.arguments)
        return lowered

    @property
    def arguments(self) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
        """The types of the buffers that the step reuses, of those that it only reads, and of the data."""
        return tuple(tuple(map(self._type, group)) for group in self._groups)

    @property
    def _groups(self) -> tuple[Sequence[Variable], ...]:
        return (*self._lending.apart(self.layout.variables), self.program.inputs)

    @property
    def argument_names(self) -> dict[str, str]:
        """The names of state and data by those that the arguments have in the compiled text."""
        groups = zip(("reused", "lent", "values"), self._groups, strict=True)
        return {f"{word}[{i}]": v.name for word, group in groups for i, v in enumerate(group)}

    def grouped(self, own: Sequence[Any], values: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        """Arrays as ``arguments`` groups their types."""
        return (*self._lending.apart(own), tuple(values))

    def jitted(self, shardings: Mapping[str, Any] | None = None) -> Any:
        """The step under ``jax.jit``, not yet lowered."""
        shardings = self._shardings if shardings is None else shardings

        def split(reused: Any, lent: Any, values: Any) -> tuple[Any, list[Any]]:
            changed, results = self.function(self._lending.together(reused, lent), values)
            return self._returned.apart(changed), results

        name = self.program.name
        split.__name__ = split.__qualname__ = name if name.isidentifier() else "step"
        # JAX gives each donated buffer to the next result of its type, whatever memory either lies in. So
        # what replaces donated state comes first, and state that nothing reads is not left out: the buffer
        # of another may be in host memory.
        if "out_shardings" in shardings:
            following, results = shardings["out_shardings"]
            shardings = {**shardings, "out_shardings": (self._returned.apart(following), results)}
        keep_unused = bool(self.pinned)
        return jax.jit(split, donate_argnums=(0,), keep_unused=keep_unused, **shardings)

    @uninterrupted
    def _compiled_with(
        self, shardings: Mapping[str, Any], options: Mapping[str, Value] | None = None
    ) -> jax.stages.Compiled:
        self.compilations += 1
        try:
            chosen: dict[str, Any] = dict(options or self._all_options)
            return self.lowered(shardings).compile(chosen)
        except RuntimeError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            if is_exhausted(error):
                raise self._out_of_memory(error) from error
            raise

    def _type(self, v: Variable) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(whole_shape(v, self.program.replicas), v.dtype)

    @property
    def shardings(self) -> list[Any]:
        """Where the compiled step takes its arguments from."""
        return [] if self._compiled is None else jax.tree.leaves(self._compiled.input_shardings)

    def text_for(self, own: Sequence[Any], values: Sequence[Any]) -> tuple[str, list[Any]]:
        """The compiled text that runs arrays where they lie, and their shardings there."""
        homes = homes_of(self.program, (*self.layout.variables, *self.program.inputs), (*own, *values))
        if self._spread is not None or homes.count(None) == len(homes):
            return self.text, self.shardings
        compiled = self._compiled_for(homes)
        return compiled.as_text() or "", jax.tree.leaves(compiled.input_shardings)

    def place(self, v: Variable, value: Any) -> Any:
        """The value of a state Variable where the compiled step takes it from."""
        return (
            in_memory(value, v.name in self.pinned) if self._spread is None else self._spread.place(v, value)
        )

    def feed(self, values: Sequence[Any]) -> Sequence[Any]:
        """The data of this process as its part of that of all."""
        if self._spread is None or not self._spread.is_shared:
            return values
        pairs = zip(self.program.inputs, values, strict=True)
        return [self._spread.feed(v, x) for v, x in pairs]

    def home(self, own: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """State and data where the compiled step takes them from; the same arrays if they lie there."""
        (reused, lent, data), _ = self._compiled.input_shardings  # type: ignore[union-attr]
        placed = zip(own, self.layout.variables, self._lending.together(reused, lent), strict=True)
        state = [x if _lies(x, home) else self._moved(x, v, home) for x, v, home in placed]
        return state, [x if _lies(x, h) else jax.device_put(x, h) for x, h in zip(values, data, strict=True)]

    def _moved(self, value: Any, v: Variable, home: Sharding) -> Any:
        (value,) = on_this_process([value])
        return jax.device_put(value, home) if self._spread is None else self._spread.place(v, value)

    def of_all(self, results: Sequence[Any]) -> Sequence[Any]:
        """The results of this process with those of all others, which call this together."""
        if self._peers is None or self._spread is None:
            return results
        gather = partial(self._spread.of_all, results)
        label = f"The results of Program {self._fingerprint}"
        return self._peers.run(gather, self._deadline, label)

    def emptied(self, results: Sequence[Any], filling: Filling | FilledEnd | None) -> list[Any]:
        """The results without the rows that only filled up the batch."""
        if filling is not None and not isinstance(filling, Filling):
            return filling.emptied(self.results.variables, results)
        if filling is None or self._spread is None:
            return list(results)
        is_sharded = [placement is Placement.SHARDED for placement in self._spread.results]
        kept = iter(filling.emptied(list(compress(results, is_sharded))))
        return [next(kept) if sharded else x for x, sharded in zip(results, is_sharded, strict=True)]

    def __call__(self, own: Sequence[Any], values: Sequence[Any]) -> tuple[Sequence[Any], Any, list[Any]]:
        """Run on arrays; returns the state as it lay for that, what changed of it, and the results.

        Raises:
            StateError: some of the state was given to a step before.
            PeerError: another process did not take part.
            OutOfMemoryError: a device has not the memory for it.
        """
        try:
            if self._peers is not None:
                return self._run_together(*self.home(own, values), self._peers)
            if self._elsewhere and (known := self._elsewhere.get(lying((*own, *values)))) is not None:
                return self._run_elsewhere(own, values, *known)
            try:
                return own, *self._run_compiled(own, values)
            except ValueError:
                if self._spread is None:
                    pairs = zip(self.layout.variables, on_this_process(own), strict=True)
                    own = [self.place(v, x) for v, x in pairs]
                    return self._run_where_they_lie(own, on_this_process(values))
                moved = self.home(own, values)
                if all(x is y for x, y in zip((*moved[0], *moved[1]), (*own, *values), strict=True)):
                    raise
                return moved[0], *self._run_compiled(*moved)
        except PeerError:
            raise
        except (RuntimeError, ValueError) as error:
            if is_exhausted(error):
                raise self._out_of_memory(error, (*own, *values)) from error
            if any(map(is_deleted, own)):
                raise StateError(SPENT) from error
            raise

    def _run_where_they_lie(
        self, own: Sequence[Any], values: Sequence[Any]
    ) -> tuple[Sequence[Any], Any, list[Any]]:
        """Run on the devices that the arrays were put on, compiled for them."""
        variables = (*self.layout.variables, *self.program.inputs)
        homes = homes_of(self.program, variables, (*own, *values))
        if homes.count(None) == len(homes):
            return own, *self._run_compiled(own, values)
        known = dict(self._elsewhere.values()).get(homes) or self._compiled_for(homes)
        self._elsewhere[lying((*own, *values))] = homes, known
        return self._run_elsewhere(own, values, homes, known)

    def _compiled_for(self, homes: Lying) -> jax.stages.Compiled:
        """An executable for arrays that lie so, which leaves the state where it was."""
        inside = [s and within(s) for s in homes]
        own, values = inside[: len(self.layout.variables)], inside[len(self.layout.variables) :]
        following = list(homes[: len(self.layout.changed)])
        return self._compiled_with(
            {"in_shardings": (*self._lending.apart(own), tuple(values)), "out_shardings": (following, None)}
        )

    def _run_elsewhere(
        self, own: Sequence[Any], values: Sequence[Any], homes: Lying, compiled: jax.stages.Compiled
    ) -> tuple[Sequence[Any], Any, list[Any]]:
        own = [
            x if _lies(x, s) and x.committed else jax.device_put(x, s)
            for x, s in zip(own, homes, strict=False)
        ]
        values = fed_by_all(self.program, values, homes[len(own) :])
        changed, results = self._called(compiled, own, values)
        self._wait(changed, results, jax.default_backend() == "cpu")
        return own, changed, results

    def _run_together(
        self, own: Sequence[Any], values: Sequence[Any], peers: Peers
    ) -> tuple[Sequence[Any], Any, list[Any]]:
        """Run in all processes, none of which waits for another longer than until the deadline."""
        fed = {v.name: x for v, x in zip(self.program.inputs, values, strict=True)}
        label = step_label(
            self._fingerprint, fed, lambda name: is_in_all(fed[name].sharding, fed[name].shape)
        )
        changed, results = peers.run(partial(self._run_compiled, own, values), self._deadline, label)
        return own, changed, self._spread.local(results)  # type: ignore[union-attr]

    def _run_compiled(self, own: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        assert self._compiled is not None, "compile comes first"
        changed, results = self._called(self._compiled, own, values)
        self._wait(changed, results, self._waits)
        return changed, results

    def _called(
        self, compiled: jax.stages.Compiled, own: Sequence[Any], values: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        with calling():
            changed, results = compiled(*self._lending.apart(own), tuple(values))
        return self._returned.together(*changed), results

    def _wait(self, changed: Sequence[Any], results: Sequence[Any], waits: bool) -> None:
        """Wait where that is needed, and until a first run has shown that memory is enough.

        A device computes, and may find that it lacks memory, after the call has returned.
        """
        if self._peers is not None or not self._has_run:
            wait_for((changed, results))
            self._has_run = True
        elif waits:
            jax.block_until_ready(results)

    def _out_of_memory(self, error: Exception, arrays: Sequence[Any] = ()) -> OutOfMemoryError:
        donated = {self.layout.changed[i].name for i in self._lending.reused}
        return out_of_memory(error, self.unpacked, self._compiled, donated, arrays)


def _stored(
    program: Program, wanted: tuple[Variable, ...], donate: Collection[str], storage: Storage | None
) -> tuple[Program, tuple[Variable, ...], Collection[str], dict[str, PartitionSpec]]:
    """A Program over the buffers of a storage, what is wanted of it and donated, and how state is split."""
    specs = specs_of(program)
    if storage is None:
        return program, wanted, donate, specs
    program = packed(program, storage, wanted)
    return program, program.outputs, storage.whole(donate), specs | storage.specs(specs)


def _laid_out(
    program: Program,
    by: By,
    specs: Mapping[str, PartitionSpec],
    following: Sequence[Variable],
    wanted: Sequence[Variable],
) -> Spread | Meshed | None:
    """How the arrays of a Program lie over devices; None if it says nothing of them."""
    if program.replicas is not None:
        return Spread(program, following, wanted, by)
    return None if program.partition is None else Meshed(program, specs, following, wanted)


def _lies(value: Any, home: Sharding | None) -> bool:
    """Whether an array lies where it is to lie; what is not read, or no array yet, may lie anywhere."""
    if home is None or not isinstance(value, jax.Array):
        return True
    return value.sharding.is_equivalent_to(home, value.ndim)
