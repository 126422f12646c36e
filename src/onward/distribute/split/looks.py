"""``watch`` for a Program that is cut: trainers look at what they compute, servers at what they do.

A trainer looks at its activations and parameters, and at its gradients where each is an update of its own.
Servers look at gradients that they merge, at updates, slots and tables by rows, each at its own part; what
each saw stands in its state until the next update; ``Joined`` makes of it what one device would have seen.
The step counter, by which every k-th step is looked at, is the first server's, which tells it to all.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(6), jnp.ones((8, 6)))
>>> cut = ow.split(ow.watch(program, gradients=True, updates=True), servers=2)
>>> [[op.type for op in part.ops if op.type == "watch"] for part in (cut.trainer, *cut.servers)]
[['watch'], ['watch'], ['watch']]
>>> [v.name for v in cut.server_parts[0].given], cut.joined[0].cells[0].label
(['w[0:3]', 'step'], 'update(w)')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod

import jax.numpy as jnp

from onward.core.builder import Builder
from onward.core.errors import GraphError
from onward.core.marks import Mark
from onward.core.names import Names
from onward.core.program import Program, Variable
from onward.core.words import Pass, UpdateType
from onward.develop.watch.choice import Role, WatchEntry, variables_of
from onward.develop.watch.look import cells_of
from onward.develop.watch.reading import NOT_NOW, Cell
from onward.develop.watch.statistics import Statistic
from onward.develop.watch.watch import Watch, watching_of, with_looks
from onward.distribute.split.joined import Joined, Part, follows, of_each_part
from onward.distribute.split.shards import Shard

_UNSEEN = (
    "split: {label!r} is watched, and neither the forward and backward pass of a trainer nor the update of "
    "the servers hands it out: micro-batches keep their activations, a lazily updated table has gradients of "
    "rows alone, and tables by rows are not watched together with what trainers keep. Leave it out, or train "
    "on one machine: replicate(program, devices)."
)

Parts = Mapping[tuple[str, Statistic], Sequence[Part]]


@dataclass(frozen=True)
class Looks:
    """The parts of watches: of what trainers compute, and of what servers do.

    Attributes:
        trainer: of trainers.
        servers: of servers, and whether they look after ``guard`` or a loss scale left updates out.
    """

    trainer: tuple[Watch, ...] = ()
    servers: tuple[tuple[Watch, bool], ...] = ()

    @classmethod
    def of(
        cls, base: Program, watches: Sequence[tuple[Watch, bool]], by_row: frozenset[str], trainers: int
    ) -> Looks:
        """Divide watches between trainers and servers.

        Args:
            base: forward and backward pass of a trainer.
            watches: what is watched, and whether after ``guard``.
            by_row: the names of the tables that travel by rows.
            trainers: how many trainers' gradients a server merges.
        """

        def is_served(entry: WatchEntry) -> bool:
            by_rows = not by_row.isdisjoint(entry.names)
            merged = entry.role is Role.GRADIENT and trainers > 1
            return entry.role is Role.UPDATE or merged or by_rows or variables_of(base, entry) is None

        trainer, servers = (
            [(part, late) for how, late in watches if (part := _only(how, is_served, side)).entries]
            for side in (False, True)
        )
        return cls(tuple(how for how, _ in trainer), tuple(servers))

    def kept_whole(self, source: Program) -> frozenset[str]:
        """The parameters of which one server has all rows, for what is watched needs them in one place."""
        trained = {p.name for p, _ in source.gradients}
        found: set[str] = set()
        for how, _ in self.servers:
            for entry in how.entries:
                if trained.isdisjoint(entry.names):
                    found |= {n for name in entry.names for n in _beside(source, name) & trained}
                elif not all(map(follows, cells_of(entry, how.statistics))):
                    found |= {*entry.names}
        return frozenset(found)

    def on_server(
        self, program: Program, own: Sequence[Shard], step: Variable | None, guarded: bool
    ) -> Program:
        """The Program of a server with the ops that look before it is guarded, or with those after."""
        here = {v.name: v for v in _updated(program)} | {s.parameter.name: program[str(s)] for s in own}
        for n, (how, late) in enumerate(self.servers):
            units = (
                WatchEntry(_label(n, entry.role, name), entry.role, (here[name].name,))
                for entry in how.entries
                for name in entry.names
                if name in here
            )
            seen = tuple(dict.fromkeys(e for e in units if variables_of(program, e) is not None))
            if seen and late is guarded:
                program = with_looks(program, Watch(seen, of_each_part(how.statistics), how.every), step)
        return program

    def joined(self, programs: Sequence[Program]) -> tuple[Joined, ...]:
        """For each watch on servers, how what they see becomes what one device would see.

        Raises:
            GraphError: a value that neither trainers nor servers have.
        """
        found: dict[tuple[str, Statistic], list[Part]] = {}
        for i, program in enumerate(programs):
            for k, (watching, *_) in enumerate(watching_of(program)):
                for cell in watching.cells:
                    part = Part(i, k, cell, prod(program[cell.name].shape))
                    found.setdefault((cell.label, cell.statistic), []).append(part)
        return tuple(_joined(n, how, found) for n, (how, _) in enumerate(self.servers))


def looked_at(
    base: Program, watches: Sequence[Watch], counter: Variable | None
) -> tuple[Program, tuple[Variable, ...]]:
    """Forward and backward pass with the ops that look, and the step counter, if there is one."""
    if not watches or counter is None:
        step = None
    else:
        step = replace(counter, name=Names(base.variables).new(counter.name))
        base = replace(base, state=(*base.state, step))
    for how in watches:
        base = with_looks(base, how, step)
    return base, () if step is None else (step,)


def remembered(program: Program) -> tuple[Program, tuple[tuple[Variable, Variable], ...]]:
    """The Program whose state keeps what its last step saw, and the two Variables of each op that looks."""
    builder = Builder(program, program.ops, made_by=Pass.UPDATE)
    pairs = []
    for _, at, numbers in watching_of(program):
        step = builder.carry(f"last({at.name})", lambda: jnp.int32(NOT_NOW))
        first = partial(jnp.zeros, numbers.shape, numbers.dtype)
        last = builder.carry(f"last({numbers.name})", first)
        builder.follow({step: at, last: numbers})
        pairs.append((step, last))
    return (builder.program() if pairs else program), tuple(pairs)


def _only(how: Watch, is_served: Callable[[WatchEntry], bool], side: bool) -> Watch:
    """The entries of one side of which there are statistics."""
    entries = (e for e in how.entries if is_served(e) is side and cells_of(e, how.statistics))
    return replace(how, entries=tuple(entries))


def _beside(source: Program, name: str) -> set[str]:
    """The names of what an update reads that reads or makes a Variable of several numbers."""
    v = source.variables.get(name)
    looking = (op for op in source.ops if isinstance(op.type, Mark) and op.update is UpdateType.ACROSS)
    ops = set(source.ops if v is not None and v.shape else ()).difference(looking)
    return {x.name for op in ops if v in (*op.inputs, *op.outputs) for x in op.inputs}


def _updated(program: Program) -> Iterator[Variable]:
    """The state that an update keeps, and what it computes."""
    yield from program.state
    yield from (v for op in program.ops if op.made_by is Pass.UPDATE for v in op.outputs)


def _label(n: int, role: Role, name: str) -> str:
    """The same on all servers, for what one device has as one Variable."""
    return f"watch {n}: {role} {name}"


def _joined(n: int, how: Watch, found: Parts) -> Joined:
    """The statistics of the n-th watch, in the order of one device."""
    made: list[tuple[WatchEntry, Statistic, tuple[tuple[Part, ...], ...]]] = []
    for entry in how.entries:
        labels = [_label(n, entry.role, name) for name in entry.names]
        for statistic in cells_of(entry, how.statistics):
            needed = of_each_part([statistic])
            if any((label, s) not in found for label in labels for s in needed):
                raise GraphError(_UNSEEN.format(label=entry.label))
            columns = (tuple(p for label in labels for p in found[label, s]) for s in needed)
            made.append((entry, statistic, tuple(columns)))
    shapes = [() if follows(s) else columns[0][0].cell.shape for _, s, columns in made]
    begins = accumulate(map(prod, shapes), initial=0)
    cells = (
        Cell(entry.label, entry.role, entry.name, s, begin, shape)
        for (entry, s, _), begin, shape in zip(made, begins, shapes, strict=False)
    )
    return Joined(tuple(cells), tuple(columns for *_, columns in made))
