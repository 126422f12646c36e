"""What a parameter server runs: it receives gradients, merges them, and updates the parameters it owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.check import check
from onward.core.jaxprs import Type, body_of
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.walk import prune, substitute
from onward.core.words import Kind, Pass, UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.update import with_update
from onward.distribute.split.shards import Shard
from onward.distribute.split.trainer import is_key, plain, travelling, typed


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
    """

    program: Program
    received: tuple[tuple[Variable, ...], ...]
    rows: tuple[tuple[tuple[Variable, Variable], ...], ...]
    shares: Variable | None
    given: tuple[Variable, ...]
    tables: tuple[Variable, ...]
    shared: tuple[Variable, ...]


@dataclass(frozen=True)
class Duties:
    """What one server is there for.

    Attributes:
        index: which server it is; the first one has the step, the schedules and the hyperparameters.
        shards: what it owns and trainers get whole.
        tables: what it owns and trainers get by rows, with how many rows a trainer sends at most.
        carried: the state that the forward pass replaces; the first server keeps it.
        lazy: the names of tables whose other rows an update leaves alone.
    """

    index: int
    shards: tuple[Shard, ...]
    tables: Mapping[Shard, int] = field(default_factory=dict)
    carried: tuple[Variable, ...] = ()
    lazy: frozenset[str] = frozenset()


def server_part(base: Program, duties: Duties, optimizer: Optimizer, trainers: int) -> ServerPart:
    """The Program of one server that merges the gradients of so many trainers at each update.

    Step, schedules and hyperparameters are named as on one device, whatever parameters this server has.
    """
    draft = _Draft(duties, trainers)
    reserved = _reserved(base, draft.program(f"{base.name}_server_{duties.index}"))
    updated = replace(with_update(reserved, optimizer), constants={})
    updated = draft.made_lazy(updated, optimizer)
    shared = _read(updated, _shared(updated))
    if duties.index:
        updated, shared = _fed_shared(updated, shared)
    sending = _Sending(updated, (*draft.parameters, *draft.carried))
    sent = (sending.op,) if sending.given else ()
    whole = check(replace(updated, ops=(*updated.ops, *sent), outputs=sending.op.outputs))
    return ServerPart(whole, draft.fed, draft.rows, draft.shares, sending.given, draft.tables, tuple(shared))


def shared_part(first: ServerPart, others: Sequence[ServerPart]) -> Program:
    """What the first server tells the others through the trainers, as the next update reads it."""
    return prune(first.program, list(dict.fromkeys(v.name for part in others for v in part.shared)))


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

    def _feeds(self, t: int) -> tuple[Variable, ...]:
        head = f"from_trainer_{t}"
        gradients = (Variable(f"{head}/grad({p.name})", p.shape, p.dtype, Kind.DATA) for p in self.parameters)
        states = (travelling(v, f"{head}/next({v.name})", Kind.DATA) for v in self.carried)
        return (*gradients, *states)

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
        recv = Op("recv", tuple(inputs), (*gradients, *following), body, Pass.COLLECTIVE)
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
        gradients = [_weighed([f[k] for f in flat], shares) for k in range(count)]
        for k, table in enumerate(self.tables):
            total = jnp.zeros(table.shape, table.dtype)
            for t, trainer in enumerate(rows):
                at, gradient = trainer[k]
                total = total.at[at].add(_times(gradient, shares, t), mode="drop")
            gradients.append(total)
        states = [self._carried(v, [f[count + k] for f in flat], shares) for k, v in enumerate(self.carried)]
        return [*gradients, *states]

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
            return _weighed(values, shares / jnp.maximum(jnp.sum(shares), 1e-30))
        first = values[0] if shares is None else jnp.stack(values)[jnp.argmax(shares > 0)]
        return typed(first, v.dtype) if is_key(v) else first

    def made_lazy(self, program: Program, optimizer: Optimizer) -> Program:
        """The Program whose update of a lazy table reads and writes the rows that were sent, no others."""
        for k, (shard, table) in enumerate(zip(self.duties.tables, self.tables, strict=True)):
            if shard.parameter.name in self.duties.lazy:
                sent = [trainer[k] for trainer in self.rows]
                program = _with_lazy(program, table, sent, self.shares, optimizer)
        return program


def _with_lazy(
    program: Program,
    table: Variable,
    sent: Sequence[tuple[Variable, Variable]],
    shares: Variable | None,
    optimizer: Optimizer,
) -> Program:
    """The update of one table, row by row."""
    dense = dict(program.gradients)[table]
    count = sum(at.shape[0] for at, _ in sent)
    touched = Variable(f"touched({table.name})", (count,), np.dtype(np.int32))
    few = Variable(f"rows_of_grad({table.name})", (count, *table.shape[1:]), table.dtype, Kind.GRADIENT)
    merge = _rows_merged(sent, shares, (touched, few), table.shape[0])
    ops: list[Op] = []
    for op in program.ops:
        if dense in op.outputs:
            ops += [_without(op, dense), merge]
        elif dense in op.inputs:
            ops.append(_row_update(op, program, table, dense, (touched, few), optimizer))
        else:
            ops.append(op)
    gradients = tuple((p, g) for p, g in program.gradients if p is not table)
    return replace(program, ops=tuple(ops), gradients=gradients)


def _rows_merged(
    sent: Sequence[tuple[Variable, Variable]],
    shares: Variable | None,
    made: tuple[Variable, Variable],
    rows: int,
) -> Op:
    """Rows that several trainers sent, each once, with the sum of its gradients."""
    inputs = [v for pair in sent for v in pair] + ([shares] if shares else [])
    count = made[0].shape[0]

    def merge(*values: Any) -> list[Any]:
        weights = values[-1] if shares else None
        at = jnp.concatenate(values[0 : 2 * len(sent) : 2])
        gradients = [_times(g, weights, t) for t, g in enumerate(values[1 : 2 * len(sent) : 2])]
        touched, place = jnp.unique(at, size=count, fill_value=rows, return_inverse=True)
        total = jnp.zeros(made[1].shape, made[1].dtype).at[place].add(jnp.concatenate(gradients))
        return [touched, total]

    return Op("merge_rows", tuple(inputs), made, body_of(merge, *map(_type, inputs)), Pass.COLLECTIVE)


def _row_update(
    op: Op,
    program: Program,
    table: Variable,
    dense: Variable,
    made: tuple[Variable, Variable],
    optimizer: Optimizer,
) -> Op:
    """The optimizer's rule on the touched rows of a table and of its slots."""
    touched, few = made
    old_of = {new: old for old, new in program.next_state.items()}
    olds = [old_of[v] for v in op.outputs]
    rule = _rule_for_rows(table, few, optimizer)
    inputs = (*(v for v in op.inputs if v is not dense), touched, few)
    by_row = {v for v in olds if v.shape[:1] == table.shape[:1]}

    def update(*values: Any) -> list[Any]:
        env = dict(zip(inputs, values, strict=True))
        at = env[touched]
        taken = {v: env[v].at[at].get(mode="clip") if v in by_row else env[v] for v in inputs} | {
            dense: env[few]
        }
        new = rule(*(taken[v] for v in op.inputs))
        return [
            env[old].at[at].set(value, mode="drop") if old in by_row else value
            for old, value in zip(olds, new, strict=True)
        ]

    return replace(op, inputs=inputs, body=body_of(update, *map(_type, inputs)))


def _rule_for_rows(table: Variable, few: Variable, optimizer: Optimizer) -> Callable[..., list[Any]]:
    """The body of an update op whose parameter is as long as the rows are many."""
    part = replace(table, shape=few.shape)
    draft = with_update(Program("rows", (few,), (part,), gradients=((part, few),)), optimizer)
    return next(op.body for op in draft.ops if part in op.inputs and op.update is optimizer.type)


def _without(op: Op, output: Variable) -> Op:
    """The op without one of its outputs, and without the inputs that only this one read."""
    places = [k for k, v in enumerate(op.outputs) if v is not output]
    body, kept = op.body.restricted(places)
    return replace(
        op,
        inputs=tuple(op.inputs[k] for k in kept),
        outputs=tuple(op.outputs[k] for k in places),
        body=body,
    )


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


def _weighed(values: Sequence[Any], shares: Any) -> Any:
    """The sum of the trainers' values, each times its share, in the order of the trainers."""
    total = _times(values[0], shares, 0)
    for t in range(1, len(values)):
        total = total + _times(values[t], shares, t)
    return total


def _times(value: Any, shares: Any, t: int) -> Any:
    return value if shares is None else (value * shares[t]).astype(value.dtype)


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
