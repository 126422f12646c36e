"""The computation of a trainer: gradients of a batch, or the parameter change over some local steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from onward.core.compiler import compiled_alone
from onward.core.errors import ArgumentError, ClusterError, NonFiniteError, OnwardError
from onward.core.lower import lower
from onward.core.program import Program, Variable
from onward.core.walk import prune
from onward.develop.guard import is_guarded
from onward.develop.watch.watch import watching_of
from onward.distribute.split.cut import Split
from onward.distribute.split.joined import Seen
from onward.distribute.split.rows import RowsRead, Table, rows_read
from onward.distribute.split.trainer import TRAINER, as_typed, carried_by
from onward.execute.compile import compile
from onward.execute.feeds import Feeds, data_names, key_of
from onward.execute.filler import filled
from onward.execute.initialize import initialized
from onward.execute.layout import Layout
from onward.execute.nonfinite.find import find
from onward.execute.nonfinite.finding import NonFinite
from onward.execute.spread import By, Spread
from onward.execute.state import State, stored
from onward.fit.evaluator import as_feed, batch_size
from onward.fit.examples import Examples
from onward.fit.finite import check_numbers
from onward.fit.reported import metrics_of, scalars_of
from onward.fleet.holding import Gradients, Values

Wanted = Mapping[str, np.ndarray]
Key = tuple[Any, ...]


_ROUND = (
    "Trainer {trainer}, batch {number} (counted from 0): The loss is {loss}. Nothing of this round was sent: "
    "the servers have the parameters before it. Look at that batch and at the learning rate; guard(program) "
    "leaves such steps out."
)
_STOPPED = (
    "Trainer {trainer}, batch {number} (counted from 0): {said} Nothing of this step was sent: the servers "
    "have the parameters before it. Look at that batch and at the learning rate; guard(program) leaves such "
    "steps out.{why}"
)


@dataclass(frozen=True)
class Prepared:
    """A batch as the Program takes it, and which rows of each table it reads.

    Attributes:
        cut: the graph for data of this shape.
        fed: the data by the Variable's name.
        examples: how many.
        rows: for each table, by the parameter's name, the rows that are read.
        number: which of the trainer's batches it is, or of several, the first.
    """

    cut: Split
    fed: Mapping[str, Any]
    examples: int
    rows: Mapping[str, RowsRead] = field(default_factory=dict)
    number: int = 0

    def wanted(self, server: int) -> Wanted:
        """The rows to ask a server for, counted from the first row of its shard."""
        found = {}
        for shard in self.cut.shards[server]:
            if (read := self.rows.get(shard.parameter.name)) is not None:
                rows = read.rows
                mine = rows[(rows >= shard.begin) & (rows < shard.end)]
                found[str(shard)] = (mine - shard.begin).astype(np.int32)
        return found


@dataclass(frozen=True)
class BatchResult:
    """The result of a batch: numbers that the function returned, gradients by server, what each step saw."""

    metrics: dict[str, float]
    gradients: list[Gradients]
    examples: int
    seen: tuple[Seen, ...] = ()


class Compute(Protocol):
    """The work of a trainer between receiving parameters and sending gradients."""

    def prepare(self, batch: Any, number: int = 0) -> Prepared:
        """A batch, checked, with the rows that it reads.

        Raises:
            ClusterError: it does not fit; the message names trainer and batch.
        """

    def run(self, prepared: Prepared, values: Sequence[Values]) -> BatchResult:
        """Compute the result of a batch with these parameters."""


class Gradient:
    """Forward and backward pass.

    Args:
        cut: the graph.
        trainer: which trainer this is.
        given: values of state by name; it keeps what the graph reads and nobody replaces.
        check: whether empty batches, and data and losses that are not finite, end the training.
        batch: the data whose length is the number of examples; None: the first.
    """

    def __init__(
        self,
        cut: Split,
        trainer: int,
        given: Mapping[str, Any],
        check: bool = True,
        batch: str | None = None,
    ) -> None:
        self.cut, self.trainer, self.check, self.batch = cut, trainer, check, batch
        self.feeds = Feeds(cut.forward)
        self.names = data_names(cut.forward)
        self.examples = Examples(cut.source)
        self.state = {v.name: as_typed(jax.device_put(given[v.name]), v) for v in cut.trainer.state}
        self._cuts: dict[Key, Split] = {self._key(cut.forward.inputs): cut}
        self._runs: dict[Key, Callable[..., Any]] = {}
        self._places: dict[Key, Callable[..., Any]] = {}

    def prepare(self, batch: Any, number: int = 0) -> Prepared:
        """A batch, checked, with the rows that it reads."""
        with _named(self.trainer, number):
            return self._prepared(batch, number)

    def _prepared(self, batch: Any, number: int) -> Prepared:
        fed = as_feed(batch, self.names)
        if self.check:
            _expect_sound(self.examples, fed)
        values = self.feeds.convert(self.feeds.read(self.feeds.named((), fed)))
        self.feeds.check_bounds(values)
        key = key_of(values)
        if key not in self._cuts:
            self._cuts[key] = self.cut.at(self.feeds.types(values))
        cut = self._cuts[key]
        by_name = {v.name: x for v, x in zip(self.cut.forward.inputs, values, strict=True)}
        rows: dict[str, RowsRead] = {}
        if cut.places is not None:
            rows = _located(cut.tables, self._read_places(key, cut, by_name))
        for t in cut.tables:
            positions = rows[t.parameter.name].positions
            by_name |= {v.name: x for v, x in zip(t.positions, positions, strict=True)}
        known = None if self.batch is None else by_name.get(self.batch)
        count = batch_size(fed) if known is None else known.shape[0]
        return Prepared(cut, by_name, count, rows, number)

    def run(self, prepared: Prepared, values: Sequence[Values]) -> BatchResult:
        """The gradients of a batch."""
        cut, part = prepared.cut, prepared.cut.trainer_part
        fed = dict(prepared.fed)
        for variables, received in zip(part.received, values, strict=True):
            fed |= {v.name: x for v, x in zip(variables, received.arrays, strict=True)}
        fed |= {f"rows({t.parameter.name})": _rows(t, prepared, values) for t in cut.tables}
        fed[TRAINER.name] = np.uint32(self.trainer)
        state = [self.state[v.name] for v in part.program.state]
        outputs = self._run(cut)(state, filled(part.program, [fed[v.name] for v in part.program.inputs]))
        made = dict(zip(part.program.outputs, outputs, strict=True))
        numbers = {v.name: x for v, x in zip(cut.base.outputs, outputs, strict=False)}
        metrics = scalars_of(cut.source, numbers)
        spoilt = part.finite is not None and bool(made[part.sent[0][-1]])
        if self._ends(metrics, spoilt):
            raise NonFiniteError(self._told(prepared, metrics, values))
        by_table = {
            t.parameter.name: np.asarray(made[g]) for t, g in zip(cut.tables, part.row_gradients, strict=True)
        }
        shared = values[0].shared
        gradients = [
            Gradients(
                tuple(np.asarray(made[v]) for v in sent),
                _sent_rows(prepared, i, by_table),
                {} if i == 0 else shared,
            )
            for i, sent in enumerate(part.sent)
        ]
        seen = _seen((made[at], made[numbers]) for _, at, numbers in watching_of(part.program))
        return BatchResult(metrics, gradients, prepared.examples, (seen,))

    def _ends(self, metrics: Mapping[str, float], spoilt: bool) -> bool:
        """Whether the training ends before this step, which is not finite and nobody leaves out."""
        if self.cut.guarding is not None:
            return spoilt and self.cut.guarding.ends
        return self.check and not np.isfinite(metrics.get("loss", 0.0))

    def _told(self, prepared: Prepared, metrics: Mapping[str, float], values: Sequence[Values]) -> str:
        """The message about a step that is not finite, with the op, if found, of the first such number."""
        found = None
        with suppress(OnwardError):  # the search is a help, and not what went wrong
            found = None if prepared.rows else self._found(prepared, values)
        loss = metrics.get("loss", 0.0)
        said = "A gradient is NaN or infinite." if np.isfinite(loss) else f"The loss is {loss}."
        why = "" if found is None else f"\n{found}"
        return _STOPPED.format(trainer=self.trainer, number=prepared.number, said=said, why=why)

    def _found(self, prepared: Prepared, values: Sequence[Values]) -> NonFinite | None:
        base, pieces = prepared.cut.base, dict[str, list[Any]]()
        for own, received in zip(prepared.cut.shards, values, strict=True):
            for shard, x in zip(own, received.arrays, strict=False):
                pieces.setdefault(shard.parameter.name, []).append(x)
        more = values[0].arrays[len(prepared.cut.shards[0]) :]
        scale = () if prepared.cut.scale is None else (prepared.cut.scale,)
        state = {name: x[0] if len(x) == 1 else np.concatenate(x) for name, x in pieces.items()}
        told = zip((*carried_by(base), *scale), more, strict=False)
        state |= self.state | {v.name: as_typed(x, v) for v, x in told}
        return find(base, state, tuple(prepared.fed[v.name] for v in base.inputs))

    def _run(self, cut: Split) -> Callable[..., Any]:
        key = self._key(cut.forward.inputs)
        if key not in self._runs:
            self._runs[key] = _compiled(cut.trainer)
        return self._runs[key]

    def _read_places(self, key: Key, cut: Split, fed: Mapping[str, Any]) -> list[np.ndarray]:
        program = cut.places
        assert program is not None
        if key not in self._places:
            self._places[key] = compiled_alone(lower(program, program.outputs))
        found = self._places[key]([], [fed[v.name] for v in program.inputs])
        by_variable = dict(zip(program.outputs, found, strict=True))
        return [np.asarray(by_variable[program[v]]) for t in cut.tables for v in t.places]

    def _key(self, inputs: Sequence[Variable]) -> Key:
        return tuple((v.shape, v.dtype) for v in inputs)


def _seen(parts: Iterable[tuple[Any, Any]]) -> Seen:
    """The statistics of a step, on the host."""
    return tuple((int(at), np.asarray(numbers)) for at, numbers in parts)


def _compiled(program: Program) -> Callable[..., Any]:
    """Compile a trainer's Program to a function, on one device or on several."""
    run = lower(program, program.outputs)
    if program.replicas is not None:
        run = Spread(program, (), program.outputs, By.SHARD_MAP).over_devices(run)
    return compiled_alone(run)


def _expect_sound(examples: Examples, fed: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` for an empty batch, ``NonFiniteError`` for data that is NaN or infinite."""
    examples.expect_some(fed)
    try:
        check_numbers(fed)
    except ArgumentError as error:
        raise NonFiniteError(str(error)) from error


@contextmanager
def _named(trainer: int, number: int) -> Iterator[None]:
    """Raise any error of the block again as one that names the trainer and the batch."""
    try:
        yield
    except Exception as error:
        kind = NonFiniteError if isinstance(error, NonFiniteError) else ClusterError
        raise kind(f"Trainer {trainer}, batch {number} (counted from 0): {error}") from error


def _located(tables: Sequence[Table], places: Iterable[np.ndarray]) -> dict[str, RowsRead]:
    """The rows that each table is read at, by its name."""
    supply = iter(places)
    return {t.parameter.name: rows_read([next(supply) for _ in t.places]) for t in tables}


def _rows(table: Table, prepared: Prepared, values: Sequence[Values]) -> np.ndarray:
    """The rows of a batch, put together from what the servers own of them."""
    ids = prepared.rows[table.parameter.name].rows
    whole = np.zeros(table.rows.shape, table.rows.dtype)
    for own, received in zip(prepared.cut.shards, values, strict=True):
        for shard in own:
            if shard.parameter.name == table.parameter.name:
                mine = (ids >= shard.begin) & (ids < shard.end)
                whole[: len(ids)][mine] = received.rows[str(shard)]
    return whole


def _sent_rows(
    prepared: Prepared, server: int, gradients: Mapping[str, np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each table that a server has a shard of, the rows of it that get a gradient, and which."""
    found = {}
    for shard in prepared.cut.shards[server]:
        if (gradient := gradients.get(shard.parameter.name)) is not None:
            read = prepared.rows[shard.parameter.name]
            ids = read.rows
            mine = (ids >= shard.begin) & (ids < shard.end) & read.moved
            at = (ids[mine] - shard.begin).astype(np.int32)
            found[str(shard)] = (at, gradient[: len(ids)][mine])
    return found


class LocalSteps:
    """Some whole steps with the trainer's own slots; what is sent is how far the parameters came.

    Args:
        program: the whole training Program.
        cut: how the parameters are kept, and the differences sent.
        trainer: which trainer this is.
        given: the values of all state that is not initialized, by name.
        check: whether empty batches, and data and losses that are not finite, end the training.
    """

    def __init__(
        self, program: Program, cut: Split, trainer: int, given: Mapping[str, Any], check: bool = True
    ) -> None:
        self.cut, self.trainer, self.check = cut, trainer, check
        self.guarded = is_guarded(program)
        self.step = compile(program)
        self.names = data_names(program)
        self.examples = Examples(program)
        layout = Layout.of(program)
        known = {v: stored(as_typed(given[v.name], v), v, v.name) for v in program.state if v.name in given}
        values = initialized(program, known, 0)
        self.state = State(layout, [values[v] for v in layout.variables])
        part = cut.trainer_part
        travelling = {v for received in part.received for v in received}
        local = {v for v in part.program.inputs if v not in travelling}
        self.local = [v for v in part.program.inputs if v in local]
        self.owned = [p for p, _ in cut.base.gradients]
        receive = prune(part.program, [p.name for p in (*self.owned, *cut.carried)])
        self.receive = compiled_alone(lower(receive, receive.outputs))
        self.receiving = receive
        self.send = compiled_alone(lower(part.program, [v for sent in part.sent for v in sent]))

    def prepare(self, batch: Any, number: int = 0) -> Prepared:
        """The batches of a round by name."""
        fed = []
        for n, one in enumerate(batch, number):
            with _named(self.trainer, n):
                fed.append(as_feed(one, self.names))
                if self.check:
                    _expect_sound(self.examples, fed[-1])
        return Prepared(self.cut, {"batches": fed}, sum(map(batch_size, fed)), number=number)

    def run(self, prepared: Prepared, values: Sequence[Values]) -> BatchResult:
        """The steps of a round."""
        part = self.cut.trainer_part
        fed: dict[str, Any] = {
            v.name: x
            for variables, received in zip(part.received, values, strict=True)
            for v, x in zip(variables, received.arrays, strict=True)
        }
        found = self.receive([], [fed.get(v.name, np.uint32(self.trainer)) for v in self.receiving.inputs])
        self.state = self.state.replace(
            {v.name: x for v, x in zip(self.receiving.outputs, found, strict=True)}
        )
        losses: list[dict[str, Any]] = []
        seen: list[Seen] = []
        for n, batch in enumerate(prepared.fed["batches"], prepared.number):
            with _named(self.trainer, n):
                self.state, out = self.step(self.state, **batch)
                if self.guarded:
                    self.step.expect_going(self.state)
            losses.append(metrics_of(out))
            seen.append(_seen((at, numbers) for _, at, numbers in out.watched.parts))
        self._expect_finite(prepared.number, losses)
        fed |= {v.name: self.state[self.cut.local[v.name]] for v in self.local if v.name in self.cut.local}
        fed.setdefault(TRAINER.name, np.uint32(self.trainer))
        sent = iter(self.send([], [fed[v.name] for v in part.program.inputs]))
        gradients = [
            Gradients(tuple(np.asarray(next(sent)) for _ in out), {}, values[0].shared if i else {})
            for i, out in enumerate(part.sent)
        ]
        metrics = {n: float(np.mean([float(x[n]) for x in losses])) for n in losses[0]}
        return BatchResult(metrics, gradients, prepared.examples, tuple(seen))

    def _expect_finite(self, number: int, losses: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``NonFiniteError`` for a loss that is not finite, unless the step itself sees to that."""
        for n, found in enumerate(losses, number):
            loss = float(found.get("loss", 0.0))
            if self.check and not self.guarded and not np.isfinite(loss):
                raise NonFiniteError(_ROUND.format(trainer=self.trainer, number=n, loss=loss))
