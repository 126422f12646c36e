"""A server's memory: parameters, slots, version and ledger, which change together or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from onward.core.errors import ArgumentError, ClusterError, NonFiniteError
from onward.core.structure import is_count
from onward.core.words import Kind
from onward.distribute.split.cut import Split
from onward.fleet.faults import Faults
from onward.fleet.fence import Epoch, ServerPlace
from onward.fleet.frame import Change
from onward.fleet.holding import Gradients, Holding, Values
from onward.fleet.logged import flat, unflat
from onward.fleet.messages import Push
from onward.fleet.record import Store
from onward.fleet.recorded import Record, Replay

Ledger = dict[int, tuple[int, int]]
NONE: tuple[int, int] = (0, -1)


@dataclass(frozen=True)
class Durability:
    """When a server writes its record.

    Attributes:
        every: after how many updates; None: never.
        fsync: whether a record outlives the machine, and not only the process.
    """

    every: int | None = 1
    fsync: bool = False

    def __post_init__(self) -> None:
        if not (self.every is None or is_count(self.every)):
            raise ArgumentError(
                f"Durability: every is {self.every!r}; expected a number of updates, at least 1, or None."
            )


class Keeper:
    """The state of a server in memory and on the disk: parameters, slots, version and ledger.

    Args:
        cut: the graph.
        index: which server.
        given: first values, where there is no record.
        folder: where the record is kept.
        durability: when it is written.
        faults: what happens at the edges.
        driver: the number of the driver of that folder.
    """

    def __init__(
        self,
        cut: Split,
        index: int,
        given: Mapping[str, Any],
        folder: Path | None,
        durability: Durability,
        faults: Faults,
        driver: int = 0,
    ) -> None:
        self.index, self.faults = index, faults
        self.holding = Holding(cut, index, given)
        program = self.holding.program
        fixed = {v.name for v in program.state if v.kind is Kind.STATE and v not in program.next_state}
        self.fixed = {n: x.copy() for n, x in self.holding.arrays.items() if n in fixed}  # hyperparameters
        self.version = self.generation = 0
        self.ledger: Ledger = {}
        self.every = durability.every
        self.busy = 0.0
        self.broken: BaseException | None = None
        self.store: Store | None = None
        self.place: ServerPlace | None = None
        if folder is not None and durability.every is not None:
            self.place = ServerPlace(Path(folder), driver, f"Server {index}")
            reach = partial(faults.reach, f"server {index}")
            self.store = Store(self.place.folder, fsync=durability.fsync, reach=reach, replay=self._replayed)
            self.place.inherit(partial(_copied, fsync=durability.fsync, replay=self._replayed))
            self.restore()

    @property
    def epoch(self) -> Epoch:
        """Which driver, and which process of this server."""
        return Epoch() if self.place is None else self.place.epoch

    def restore(self) -> None:
        """Begin where the record says, or write the first one."""
        assert self.store is not None
        record = self.store.read()
        if record is None:
            self.store.write(self.record())
        else:
            self._take(record)
            if not all(np.array_equal(record.arrays[name], x) for name, x in self.fixed.items()):
                self.store.write(self.record())  # what is logged from here on is made with these

    def apply(self, pushes: Sequence[Push | None], shares: Sequence[float]) -> None:
        """One update, with its line in the ledger for each gradient in it, and its record if one is due.

        Raises:
            NonFiniteError: it would not be finite; nothing is changed.
            CheckpointError: the disk does not take the record; nothing else is applied or given out any more.
        """
        self._refuse_if_broken()
        try:
            self._apply(pushes, shares)
        except NonFiniteError:
            raise  # it was not made: everything is as before
        except BaseException as error:
            self.broken = error
            self.expect()  # a disk that refuses a process that has lost its place is not full
            raise

    def _apply(self, pushes: Sequence[Push | None], shares: Sequence[float]) -> None:
        begun = perf_counter()
        gradients = [None if p is None else p.gradients for p in pushes]
        lines = {p.sender.trainer: (p.sender.incarnation, p.sequence) for p in pushes if p is not None}
        self._reach("before apply")
        logged = self._is_logged(pushes)
        self.holding.update(gradients, shares, partial(self._count, lines, gradients, shares, logged))
        self._reach("after apply")
        if self.store is not None and self.every is not None and self.version % self.every == 0:
            if not logged:
                self._write(lines, self.holding.changed_rows(gradients))
            self._reach("after write")
            if self.store.is_due:
                self.store.begin(self.record())
        self.busy += perf_counter() - begun

    def measured(self, pushes: Sequence[Push | None], shares: Sequence[float]) -> tuple[np.ndarray, ...]:
        """Compute this server's part of the sums over all servers that an update of these gradients needs."""
        self._refuse_if_broken()
        return self.holding.measured([None if p is None else p.gradients for p in pushes], shares)

    def give(self, wanted: Mapping[str, np.ndarray]) -> Values:
        """The values that a trainer reads, with the wanted rows of tables."""
        self._refuse_if_broken()
        return self.holding.give(wanted)

    def last(self, trainer: int) -> tuple[int, int]:
        """The newest gradient of a trainer that was applied: its incarnation and sequence."""
        return self.ledger.get(trainer, NONE)

    def go_back(self, version: int, generation: int) -> None:
        """Be what the record of this version says.

        Raises:
            ClusterError: there is no such record.
        """
        record = None if self.store is None else self.store.read(version)
        if self.store is None or record is None:
            raise ClusterError(
                f"Server {self.index} should go back to version {version}, of which it has no record. Its "
                f"durability is every={self.every}."
            )
        self._take(record)
        self.generation = generation
        self.store.write(self.record())
        self.expect()

    def flush(self) -> None:
        """Write the record of this version, if it was not due."""
        self._refuse_if_broken()
        if self.store is not None and self.every is not None and self.version % self.every:
            self.store.write(self.record())

    def record(self) -> Record:
        """All of it."""
        return Record(self.version, self.generation, dict(self.ledger), self.holding.arrays)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that the server could go back to."""
        return tuple(self.store.versions()) if self.store is not None else ()

    def _is_logged(self, pushes: Sequence[Push | None]) -> bool:
        """Whether what was sent is written, while the update is made of it, and not what the update makes."""
        if self.store is None or self.every != 1 or self.holding.by_row:
            return False
        return self.store.takes(sum(p.nbytes for p in pushes if p is not None))

    def _count(
        self,
        lines: Ledger,
        gradients: Sequence[Gradients | None],
        shares: Sequence[float],
        logged: bool,
    ) -> None:
        """Count an update that is being made, and write what was sent."""
        self.version += 1
        self.ledger |= lines
        if logged and self.store is not None:
            arrays, pushed = flat(gradients, shares)
            self.store.append(Change(self.version, self.generation, lines, arrays, {}, pushed))

    def _replayed(self, arrays: Mapping[str, np.ndarray], change: Change) -> Mapping[str, np.ndarray]:
        """The arrays after an update that was logged."""
        assert change.pushed is not None
        self._expect_own(arrays)
        gradients, shares = unflat(change.arrays, change.pushed)
        return self.holding.replayed(arrays, gradients, shares)

    def _write(self, lines: Ledger, touched: Mapping[str, np.ndarray]) -> None:
        assert self.store is not None
        by_row = self.holding.by_row
        if not by_row or self.every != 1:
            self.store.write(self.record())
            return
        arrays = self.holding.arrays
        rows = {n: (touched[table], arrays[n][touched[table]]) for n, table in by_row.items()}
        small = {n: x for n, x in arrays.items() if n not in by_row}
        self.store.append(Change(self.version, self.generation, lines, small, rows))

    def expect(self) -> None:
        """Raise unless this is still the process of this server; see ``Place.expect``.

        Nothing is acknowledged, and no value given, before this was asked after the last write.
        """
        if self.place is not None:
            self.place.expect()

    def _refuse_if_broken(self) -> None:
        """Raise if an update was left half done, which nobody may read or update, or if the place is lost."""
        self.expect()
        if self.broken is not None:
            raise ClusterError(
                f"Server {self.index} failed in an update ({self.broken}) and makes no further one. Its "
                "record has what was acknowledged; start again from there."
            ) from self.broken

    def _take(self, record: Record) -> None:
        self._expect_own(record.arrays)
        self.holding.load({**record.arrays, **self.fixed})
        self.version, self.generation = record.version, record.generation
        self.ledger = dict(record.ledger)

    def _expect_own(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise ``ClusterError`` unless these are the arrays of this graph."""
        found = {n: (x.shape, x.dtype) for n, x in arrays.items()}
        expected = {n: (x.shape, x.dtype) for n, x in self.holding.arrays.items()}
        if found != expected:
            different = sorted({n for n, _ in found.items() ^ expected.items()})
            raise ClusterError(
                f"The record of server {self.index} is one of another graph: they differ in "
                f"{', '.join(map(repr, different[:5]))}. Give the folder of this training, or an empty one."
            )

    def _reach(self, edge: str) -> None:
        self.faults.reach(f"server {self.index}", edge)


def _copied(source: Path, target: Path, fsync: bool, replay: Replay) -> bool:
    """The newest record and the one before it, as whole ones; False if there is none."""
    store, found = Store(target, fsync=fsync), Store(source, replay=replay)
    versions = found.versions()[-2:]
    for record in map(found.read, versions):
        assert record is not None
        store.write(record)
    return bool(versions)
