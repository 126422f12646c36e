"""The Program of a parameter server: it receives and merges gradients, and updates its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder
from onward.core.check import check
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.equations import Type
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.walk import prune, substitute
from onward.core.words import Kind, Pass, UpdateType
from onward.derive.rule import Rule
from onward.derive.update.act import Shared
from onward.derive.update.draft import UpdateDraft
from onward.derive.update.groups import Routing
from onward.derive.update.update import with_update
from onward.develop.watch.watch import counter_of
from onward.distribute.split.across import Across, added, summed, zero
from onward.distribute.split.guarding import Guarded, Guarding, guarded
from onward.distribute.split.lazy import with_lazy
from onward.distribute.split.looks import Looks, remembered
from onward.distribute.split.shards import Shard
from onward.distribute.split.shares import times, weighed
from onward.distribute.split.trainer import SPOILT, plain, travelling, typed


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
        measuring: on all but the first server, what it adds to the sums of rules that look across parameters,
            from the same feeds; None where no sum goes over several servers, or trainers send it.
        told: the feeds of such sums: on the first server what each of the others adds, in their order, on
            these the whole.
        whole: on the first server, the state that keeps the sums of the last update.
        unguarded: the Program without what ``guard`` and ``check_finite`` add; None where they add nothing.
        fails: whether an update is one that it can neither make nor leave out; None where nothing looks.
        skipped: the state that counts what was left out; on the first server.
        watched: what is looked at to tell whether it is finite.
        looked: for each op of ``watch``, the state that keeps what it saw last: the step, and the statistics.
    """

    program: Program
    received: tuple[tuple[Variable, ...], ...]
    rows: tuple[tuple[tuple[Variable, Variable], ...], ...]
    shares: Variable | None
    given: tuple[Variable, ...]
    tables: tuple[Variable, ...]
    shared: tuple[Variable, ...]
    measuring: Program | None = None
    told: tuple[tuple[Variable, ...], ...] = ()
    whole: tuple[Variable, ...] = ()
    unguarded: Program | None = None
    fails: Variable | None = None
    skipped: Variable | None = None
    watched: tuple[Variable, ...] = ()
    looked: tuple[tuple[Variable, Variable], ...] = ()

    @property
    def update(self) -> Program:
        """The update alone."""
        return self.program if self.unguarded is None else self.unguarded


@dataclass(frozen=True)
class Duties:
    """The duties of one server: the parameters and state that it keeps, and the rules that it applies.

    Attributes:
        index: which server it is; the first one has the step, the schedules and the hyperparameters.
        shards: what it owns and trainers get whole.
        tables: what it owns and trainers get by rows, with how many rows a trainer sends at most.
        carried: the state that the forward pass replaces; the first server keeps it.
        lazy: the names of tables whose other rows an update leaves alone.
        guarding: what is done about a step that is not finite; None: nothing.
        scale: the loss scale; the first server keeps it.
        across: the rules that look across parameters of several servers.
        looks: what is watched; where trainers look, the first server tells them the step.
    """

    index: int
    shards: tuple[Shard, ...]
    tables: Mapping[Shard, int] = field(default_factory=dict)
    carried: tuple[Variable, ...] = ()
    lazy: frozenset[str] = frozenset()
    guarding: Guarding | None = None
    scale: Variable | None = None
    across: tuple[Across, ...] = ()
    looks: Looks = field(default_factory=Looks)

    @property
    def owned(self) -> tuple[Shard, ...]:
        """All that it owns."""
        return (*self.shards, *self.tables)


def server_part(base: Program, duties: Duties, routing: Routing, trainers: int) -> ServerPart:
    """The Program of one server that merges the gradients of so many trainers at each update.

    Step, schedules and hyperparameters are named as on one device, whatever parameters this server has.
    """
    draft = _ServerHead(duties, trainers)
    whose = {str(s): s.parameter.name for s in duties.owned}
    reserved = _reserved(base, _in_order(draft.program(f"{base.name}_server_{duties.index}"), base, whose))
    own = routing.standing_for(whose)
    sharing = draft.sharing if duties.across else None
    updated = replace(with_update(reserved, routing.optimizer, own, sharing=sharing), constants={})
    updated = draft.made_lazy(updated, own)
    updated, shared, counter = _sharing(updated, duties)
    measuring, updated = draft.measured(updated)
    updated = duties.looks.on_server(updated, duties.owned, counter, guarded=False)
    looks = Guarded(updated)
    if duties.guarding is not None and draft.finite is not None:
        looks = guarded(updated, draft.finite, duties.scale, duties.guarding, duties.index)
    step = counter_of(looks.program) if duties.looks.trainer and not duties.index else None
    last, looked = remembered(duties.looks.on_server(looks.program, duties.owned, counter, guarded=True))
    further = (v for v in (duties.scale, step) if v is not None)
    given = (*draft.parameters, *draft.carried, *further)
    return ServerPart(
        program=_with_sending(last, given),
        received=draft.fed,
        rows=draft.rows,
        shares=draft.shares,
        given=given,
        tables=draft.tables,
        shared=tuple(shared),
        measuring=measuring,
        told=draft.told,
        whole=tuple(draft.kept.values()),
        unguarded=None if looks.fails is None else updated,
        fails=looks.fails,
        skipped=looks.skipped,
        watched=looks.watched,
        looked=looked,
    )


def shared_part(first: ServerPart, others: Sequence[ServerPart]) -> Program:
    """The Program of the values that trainers bring the others from the first server, for the next update."""
    return prune(first.update, list(dict.fromkeys(v.name for part in others for v in part.shared)))


class _ServerHead:
    """The head of a server's Program: what it is fed, and how that becomes one gradient per parameter."""

    def __init__(self, duties: Duties, trainers: int) -> None:
        self.duties, self.trainers = duties, trainers
        self.parameters = tuple(_parameter(s) for s in duties.shards)
        self.tables = tuple(_parameter(s) for s in duties.tables)
        self.carried = tuple(replace(v, kind=Kind.STATE) for v in duties.carried)
        self.sent_sums = tuple(
            v for a in duties.across if a.by_trainer and duties.index in a.owners for v in a.sums
        )
        self.fed = tuple(map(self._feeds, range(trainers)))
        self.rows = tuple(map(self._row_feeds, range(trainers)))
        dtypes = [v.dtype for v in (*self.parameters, *self.tables)]
        real = (
            np.dtype(np.float64)
            if any(jax.eval_shape(jnp.abs, Type((), d)).dtype.itemsize == 8 for d in dtypes)
            else np.dtype(np.float32)
        )
        name = Names(v.name for v in (*self.parameters, *self.tables, *self.carried)).new("shares")
        self.shares = Variable(name, (trainers,), real, Kind.DATA) if trainers > 1 else None
        self.finite = (
            None if duties.guarding is None else Variable("all trainers are finite", (), np.dtype(np.bool_))
        )
        between = [a for a in duties.across if a.exchanged]
        self.between = between if duties.index == 0 else [a for a in between if duties.index in a.owners]
        kept = () if duties.index else (v for a in self.between for v in a.sums)
        self.kept = {v: replace(v, kind=Kind.STATE) for v in kept}
        self.fed_sums = {a: self._fed_sums(a) for a in self.between}
        self.parts: list[Variable] = []

    def _fed_sums(self, a: Across) -> dict[int, tuple[Variable, ...]]:
        """By server, the feeds of what it adds to the sums of a rule; the first one tells the whole."""
        if self.duties.index:
            return {0: tuple(replace(v, kind=Kind.DATA) for v in a.sums)}
        return {
            i: tuple(replace(v, name=f"from_server_{i}/{v.name}", kind=Kind.DATA) for v in a.sums)
            for i in a.owners
            if i
        }

    @property
    def told(self) -> tuple[tuple[Variable, ...], ...]:
        """The feeds of sums, by the server that they come from; without those that tell nothing."""
        servers = sorted({i for fed in self.fed_sums.values() for i in fed})
        return tuple(tuple(v for fed in self.fed_sums.values() for v in fed.get(i, ())) for i in servers)

    def sharing(
        self, draft: UpdateDraft, rule: Rule, parameters: Sequence[Variable], gradients: Sequence[Variable]
    ) -> Shared:
        """The pieces and sums for a rule across parameters; adds the ops that make them to the draft."""
        a = next(a for a in self.duties.across if a.rule == rule)
        pieces = tuple(a.pieces[p.name] for p in parameters)
        if not a.sums or a.by_trainer:
            return Shared(pieces, a.sums)
        part = summed(a, gradients, draft.names)
        draft.append(part)
        if a not in self.fed_sums:
            return Shared(pieces, part.outputs)
        if self.duties.index:
            self.parts += part.outputs
            return Shared(pieces, self.fed_sums[a][0])
        return Shared(pieces, self._added(draft, a, part.outputs))

    def _added(self, draft: UpdateDraft, a: Across, here: Sequence[Variable]) -> tuple[Variable, ...]:
        """On the first server, the sums over all servers, which it keeps until the next update."""
        following = tuple(draft.named(f"next({v.name})", v) for v in a.sums)
        draft.append(added([here, *self.fed_sums[a].values()], following))
        draft.follow(dict(zip(map(self.kept.__getitem__, a.sums), following, strict=True)))
        return following

    def measured(self, program: Program) -> tuple[Program | None, Program]:
        """The Program of this server's part of the sums, or None, and the Program fed the whole of them."""
        if not self.parts:
            return None, program
        parts = set(self.parts)
        ops = tuple(op for op in program.ops if parts.isdisjoint(op.outputs))
        measuring = prune(program, list(self.parts))
        return check(replace(measuring, name=f"{program.name}_measuring")), replace(program, ops=ops)

    def _feeds(self, t: int) -> tuple[Variable, ...]:
        head = f"from_trainer_{t}"
        gradients = (Variable(f"{head}/grad({p.name})", p.shape, p.dtype, Kind.DATA) for p in self.parameters)
        states = (travelling(v, f"{head}/next({v.name})", Kind.DATA) for v in self.carried)
        sums = (replace(v, name=f"{head}/{v.name}", kind=Kind.DATA) for v in self.sent_sums)
        spoilt = Variable(f"{head}/{SPOILT}", (), np.dtype(np.bool_), Kind.DATA)
        return (*gradients, *states, *sums, *(() if self.duties.guarding is None else (spoilt,)))

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
        received = tuple(inputs)
        owned = (*self.parameters, *self.tables)
        gradients = tuple(Variable(f"grad({p.name})", p.shape, p.dtype, Kind.GRADIENT) for p in owned)
        following = tuple(Variable(f"next({v.name})", v.shape, v.dtype) for v in self.carried)
        body = body_of(self._merged, *(v.aval for v in received))
        finite = () if self.finite is None else (self.finite,)
        made = (*gradients, *following, *self.sent_sums, *finite)
        recv = Op("recv", received, made, body, Pass.COLLECTIVE)
        elsewhere = [a for a in self.between if 0 not in a.owners and not self.duties.index]
        sums = {v: Variable(f"next({v.name})", v.shape, v.dtype) for a in elsewhere for v in a.sums}
        adding = (added([*self.fed_sums[a].values()], [sums[v] for v in a.sums]) for a in elsewhere)
        return Program(
            name,
            inputs=(*received, *(v for feeds in self.told for v in feeds)),
            state=(*owned, *self.carried, *self.kept.values()),
            initializers=tuple(map(zero, self.kept.values())),
            ops=(recv, *adding),
            gradients=tuple(zip(owned, gradients, strict=True)),
            next_state=dict(zip(self.carried, following, strict=True))
            | {self.kept[v]: new for v, new in sums.items()},
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
        begin = count + len(self.carried)
        return [
            *gradients,
            *states,
            *flat[0][begin : begin + len(self.sent_sums)],
            *([] if self.finite is None else [~jnp.stack([f[-1] for f in flat]).any()]),
        ]

    def _sorted(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
        supply = iter(values)
        flat = [[next(supply) for _ in feeds] for feeds in self.fed]
        rows = [[(next(supply), next(supply)) for _ in tables] for tables in self.rows]
        return flat, rows, next(supply, None)

    def _carried(self, v: Variable, values: Sequence[Any], shares: Any) -> Any:
        """Statistics as their mean; of anything else, what the first trainer with a batch says."""
        if v.is_float:
            if shares is None:
                return values[0]
            return weighed(values, shares / jnp.maximum(jnp.sum(shares), 1e-30))
        first = values[0] if shares is None else jnp.stack(values)[jnp.argmax(shares > 0)]
        return typed(first, v.dtype) if v.is_key else first

    def made_lazy(self, program: Program, routing: Routing) -> Program:
        """The Program whose update of a lazy table reads and writes the rows that were sent, no others."""
        for k, (shard, table) in enumerate(zip(self.duties.tables, self.tables, strict=True)):
            if shard.parameter.name in self.duties.lazy:
                sent = [trainer[k] for trainer in self.rows]
                program = with_lazy(program, table, sent, self.shares, routing[table].optimizer)
        return program


def _sharing(program: Program, duties: Duties) -> tuple[Program, list[Variable], Variable | None]:
    """The Program, fed what the first server computes for all; that; and the step, for watches."""
    shared = _read(program, _shared(program))
    counter = counter_of(program) if duties.looks.servers else None
    shared += [] if counter is None or counter in shared else [counter]
    if not duties.index:
        return program, shared, counter
    fed = {v: replace(v, kind=Kind.DATA) for v in shared}
    return _fed_shared(program, fed), list(fed.values()), None if counter is None else fed[counter]


def _with_sending(program: Program, given: Sequence[Variable]) -> Program:
    """The Program with the ``send`` op: what trainers get once the update is done."""
    builder = Builder(program, program.ops, made_by=Pass.COLLECTIVE)
    inputs = [program.next_state.get(v, v) for v in given]
    names = [f"to_trainers/{v.name}" for v in given]
    sent = builder.add("send", inputs, names, lambda *xs: [*map(plain, xs)]) if given else ()
    return builder.program(outputs=sent)


def _in_order(program: Program, base: Program, whose: Mapping[str, str]) -> Program:
    """The Program with its gradients in the order of one device, which rules across parameters see."""
    places = {p.name: n for n, (p, _) in enumerate(base.gradients)}
    ordered = sorted(program.gradients, key=lambda pair: places[whose[pair[0].name]])
    return replace(program, gradients=tuple(ordered))


def _parameter(shard: Shard) -> Variable:
    return Variable(str(shard), shard.shape, shard.parameter.dtype, Kind.PARAMETER)


def _shared(program: Program) -> set[Variable]:
    """The step, the schedules and the hyperparameters."""
    counting = (op for op in program.ops if op.update is UpdateType.BOOKKEEPING)
    return {*program.hyperparameters, *(v for op in counting for v in (*op.inputs, *op.outputs))}


def _reserved(base: Program, program: Program) -> Program:
    """The Program with the names of other servers' parameters, such as ``step``, reserved as constants."""
    mine = {v.name for v in (*program.inputs, *program.state)}
    others = (v for v in (*base.inputs, *base.state, *base.constants) if v.name not in mine)
    return replace(program, constants={replace(v, kind=Kind.CONSTANT): jnp.zeros(()) for v in others})


def _read(program: Program, shared: set[Variable]) -> list[Variable]:
    """The Variables among the shared ones that updates read."""
    updates = (op for op in program.ops if op.update is not UpdateType.BOOKKEEPING)
    return list(dict.fromkeys(v for op in updates for v in op.inputs if v in shared))


def _fed_shared(program: Program, fed: Mapping[Variable, Variable]) -> Program:
    """The Program of a server that is fed what it reads of step, schedules and hyperparameters."""
    shared = _shared(program)
    rest = replace(
        program,
        state=tuple(v for v in program.state if v not in shared),
        ops=tuple(op for op in program.ops if op.update is not UpdateType.BOOKKEEPING),
        next_state={old: new for old, new in program.next_state.items() if old not in shared},
        initializers=tuple(op for op in program.initializers if shared.isdisjoint(op.outputs)),
        hyperparameters=(),
    )
    rewired = substitute(rest, fed)
    return replace(rewired, inputs=(*rewired.inputs, *fed.values()))
