"""What a parameter server runs: it receives gradients, merges them, and updates the parameters it owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.check import check
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.equations import Type
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.walk import prune, substitute
from onward.core.words import Kind, Pass, UpdateType
from onward.derive.update.groups import Routing
from onward.derive.update.update import with_update
from onward.distribute.split.guarding import Guarding, guarded
from onward.distribute.split.lazy import with_lazy
from onward.distribute.split.shards import Shard
from onward.distribute.split.shares import times, weighed
from onward.distribute.split.trainer import SPOILT, is_key, plain, travelling, typed


@dataclass(frozen=True)
class ServerPart:
    """The Program of a server, and which of its feeds and state travel.

    Attributes:
        program: the update pass behind a ``recv`` op.
        received: for each trainer, the feeds that come from it, in the order in which it sends them.
        rows: for each trainer and table, the feeds of row numbers (counted from the shard's first row; one
            past its end is dropped) and of their gradients.
        shares: the feed that says how much each trainer counts; None where there is one trainer.
        given: the state that trainers get: the parameters, and what the forward pass carries.
        tables: the shards of tables, which trainers get by rows.
        shared: what this server computes for all: step, schedules and hyperparameters; fed on the others.
        unguarded: the Program without what ``guard`` and ``check_finite`` add; None where they add nothing.
        fails: whether an update is one that it can neither make nor leave out; None where nothing looks.
        skipped: the state that counts what was left out; on the first server.
        watched: what is looked at.
    """

    program: Program
    received: tuple[tuple[Variable, ...], ...]
    rows: tuple[tuple[tuple[Variable, Variable], ...], ...]
    shares: Variable | None
    given: tuple[Variable, ...]
    tables: tuple[Variable, ...]
    shared: tuple[Variable, ...]
    unguarded: Program | None = None
    fails: Variable | None = None
    skipped: Variable | None = None
    watched: tuple[Variable, ...] = ()

    @property
    def update(self) -> Program:
        """The update alone."""
        return self.program if self.unguarded is None else self.unguarded


@dataclass(frozen=True)
class Duties:
    """What one server is there for.

    Attributes:
        index: which server it is; the first one has the step, the schedules and the hyperparameters.
        shards: what it owns and trainers get whole.
        tables: what it owns and trainers get by rows, with how many rows a trainer sends at most.
        carried: the state that the forward pass replaces; the first server keeps it.
        lazy: the names of tables whose other rows an update leaves alone.
        guarding: what is done about a step that is not finite; None: nothing.
        scale: the loss scale; the first server keeps it.
    """

    index: int
    shards: tuple[Shard, ...]
    tables: Mapping[Shard, int] = field(default_factory=dict)
    carried: tuple[Variable, ...] = ()
    lazy: frozenset[str] = frozenset()
    guarding: Guarding | None = None
    scale: Variable | None = None


def server_part(base: Program, duties: Duties, routing: Routing, trainers: int) -> ServerPart:
    """The Program of one server that merges the gradients of so many trainers at each update.

    Step, schedules and hyperparameters are named as on one device, whatever parameters this server has.
    """
    draft = _Draft(duties, trainers)
    reserved = _reserved(base, draft.program(f"{base.name}_server_{duties.index}"))
    own = routing.standing_for({str(s): s.parameter.name for s in (*duties.shards, *duties.tables)})
    updated = replace(with_update(reserved, routing.optimizer, own), constants={})
    updated = draft.made_lazy(updated, own)
    shared = _read(updated, _shared(updated))
    if duties.index:
        updated, shared = _fed_shared(updated, shared)
    how, looks = duties.guarding, None
    if how is not None and draft.finite is not None:
        looks = guarded(updated, draft.finite, duties.scale, how, duties.index)
    last = updated if looks is None else looks.program
    scale = () if duties.scale is None else (duties.scale,)
    sending = _Sending(last, (*draft.parameters, *draft.carried, *scale))
    sent = (sending.op,) if sending.given else ()
    whole = check(replace(last, ops=(*last.ops, *sent), outputs=sending.op.outputs))
    return ServerPart(
        program=whole,
        received=draft.fed,
        rows=draft.rows,
        shares=draft.shares,
        given=sending.given,
        tables=draft.tables,
        shared=tuple(shared),
        unguarded=None if looks is None else updated,
        fails=None if looks is None else looks.fails,
        skipped=None if looks is None else looks.skipped,
        watched=() if looks is None else looks.watched,
    )


def shared_part(first: ServerPart, others: Sequence[ServerPart]) -> Program:
    """What the first server tells the others through the trainers, as the next update reads it."""
    return prune(first.update, list(dict.fromkeys(v.name for part in others for v in part.shared)))


class _Draft:
    """The head of a server's Program: what it is fed, and how that becomes one gradient per parameter."""

    def __init__(self, duties: Duties, trainers: int) -> None:
        self.duties, self.trainers = duties, trainers
        self.parameters = tuple(_parameter(s) for s in duties.shards)
        self.tables = tuple(_parameter(s) for s in duties.tables)
        self.carried = tuple(replace(v, kind=Kind.STATE) for v in duties.carried)
        self.fed = tuple(map(self._feeds, range(trainers)))
        self.rows = tuple(map(self._row_feeds, range(trainers)))
        dtypes = [v.dtype for v in (*self.parameters, *self.tables)]
        real = (
            np.dtype(np.float64)
            if any(jnp.abs(jnp.zeros(0, d)).dtype.itemsize == 8 for d in dtypes)
            else np.dtype(np.float32)
        )
        name = Names(v.name for v in (*self.parameters, *self.tables, *self.carried)).new("shares")
        self.shares = Variable(name, (trainers,), real, Kind.DATA) if trainers > 1 else None
        self.finite = (
            None if duties.guarding is None else Variable("all trainers are finite", (), np.dtype(np.bool_))
        )

    def _feeds(self, t: int) -> tuple[Variable, ...]:
        head = f"from_trainer_{t}"
        gradients = (Variable(f"{head}/grad({p.name})", p.shape, p.dtype, Kind.DATA) for p in self.parameters)
        states = (travelling(v, f"{head}/next({v.name})", Kind.DATA) for v in self.carried)
        spoilt = Variable(f"{head}/{SPOILT}", (), np.dtype(np.bool_), Kind.DATA)
        return (*gradients, *states, *(() if self.duties.guarding is None else (spoilt,)))

    def _row_feeds(self, t: int) -> tuple[tuple[Variable, Variable], ...]:
        head = f"from_trainer_{t}"
        return tuple(
            (
                Variable(f"{head}/rows({p.name})", (count,), np.dtype(np.int32), Kind.DATA),
                Variable(f"{head}/grad({p.name})", (count, *p.shape[1:]), p.dtype, Kind.DATA),
            )
            for p, count in zip(self.tables, self.duties.tables.values(), strict=True)
        )

    def program(self, name: str) -> Program:
        """Parameters, feeds, the ``recv`` op, and the pairs of parameter and gradient."""
        inputs = [v for feeds in self.fed for v in feeds]
        inputs += [v for tables in self.rows for pair in tables for v in pair]
        inputs += [self.shares] if self.shares else []
        owned = (*self.parameters, *self.tables)
        gradients = tuple(Variable(f"grad({p.name})", p.shape, p.dtype, Kind.GRADIENT) for p in owned)
        following = tuple(Variable(f"next({v.name})", v.shape, v.dtype) for v in self.carried)
        body = body_of(self._merged, *map(_type, inputs))
        finite = () if self.finite is None else (self.finite,)
        recv = Op("recv", tuple(inputs), (*gradients, *following, *finite), body, Pass.COLLECTIVE)
        return Program(
            name,
            inputs=tuple(inputs),
            state=(*owned, *self.carried),
            ops=(recv,),
            gradients=tuple(zip(owned, gradients, strict=True)),
            next_state=dict(zip(self.carried, following, strict=True)),
        )

    def _merged(self, *values: Any) -> list[Any]:
        """One gradient for each parameter and table, and the carried state."""
        flat, rows, shares = self._sorted(values)
        count = len(self.parameters)
        gradients = [weighed([f[k] for f in flat], shares) for k in range(count)]
        for k, table in enumerate(self.tables):
            total = jnp.zeros(table.shape, table.dtype)
            for t, trainer in enumerate(rows):
                at, gradient = trainer[k]
                total = total.at[at].add(times(gradient, shares, t), mode="drop")
            gradients.append(total)
        states = [self._carried(v, [f[count + k] for f in flat], shares) for k, v in enumerate(self.carried)]
        return [
            *gradients,
            *states,
            *([] if self.finite is None else [~jnp.stack([f[-1] for f in flat]).any()]),
        ]

    def _sorted(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
        supply = iter(values)
        flat = [[next(supply) for _ in feeds] for feeds in self.fed]
        rows = [[(next(supply), next(supply)) for _ in tables] for tables in self.rows]
        return flat, rows, next(supply, None)

    def _carried(self, v: Variable, values: Sequence[Any], shares: Any) -> Any:
        """Statistics as their mean; of anything else, what the first trainer with a batch says."""
        if jnp.issubdtype(v.dtype, jnp.inexact):
            if shares is None:
                return values[0]
            return weighed(values, shares / jnp.maximum(jnp.sum(shares), 1e-30))
        first = values[0] if shares is None else jnp.stack(values)[jnp.argmax(shares > 0)]
        return typed(first, v.dtype) if is_key(v) else first

    def made_lazy(self, program: Program, routing: Routing) -> Program:
        """The Program whose update of a lazy table reads and writes the rows that were sent, no others."""
        for k, (shard, table) in enumerate(zip(self.duties.tables, self.tables, strict=True)):
            if shard.parameter.name in self.duties.lazy:
                sent = [trainer[k] for trainer in self.rows]
                program = with_lazy(program, table, sent, self.shares, routing[table].optimizer)
        return program


class _Sending:
    """The ``send`` op of a server: what trainers get once the update is done."""

    def __init__(self, program: Program, given: Sequence[Variable]) -> None:
        self.given = tuple(given)
        inputs = tuple(program.next_state.get(v, v) for v in self.given)
        names = Names(program.variables)
        outputs = tuple(
            travelling(v, names.new(f"to_trainers/{v.name}"), Kind.ACTIVATION) for v in self.given
        )
        body = body_of(lambda *values: [plain(x) for x in values], *map(_type, inputs))
        self.op = Op("send", inputs, outputs, body, Pass.COLLECTIVE)


def _parameter(shard: Shard) -> Variable:
    return Variable(str(shard), shard.shape, shard.parameter.dtype, Kind.PARAMETER)


def _shared(program: Program) -> set[Variable]:
    """The step, the schedules and the hyperparameters."""
    counting = (op for op in program.ops if op.update is UpdateType.BOOKKEEPING)
    return {*program.hyperparameters, *(v for op in counting for v in (*op.inputs, *op.outputs))}


def _reserved(base: Program, program: Program) -> Program:
    """The Program in which no name is free that a parameter of another server bears, such as ``step``."""
    mine = {v.name for v in (*program.inputs, *program.state)}
    others = (v for v in (*base.inputs, *base.state, *base.constants) if v.name not in mine)
    return replace(program, constants={replace(v, kind=Kind.CONSTANT): jnp.zeros(()) for v in others})


def _read(program: Program, shared: set[Variable]) -> list[Variable]:
    """What the updates read of them."""
    updates = (op for op in program.ops if op.update is not UpdateType.BOOKKEEPING)
    return list(dict.fromkeys(v for op in updates for v in op.inputs if v in shared))


def _fed_shared(program: Program, read: Sequence[Variable]) -> tuple[Program, list[Variable]]:
    """The Program of a server that is fed what it reads of step, schedules and hyperparameters."""
    shared = _shared(program)
    fed = {v: replace(v, kind=Kind.DATA) for v in read}
    rest = replace(
        program,
        state=tuple(v for v in program.state if v not in shared),
        ops=tuple(op for op in program.ops if op.update is not UpdateType.BOOKKEEPING),
        next_state={old: new for old, new in program.next_state.items() if old not in shared},
        initializers=tuple(op for op in program.initializers if shared.isdisjoint(op.outputs)),
        hyperparameters=(),
    )
    rewired = substitute(rest, fed)
    return replace(rewired, inputs=(*rewired.inputs, *fed.values())), list(fed.values())


def _type(v: Any) -> Type:
    return jax.ShapeDtypeStruct(v.shape, v.dtype)
