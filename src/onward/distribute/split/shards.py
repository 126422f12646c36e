"""Which rows of which parameters each server owns.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.Adam(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(6), jnp.ones((8, 6)))
>>> routing = Routing.of(ow.Adam(0.1), program.parameters)
>>> [[str(shard) for shard in own] for own in balanced(program.parameters, routing, 2)]
[['w[0:3]'], ['w[3:6]']]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from onward.core.errors import GraphError
from onward.core.program import Variable
from onward.core.show import nbytes
from onward.core.words import UpdateType
from onward.derive.rule import GradientRule
from onward.derive.update.groups import Routing

Shards = tuple[tuple["Shard", ...], ...]


@dataclass(frozen=True)
class Shard:
    """The rows of a parameter that one server owns: from ``begin`` up to ``end``.

    >>> import numpy as np
    >>> from onward.core.program import Variable
    >>> print(Shard(Variable("w", (10, 4), np.dtype("float32")), 2, 5))
    w[2:5]
    """

    parameter: Variable
    begin: int
    end: int

    @classmethod
    def whole(cls, parameter: Variable) -> Shard:
        """All rows."""
        return cls(parameter, 0, rows_of(parameter))

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole parameter."""
        return (self.begin, self.end) == (0, rows_of(self.parameter))

    @property
    def shape(self) -> tuple[int, ...]:
        """That of these rows."""
        shape = self.parameter.shape
        return shape if self.is_whole else (self.end - self.begin, *shape[1:])

    def of(self, value: Any) -> Any:
        """These rows of an array that has all."""
        return value if self.is_whole else value[self.begin : self.end]

    def __str__(self) -> str:
        name = self.parameter.name
        return name if self.is_whole else f"{name}[{self.begin}:{self.end}]"


def balanced(
    parameters: Sequence[Variable], routing: Routing, servers: int, whole: frozenset[str] = frozenset()
) -> Shards:
    """Every row of every parameter on one server, so that all have about as many bytes, slots included.

    Args:
        parameters: what is owned.
        routing: which optimizer updates which of them.
        servers: how many there are.
        whole: the names of those that are not cut by rows.

    Raises:
        GraphError: fewer parameters (or rows, where the rule allows to cut) than servers.
    """
    wide = [rule for rule in routing.all_rules() if not is_by_number(rule)]
    if not wide:
        return _cut_in_order(parameters, routing, servers, whole)
    if len(parameters) < servers:
        raise GraphError(
            f"There are {len(parameters)} parameters for {servers} servers, and "
            f"{wide[0].title} looks at each as a whole. Take at most {len(parameters)} servers."
        )
    owned: list[list[Shard]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for p in sorted(parameters, key=lambda p: (-_weight(p, routing), p.name)):
        least = loads.index(min(loads))
        owned[least].append(Shard.whole(p))
        loads[least] += _weight(p, routing)
    return tuple(map(tuple, owned))


def _cut_in_order(
    parameters: Sequence[Variable], routing: Routing, servers: int, whole: frozenset[str]
) -> Shards:
    """Server after server is filled up to its share; what does not fit goes on with the next row."""
    left = float(sum(_weight(p, routing) for p in parameters))
    owned: list[list[Shard]] = [[]]
    room = left / servers
    for p in parameters:
        begin, rows = 0, rows_of(p)
        least, per_row = rows if p.name in whole else 1, _weight(p, routing) / rows
        while begin < rows:
            if len(owned) < servers and owned[-1] and (begin or room < least * per_row / 2):
                owned.append([])
                room = left / (servers - len(owned) + 1)
            fitting = rows if len(owned) == servers or not per_row else max(least, round(room / per_row))
            count = min(rows - begin, fitting)
            owned[-1].append(Shard(p, begin, begin + count))
            begin, room, left = begin + count, room - count * per_row, left - count * per_row
    if len(owned) < servers or not all(owned):
        kept = f" (watch needs all rows of {min(whole)!r} on one)" if whole else ""
        raise GraphError(
            f"{sum(map(len, owned))} parameters and parts of such are too few for {servers} servers{kept}. "
            f"Take {len(owned)}."
        )
    return tuple(map(tuple, owned))


def is_by_number(rule: Any) -> bool:
    """Whether a rule, and how its slots are kept, looks at each number by itself, or at sums over all."""
    if isinstance(rule, GradientRule) and rule.type is UpdateType.ACROSS:
        return rule.shares
    return rule.type is UpdateType.ELEMENTWISE and getattr(rule, "slot_dtype", None) != "int8"


def _weight(p: Variable, routing: Routing) -> int:
    """The bytes of a parameter and its slots."""
    kinds = routing.slots(p).values()
    return nbytes(p) + sum(int(prod(kind.shape)) * int(kind.dtype.itemsize) for kind in kinds)


def rows_of(p: Variable) -> int:
    """How many rows a parameter has, as owned by servers: a number alone is one, and so is an empty array."""
    return max(1, p.shape[0]) if p.shape else 1
