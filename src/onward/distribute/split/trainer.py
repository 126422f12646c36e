"""The Program of a trainer: it receives parameters, computes gradients, and sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.builder import op_of
from onward.core.check import check
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.equations import Type
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.variable import holds_keys
from onward.core.walk import substitute
from onward.core.words import Kind, Pass
from onward.develop.watch.watch import watching_of
from onward.distribute.split.across import Across, summed
from onward.distribute.split.rows import Table
from onward.distribute.split.shards import Shard

TRAINER = Variable("trainer's number", (), np.dtype(np.uint32), Kind.DATA)
"""What a trainer is fed that draws random numbers: its number, so that no two draw the same."""

SPOILT = "spoilt"
"""What a trainer tells every server: whether the loss or a gradient of it is not finite."""


@dataclass(frozen=True)
class TrainerPart:
    """The Program of a trainer, and which of its feeds and outputs travel.

    Attributes:
        program: forward and backward pass between ``recv`` and ``send`` ops.
        received: for each server, the feeds that come from it: its shards, and from the first one what the
            forward pass carries from step to step.
        sent: for each server, the outputs that go to it.
        row_gradients: for each table that travels by rows, the gradient of the rows.
        finite: whether the loss and all gradients are finite; None where nobody asks.
    """

    program: Program
    received: tuple[tuple[Variable, ...], ...]
    sent: tuple[tuple[Variable, ...], ...]
    row_gradients: tuple[Variable, ...]
    finite: Variable | None = None


def carried_by(base: Program) -> tuple[Variable, ...]:
    """The state that the forward pass replaces: statistics, random keys."""
    return tuple(v for v in base.state if v in base.next_state)


def trainer_part(
    base: Program,
    shards: Sequence[Sequence[Shard]],
    tables: Sequence[Table],
    finite: Variable | None = None,
    told: Sequence[Variable] = (),
    across: Sequence[Across] = (),
) -> TrainerPart:
    """Cut what a trainer runs out of a forward and backward Program.

    Args:
        base: the Program, which reads each table's rows of the batch in place of the table.
        shards: what each server owns.
        tables: what travels by rows.
        finite: whether all is finite, where the servers are to be told.
        told: what else the first server keeps and the trainer reads: the loss scale, the step.
        across: the rules that look across parameters, of which the trainer sends the sums.
    """
    cut = _TrainerDraft(base, tables, finite, told)
    cut.measure(across)
    for i, own in enumerate(shards):
        cut.receive(i, [s for s in own if s.parameter not in cut.tables])
        cut.send(i, [s for s in own if s.parameter not in cut.tables])
    return cut.part()


class _TrainerDraft:
    """The trainer's Program as it grows at both ends."""

    def __init__(
        self, base: Program, tables: Sequence[Table], finite: Variable | None, told: Sequence[Variable]
    ) -> None:
        self.base, self.finite = base, finite
        self.tables = {t.parameter: t for t in tables}
        self.gradient = {p.name: g for p, g in base.gradients}
        self.parameter = {p.name: p for p, _ in base.gradients}
        self.carried = carried_by(base)
        self.got = (*self.carried, *told)
        away = {*self.parameter, *(v.name for v in self.got)}
        self.names = Names(base.variables.keys() - away)
        self.begin: list[Op] = []
        self.end: list[Op] = []
        self.received: list[tuple[Variable, ...]] = []
        self.sent: list[tuple[Variable, ...]] = []
        self.pieces: dict[str, list[Variable]] = {}
        self.own: dict[Variable, Variable] = {}
        self.sums: dict[Across, tuple[Variable, ...]] = {}

    def measure(self, across: Sequence[Across]) -> None:
        """The sums of rules that look across parameters, over this trainer's gradients."""
        for a in across:
            gradients = [self.gradient[name] for name in a.names]
            op = summed(a, gradients, self.names, [name in a.maximized for name in a.names])
            self.end.append(op)
            self.sums[a] = op.outputs

    def receive(self, i: int, own: Sequence[Shard]) -> None:
        """Parameters, and from the first server the state that is carried."""
        parts = [Variable(self.names.new(str(s)), s.shape, s.parameter.dtype, Kind.PARAMETER) for s in own]
        for s, v in zip(own, parts, strict=True):
            self.pieces.setdefault(s.parameter.name, []).append(v)
        state = [replace(v, name=self.names.new(v.name)) for v in self.got] if i == 0 else []
        self.own.update(zip(self.got, state, strict=False))
        made = [*parts, *state]
        fed = tuple(travelling(v, self.names.new(f"from_server_{i}/{v.name}"), Kind.DATA) for v in made)
        drawn = any(v.is_key for v in state)
        inputs = (*fed, TRAINER) if drawn else fed
        if made:
            received = _Received(tuple(v.aval for v in made))
            self.begin.append(op_of("recv", inputs, made, received, Pass.COLLECTIVE))
        self.received.append(fed)

    def send(self, i: int, own: Sequence[Shard]) -> None:
        """The gradients of what a server owns with their sums, and to the first one the next state."""
        gradients = [self.gradient[s.parameter.name] for s in own]
        state = [self.base.next_state[v] for v in self.carried] if i == 0 else []
        sums = {a: found for a, found in self.sums.items() if i in a.owners}
        state += [v for found in sums.values() for v in found]
        told = [] if self.finite is None else [self.finite]
        inputs = tuple(dict.fromkeys((*gradients, *state, *told)))
        at = {v: k for k, v in enumerate(inputs)}
        places = [*((at[g], s) for g, s in zip(gradients, own, strict=True)), *((at[v], None) for v in state)]
        names = [f"to_server_{i}/grad({s})" for s in own]
        names += [f"to_server_{i}/next({v.name})" for v in self.carried] if i == 0 else []
        names += [f"to_server_{i}/{v.name}" for a in sums for v in a.sums]
        names += [f"to_server_{i}/{SPOILT}"] * len(told)

        def pack(*values: Any) -> list[Any]:
            found = [plain(values[k] if s is None else s.of(values[k])) for k, s in places]
            return found + [~values[at[v]] for v in told]

        body = body_of(pack, *(v.aval for v in inputs))
        outputs = tuple(
            Variable(self.names.new(name), tuple(t.shape), t.dtype)
            for name, t in zip(names, body.out_avals, strict=True)
        )
        if inputs:
            self.end.append(Op("send", inputs, outputs, body, Pass.COLLECTIVE))
        self.sent.append(outputs)

    def whole(self) -> dict[Variable, Variable]:
        """For each parameter what stands for it: what came in one piece, or what ``join`` makes of it."""
        found = {}
        for name, parts in self.pieces.items():
            if len(parts) > 1:
                p = self.parameter[name]
                v = Variable(self.names.new(name), p.shape, p.dtype, Kind.PARAMETER)
                self.begin.append(
                    op_of("join", parts, (v,), lambda *xs: [jnp.concatenate(xs)], Pass.COLLECTIVE)
                )
                parts = [v]
            found[self.parameter[name]] = parts[0]
        return found

    def part(self) -> TrainerPart:
        """The checked whole."""
        base, rows = self.base, {t.parameter.name: t.rows for t in self.tables.values()}
        fed = {
            p: replace(rows[n], name=f"rows({n})", kind=Kind.DATA)
            for n, p in self.parameter.items()
            if n in rows
        }
        given = self.whole() | self.own | fed
        away = set(given)
        kept = tuple(op for op in base.initializers if away.isdisjoint(op.outputs))
        program = replace(
            base,
            name=f"{base.name}_trainer",
            state=tuple(v for v in base.state if v not in away),
            initializers=kept,
            next_state={},
            ops=(*base.ops, *self.end),
            outputs=(
                *base.outputs,
                *(v for sent in self.sent for v in sent),
                *(self.gradient[p.name] for p in fed),
                *(v for _, *pair in watching_of(base) for v in pair),
            ),
            signature=None,
            recipe=None,
        )
        rewired = substitute(program, given)
        inputs = (*rewired.inputs, *fed.values(), *(v for received in self.received for v in received))
        inputs += (TRAINER,) if any(TRAINER in op.inputs for op in self.begin) else ()
        gradients = tuple(self.gradient[t.parameter.name] for t in self.tables.values())
        checked = check(replace(rewired, inputs=inputs, ops=(*self.begin, *rewired.ops)))
        return TrainerPart(checked, tuple(self.received), tuple(self.sent), gradients, self.finite)


@dataclass(frozen=True)
class _Received:
    """The received values as the forward pass reads them; a trainer derives its own random keys."""

    types: tuple[Type, ...]

    def __call__(self, *values: Any) -> list[Any]:
        return [
            self.key(x, t, values[-1]) if holds_keys(t.dtype) else x
            for x, t in zip(values, self.types, strict=False)
        ]

    def key(self, data: Any, kind: Type, trainer: Any) -> Any:
        key = typed(data, kind.dtype)
        fold = jax.random.fold_in
        for _ in key.shape:
            fold = jax.vmap(fold, in_axes=(0, None))
        return jnp.where(trainer == 0, key, fold(key, trainer + jnp.uint32(2**31)))


def travelling(v: Variable, name: str, kind: Kind) -> Variable:
    """A Variable as it travels: random keys as the integers they hold."""
    form = jax.eval_shape(plain, v.aval)
    return Variable(name, tuple(form.shape), form.dtype, kind)


def plain(value: Any) -> Any:
    """A value as it travels: a random key as the integers it holds."""
    return jax.random.key_data(value) if holds_keys(value.dtype) else value


def as_typed(value: Any, v: Variable) -> Any:
    """A received value as its Variable has it: a random key again, if it is one."""
    return typed(jnp.asarray(value), v.dtype) if v.is_key and value.dtype != v.dtype else value


def typed(data: Any, dtype: Any) -> Any:
    """The random key of this dtype that holds these integers."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), Type((), dtype))
    return jax.random.wrap_key_data(data, impl=found[0])
