"""The state of one server: its parameters and slots as arrays on its device, and the compiled update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.compiler import compiled_alone
from onward.core.errors import ClusterError, NonFiniteError
from onward.core.lower import lower
from onward.core.program import Program, Variable
from onward.core.walk import producers
from onward.distribute.split.cut import Split
from onward.distribute.split.joined import Seen
from onward.distribute.split.server import ServerPart
from onward.distribute.split.trainer import as_typed, plain
from onward.execute.initialize import initialized
from onward.execute.layout import Lending

Rows = Mapping[str, tuple[np.ndarray, np.ndarray]]
_FAILED = (
    "Server {index}: an update is not finite, though all gradients are that were sent: {found}. It was not "
    "made. Look at the learning rate and other hyperparameters, the schedules and the rules; the sum of many "
    "trainers' gradients overflows where their mean does not (merge=Average())."
)
_SMALLEST = 8  # rows that an update is compiled for, at least


@dataclass(frozen=True)
class Gradients:
    """The gradients that one trainer sends to one server: plain arrays in the order of the graph.

    Attributes:
        arrays: the gradients of what the server owns, and to the first one the next carried state.
        rows: for each table, by the shard's name, the numbers of the touched rows, counted from the shard's
            first, and their gradients.
        shared: to all but the first server, the step, schedules and hyperparameters; to any, the sums that
            servers tell each other.
    """

    arrays: tuple[np.ndarray, ...]
    rows: Rows = field(default_factory=dict)
    shared: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        rows = (x for pair in self.rows.values() for x in pair)
        return sum(x.nbytes for x in (*self.arrays, *rows, *self.shared.values()))


@dataclass(frozen=True)
class Values:
    """The values that one trainer receives from one server: plain arrays in graph order, rows by table."""

    arrays: tuple[np.ndarray, ...]
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    shared: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(x.nbytes for x in (*self.arrays, *self.rows.values(), *self.shared.values()))


Sent = Sequence[Gradients | None]
"""What each trainer sent; None of one that had no batch."""


class Holding:
    """The state of one server, updated in place.

    Args:
        cut: the graph.
        index: which server.
        given: first values by name: parameters, and what the forward pass carries; slots are initialized.
    """

    def __init__(self, cut: Split, index: int, given: Mapping[str, Any]) -> None:
        self.cut, self.index = cut, index
        self.part = cut.server_parts[index]
        self.program = self.part.program
        known = {v: self._placed(v, given[v.name]) for v in self.program.state if v.name in given}
        self.state = {v.name: x for v, x in initialized(self.program, known, 0).items()}
        self._updates: dict[tuple[int, ...], _CompiledUpdate] = {}

    @cached_property
    def tables(self) -> dict[str, Variable]:
        """The shards that travel by rows, by name."""
        return {v.name: v for v in self.part.tables}

    def update(
        self,
        gradients: Sent,
        shares: Sequence[float],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Merge what the trainers sent, None for one that has no batch, and update.

        Args:
            gradients: what was sent.
            shares: how much each counts.
            meanwhile: is called while the device computes; where the update may fail, after it.

        Raises:
            NonFiniteError: it would not be finite, and is not to be left out; everything stays as it was.
        """
        update = self._update(gradients)
        self.state, fails = update(self.state, gradients, shares)
        if fails is None:
            meanwhile()
        jax.block_until_ready(list(self.state.values()))
        if fails is not None and bool(fails):
            raise NonFiniteError(
                _FAILED.format(index=self.index, found=update.spoilt(self.state, gradients, shares))
            )
        if fails is not None:
            meanwhile()

    def measured(self, gradients: Sent, shares: Sequence[float]) -> tuple[np.ndarray, ...]:
        """Compute this server's part of the sums over all servers that an update of these gradients needs."""
        if self.part.measuring is None:
            return ()
        return self._update(gradients).measured(self.state, gradients, shares)

    def whole(self) -> tuple[np.ndarray, ...]:
        """On the first server, the sums of the last update."""
        return tuple(np.asarray(self.state[v.name]) for v in self.part.whole)

    def knows(self, told: Mapping[int, Sequence[np.ndarray]]) -> bool:
        """Whether this, by server, is all that an update of this server has to be told."""
        return len(told) == len(self.part.told)

    def known(self, told: Mapping[int, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """The values of ``told`` by the name of the input that an update reads them from."""
        feeds = [self.cut.server_parts[0].whole] if self.index else self.part.told
        pairs = zip(feeds, (told[i] for i in sorted(told)), strict=True)
        return {v.name: x for vs, xs in pairs for v, x in zip(vs, xs, strict=True)}

    def replayed(
        self,
        arrays: Mapping[str, np.ndarray],
        gradients: Sent,
        shares: Sequence[float],
    ) -> dict[str, np.ndarray]:
        """Compute the update of other arrays; the server's own stay as they are."""
        kept = self.state
        try:
            self.load(arrays)
            self.update(gradients, shares)
            return {name: x.copy() for name, x in self.arrays.items()}
        finally:
            self.state = kept

    def seen(self) -> Seen:
        """For each op of ``watch``, what it saw of the last update."""
        return tuple((int(self.state[at.name]), np.asarray(self.state[x.name])) for at, x in self.part.looked)

    @property
    def skipped(self) -> int:
        """How many updates were left out because they were not finite."""
        v = self.part.skipped
        return 0 if v is None else int(self.state[v.name])

    def check(self, gradients: Gradients) -> None:
        """Raise ``ClusterError`` unless these are gradients of this server's part of the graph."""
        expected = [(v.shape, np.dtype(v.dtype)) for v in self.part.received[0]]
        found = [(np.shape(x), x.dtype) for x in gradients.arrays]
        rows = {n: (x.shape[1:], x.dtype, at.dtype) for n, (at, x) in gradients.rows.items()}
        tables = {n: (v.shape[1:], np.dtype(v.dtype), np.dtype(np.int32)) for n, v in self.tables.items()}
        given = {n: (np.shape(x), x.dtype) for n, x in gradients.shared.items()}
        shared = {v.name: (v.shape, np.dtype(v.dtype)) for v in self.part.shared if v in self.program.inputs}
        inside = all(
            _fits(at, x, self.tables[n].shape[0]) for n, (at, x) in gradients.rows.items() if n in tables
        )
        if found != expected or rows != tables or not inside or not shared.items() <= given.items():
            raise ClusterError(
                f"Server {self.index} was sent arrays {found}, rows {rows} and shared values {given}; its "
                f"part takes {expected}, existing rows {tables} and {shared}. Nothing was applied."
            )

    def give(self, wanted: Mapping[str, np.ndarray]) -> Values:
        """The parameters, the carried state, and the wanted rows of tables."""
        rows = {n: np.asarray(self.state[n])[at] for n, at in wanted.items()}
        return Values(tuple(_plain(self.state[v.name]) for v in self.part.given), rows, self.shared())

    def shared(self) -> Mapping[str, np.ndarray]:
        """The values that the first of several servers tells the others, as the next update reads them."""
        if self.index or self.cut.shared is None:
            return {}
        values = self._shared([self.state[v.name] for v in self.cut.shared.state])
        return {v.name: np.asarray(x) for v, x in zip(self.cut.shared.outputs, values, strict=True)}

    @cached_property
    def _shared(self) -> Callable[[Sequence[Any]], list[Any]]:
        assert self.cut.shared is not None
        run = lower(self.cut.shared, self.cut.shared.outputs)
        return compiled_alone(lambda state: run(state, []))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Everything it holds, by name, as plain arrays."""
        return {name: _plain(x) for name, x in self.state.items()}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Hold these values from now on."""
        self.state = {v.name: self._placed(v, arrays[v.name]) for v in self.program.state}

    def changed_rows(self, gradients: Sent) -> dict[str, np.ndarray]:
        """For each lazily updated table, which of its rows an update with these gradients changes."""
        sent = [g for g in gradients if g is not None]
        lazy = dict.fromkeys(self.by_row.values())
        return {n: np.unique(np.concatenate([g.rows[n][0] for g in sent])) for n in lazy if sent}

    @cached_property
    def by_row(self) -> Mapping[str, str]:
        """For a lazily updated table and for each of its slots that has a line for each row, the table."""
        lazy = {str(s) for s in self.cut.shards[self.index] if s.parameter.name in self.cut.lazy}
        found: dict[str, str] = {}
        for table in (v for v in self.part.tables if v.name in lazy):
            update = producers(self.program)[self.program.next_state[table]]
            olds = (old for old, new in self.program.next_state.items() if new in update.outputs)
            found |= {old.name: table.name for old in olds if old.shape[:1] == table.shape[:1]}
        return found

    def _update(self, gradients: Sent) -> _CompiledUpdate:
        """The compiled update for as many rows as were sent."""
        counts = self._buckets(gradients)
        if counts not in self._updates:
            self._updates[counts] = _CompiledUpdate(self._part(counts))
        return self._updates[counts]

    def _buckets(self, gradients: Sent) -> tuple[int, ...]:
        """For each table, how many rows the update is compiled for: a power of two."""
        most = (max((len(g.rows[n][0]) for g in gradients if g is not None), default=0) for n in self.tables)
        return tuple(max(_SMALLEST, 1 << (n - 1).bit_length()) if n else _SMALLEST for n in most)

    def _part(self, counts: tuple[int, ...]) -> ServerPart:
        if not counts:
            return self.part
        names = [s.parameter.name for s in self.cut.shards[self.index] if str(s) in self.tables]
        return self.cut.server_part(self.index, dict(zip(names, counts, strict=True)))

    def _placed(self, v: Variable, value: Any) -> Any:
        if v.is_key:
            return as_typed(value, v)
        return jnp.array(value, v.dtype, copy=True)


class _CompiledUpdate:
    """The compiled update of a server for tables whose trainers send so many rows."""

    def __init__(self, part: ServerPart) -> None:
        self.part = part
        self.program: Program = part.program
        state, next_state = self.program.state, self.program.next_state
        self.lending = Lending([i for i, v in enumerate(state) if v in next_state], len(state))
        self.changed, _ = self.lending.apart(state)
        fails = [] if part.fails is None else [part.fails]
        following = lower(self.program, [*(next_state[v] for v in self.changed), *fails])

        def run(changed: Sequence[Any], kept: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
            return following(self.lending.together(changed, kept), inputs)

        self.run = compiled_alone(run, donate_argnums=(0,))
        self.zeros: dict[Variable, np.ndarray] = {}

    def __call__(
        self, state: dict[str, Any], gradients: Sent, shares: Sequence[float]
    ) -> tuple[dict[str, Any], Any]:
        """The next state, and whether the update fails and left it as it was; None: it cannot fail.

        Both may still be computing.
        """
        fed = self._fed(self.program, gradients, shares)
        own = self.lending.apart([state[v.name] for v in self.program.state])
        new = self.run(*own, [fed[v] for v in self.program.inputs])
        following = state | {v.name: x for v, x in zip(self.changed, new, strict=False)}
        return following, None if self.part.fails is None else new[-1]

    def spoilt(self, state: Mapping[str, Any], gradients: Sent, shares: Sequence[float]) -> str:
        """Name the values of an update that are not finite, three at most."""
        fed = self._fed(self.program, gradients, shares)
        run = lower(self.program, self.part.watched)
        values = run([state[v.name] for v in self.program.state], [fed[v] for v in self.program.inputs])
        named = zip(self.part.watched, values, strict=True)
        found = [repr(v.name) for v, x in named if not bool(jnp.all(jnp.isfinite(x)))]
        return ", ".join(found[:3]) or "a value that no longer is so when computed again"

    def measured(
        self, state: Mapping[str, Any], gradients: Sent, shares: Sequence[float]
    ) -> tuple[np.ndarray, ...]:
        """Compute this server's part of the sums over all servers."""
        program = self.part.measuring
        assert program is not None
        fed = self._fed(program, gradients, shares)
        given = [state[v.name] for v in program.state], [fed[v] for v in program.inputs]
        return tuple(map(np.asarray, self._measure(*given)))

    @cached_property
    def _measure(self) -> Callable[..., list[Any]]:
        assert self.part.measuring is not None
        return compiled_alone(lower(self.part.measuring, self.part.measuring.outputs))

    def _fed(self, program: Program, gradients: Sent, shares: Sequence[float]) -> dict[Variable, Any]:
        fed: dict[Variable, Any] = {}
        for sent, feeds, tables in zip(gradients, self.part.received, self.part.rows, strict=True):
            values = sent.arrays if sent else [self._nothing(v) for v in feeds]
            fed |= dict(zip(feeds, values, strict=True))  # jit reads aligned buffers where they are
            for table, (at, gradient) in zip(self.part.tables, tables, strict=True):
                rows = sent.rows[table.name] if sent else (np.zeros(0, np.int32), self._nothing(gradient)[:0])
                fed[at] = _padded(rows[0], at, table.shape[0])
                fed[gradient] = _padded(rows[1], gradient, 0)
        if self.part.shares is not None:
            fed[self.part.shares] = np.asarray(shares, self.part.shares.dtype)
        present = next(g for g in gradients if g is not None)
        told = (*self.part.shared, *(v for feeds in self.part.told for v in feeds))
        return fed | {v: present.shared[v.name] for v in told if v in program.inputs}

    def _nothing(self, v: Variable) -> np.ndarray:
        if v not in self.zeros:
            self.zeros[v] = np.zeros(v.shape, v.dtype)
        return self.zeros[v]


def _fits(at: np.ndarray, gradient: np.ndarray, rows: int) -> bool:
    """Whether there is one gradient for each row, and each row exists."""
    return at.ndim == 1 and len(at) == len(gradient) and (not len(at) or 0 <= at.min() <= at.max() < rows)


def _padded(value: np.ndarray, v: Variable, fill: int) -> np.ndarray:
    """Filled up to the length that the update is compiled for."""
    if len(value) == v.shape[0]:
        return value
    whole = np.full(v.shape, fill, v.dtype)
    whole[: len(value)] = value
    return whole


def _plain(value: Any) -> np.ndarray:
    """A value as it travels and is written; of an array on the CPU, a view."""
    return np.asarray(plain(value))
