"""Rules that look across parameters which several servers own: pieces, and sums over all of them.

A rule such as ``ClipByGlobalNorm`` reads of the other servers' gradients a few sums alone. Where a server
updates for one trainer at a time, this one has all gradients, and sends the sums with them. Where a server
merges the gradients of several, the merged ones are nowhere together: each of the other servers has a Program
that computes its part, the first one adds all parts up, updates, and keeps the sums, with which the others
update. How they travel is not up to these Programs.

>>> import jax.numpy as jnp, onward as ow
>>> optimizer = ow.SGD(0.1, rules=[ow.ClipByGlobalNorm(1.0)])
>>> program = optimizer.minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(6), jnp.ones((8, 6)))
>>> one, two = ow.split(program, servers=2), ow.split(program, servers=2, trainers=2)
>>> [op.type for op in one.trainer.ops][-3:], [op.type for op in one.servers[1].ops]
(['sums', 'send', 'send'], ['recv', 'clip_by_global_norm', 'sgd', 'send'])
>>> [op.type for op in two.servers[0].ops]
['recv', 'count', 'sums', 'add', 'clip_by_global_norm', 'sgd', 'send']
>>> [op.type for op in two.server_parts[1].measuring.ops], [op.type for op in two.servers[1].ops]
(['recv', 'sums'], ['recv', 'clip_by_global_norm', 'sgd', 'send'])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.builder import op_of
from onward.core.errors import GraphError
from onward.core.jaxprs.equations import Type
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.words import Pass, UpdateType
from onward.derive.rule import GradientRule, Piece
from onward.derive.update.act import uphill
from onward.derive.update.groups import Routing
from onward.distribute.split.shards import Shards


@dataclass(frozen=True, eq=False)
class Across:
    """A gradient rule that looks across parameters which several servers own.

    Attributes:
        rule: the rule.
        names: the parameters that it is about.
        pieces: for each shard of these, by its name, what it is.
        owners: the servers that have some.
        sums: what it reads of the gradients that are elsewhere.
        by_trainer: whether trainers compute these sums, of gradients that no rule has changed yet.
        maximized: the parameters that are to make the loss larger; rules see the negative of their gradients.
        dtype: of real numbers, in which it looks at all gradients.
    """

    rule: GradientRule
    names: tuple[str, ...]
    pieces: Mapping[str, Piece]
    owners: tuple[int, ...]
    sums: tuple[Variable, ...]
    by_trainer: bool
    maximized: frozenset[str]
    dtype: np.dtype[Any]

    @property
    def exchanged(self) -> bool:
        """Whether the sums go from server to server."""
        return bool(self.sums) and len(self.owners) > 1 and not self.by_trainer


def across_of(program: Program, routing: Routing, shards: Shards, trainers: int) -> tuple[Across, ...]:
    """The rules of a training Program that look across parameters; none if there is one server.

    Raises:
        GraphError: a rule needs sums over what another one makes of such sums.
    """
    if len(shards) == 1:
        return ()
    names = Names(v.name for v in (*program.inputs, *program.state))
    rules = routing.rules(GradientRule)
    found = []
    for n, rule in enumerate(rules):
        trained = (p for p, _ in program.gradients if not routing[p].frozen)
        mine = [p for p in trained if routing.applies(rule, p)]
        if mine and rule.type is UpdateType.ACROSS:
            before = any(routing.applies(other, p) for other in rules[:n] for p in mine)
            up = frozenset(p.name for p in mine if routing[p].optimizer.maximize)
            found.append(_across(rule, mine, shards, trainers == 1 and not before, up, names))
    _expect_apart([a for a in found if a.exchanged])
    return tuple(found)


def _across(
    rule: GradientRule,
    members: Sequence[Variable],
    shards: Shards,
    alone: bool,
    maximized: frozenset[str],
    names: Names,
) -> Across:
    numbers = {p.name: n for n, p in enumerate(members)}
    pieces = {
        str(s): Piece(numbers[p.name], len(members), p.shape, s.begin, s.end)
        for own in shards
        for s in own
        if (p := s.parameter).name in numbers
    }
    owners = tuple(i for i, own in enumerate(shards) if any(str(s) in pieces for s in own))
    dtype = np.empty(0, jnp.result_type(np.float32, *(p.dtype for p in members))).real.dtype
    types = jax.eval_shape(rule.sums, [Type(p.shape, jnp.promote_types(p.dtype, dtype)) for p in members])
    sums = tuple(
        Variable(names.new(f"{rule.name}/sum_{k}"), tuple(t.shape), t.dtype) for k, t in enumerate(types)
    )
    by_trainer = alone and bool(sums) and len(owners) > 1
    return Across(rule, tuple(numbers), pieces, owners, sums, by_trainer, maximized, dtype)


def _expect_apart(rules: Sequence[Across]) -> None:
    """Refuse sums over what other sums, which go from server to server too, have changed."""
    for first, second in combinations(rules, 2):
        both = [name for name in first.names if name in second.names]
        if both:
            raise GraphError(
                f"split: {second.rule!r} looks across the gradients of {both[0]!r} and others that "
                f"{first.rule!r} has made, and both look across parameters of several servers, which tell "
                "each other one sum an update. Leave one of the two out, give them different parameters "
                "(where=), take one server, or replicate(program, devices)."
            )


def summed(across: Across, gradients: Sequence[Variable], names: Names, downhill: Sequence[bool] = ()) -> Op:
    """The op that computes what some gradients add to sums; of those downhill, what their negatives do."""
    outputs = tuple(Variable(names.new(f"part({v.name})"), v.shape, v.dtype) for v in across.sums)

    def sums(*values: Any) -> list[Any]:
        wide = [uphill(x.astype(jnp.promote_types(x.dtype, across.dtype))) for x in values]
        wide = [-x if down else x for x, down in zip_longest(wide, downhill)]
        found = across.rule.sums(wide)
        return [jnp.asarray(x, v.dtype) for x, v in zip(found, outputs, strict=True)]

    return op_of("sums", gradients, outputs, sums, Pass.UPDATE, update=UpdateType.ACROSS)


def added(parts: Sequence[Sequence[Variable]], outputs: Sequence[Variable]) -> Op:
    """The op that adds up what several servers add to the sums of a rule, in their order."""
    count = len(outputs)

    def add(*values: Any) -> list[Any]:
        return [sum(values[k + count :: count], values[k]) for k in range(count)]

    return op_of("add", [v for part in parts for v in part], outputs, add, Pass.COLLECTIVE)


def zero(v: Variable) -> Op:
    """The op that gives a sum its first value, zero."""
    return op_of("constant", (), (v,), lambda: [jnp.zeros(v.shape, v.dtype)], Pass.UPDATE)
