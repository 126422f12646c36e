"""Results of all examples from parts of any lengths, such as the batches of a reader.

A mean over examples is a mean of the parts' by their lengths, a sum a sum. Another number, as the quotient of
two sums, is computed of what it is made of: each part hands out the sums, and the ops behind them run once,
on those of all.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, x, counts):
...     return jnp.sum(counts * (x @ w)) / jnp.sum(counts)
>>> found = from_parts(ow.trace(loss, jnp.ones(3), jnp.ones((4, 3)), jnp.ones(4)), lambda p: {"loss": p.loss})
>>> [v.name for v in found.program.outputs], [op.type for op in found.rest.ops]
(['div', 'reduce_sum', 'reduce_sum_1'], ['div'])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onward.core.builder import Builder
from onward.core.check import check
from onward.core.errors import OnwardError
from onward.core.marks import SCALE
from onward.core.program import Program, Variable
from onward.core.recipe import rebuilt
from onward.core.walk import ancestors, producers, prune
from onward.core.words import Kind
from onward.develop.batch import WEIGHT, batch_names, data_types
from onward.develop.over_batch.known import Following, Follows, How, Need
from onward.develop.over_batch.walk import follow

Results = Callable[[Program], Mapping[str, Variable]]
_PLAIN = Follows(How.MEAN)


class FromParts:
    """The values that each part hands out, and the ops that run on those of all.

    Attributes:
        rows: how many examples the Program of a part was traced for.
        split: the names of the data that hold examples.
        results: the results by name.
        apart: for those that cannot be put together, why; their mean by the lengths of the parts is taken.
        found: how each value that is handed out follows.
        program: computes, of a part, the results and what else is handed out.
        read: for each input of ``rest`` the value, and the power of the number of parts by which it grows.
        rest: computes those results that are made of what is handed out; the last input is how many times
            as many examples there are as ``rows``.
    """

    def __init__(
        self,
        part: Program,
        rows: int,
        split: tuple[str, ...],
        following: Following | None,
        results: Mapping[str, Variable],
    ) -> None:
        self.part, self.rows, self.split, self.results = part, rows, split, results
        told = {} if following is None else {n: _apart(part, following, v) for n, v in results.items()}
        self.apart = {name: why for name, why in told.items() if why}
        self.found = {v: _PLAIN for name, v in results.items() if following is None or name in self.apart}
        self.read: dict[Variable, tuple[Variable, int]] = {}
        self.rest: Program | None = None
        if following is not None:
            self._cut(following, [v for v in results.values() if v not in self.found])
        self.program = prune(part, list(dict.fromkeys([*results.values(), *self.found])))

    def _cut(self, following: Following, wanted: list[Variable]) -> None:
        part, needs = self.part, following.reaching(self.part, wanted).needs
        builder = Builder(part)
        parts = Variable(builder.names.new("parts"), (), np.dtype(np.float32), Kind.DATA)
        needed, made = ancestors(part, wanted), set[Variable]()
        here = {*part.state, *part.constants}
        handed: dict[tuple[Variable, int], Variable] = {}

        def read(v: Variable, need: Need | None) -> Variable:
            power = 0 if need is None else need.power
            if v in made or v in here:
                return builder.once((v, power), lambda: _grown(builder, v, parts, power)) if power else v
            self.found[v] = following.found[v]
            return handed.setdefault((v, power), replace(builder.named(v.name, v), kind=Kind.DATA))

        for op in part.ops:
            mine = needs.get(op, {})
            if needed.isdisjoint(op.outputs) or (not mine and made.isdisjoint(op.inputs)):
                continue
            builder.append(replace(op, inputs=tuple(read(v, mine.get(v)) for v in op.inputs)))
            made.update(op.outputs)
        self.found |= {v: following.found[v] for v in wanted}
        self.read = {new: place for place, new in handed.items()}
        of_rest = tuple(dict.fromkeys(v for v in wanted if v in made))
        if of_rest:
            used = {v for op in builder.ops for v in op.inputs}
            rest = replace(
                part,
                name="of_all",
                inputs=(*self.read, parts),
                state=tuple(v for v in part.state if v in used),
                constants={v: value for v, value in part.constants.items() if v in used},
                ops=builder.ops,
                outputs=of_rest,
                next_state={},
                initializers=(),
                loss=None,
                hyperparameters=(),
                signature=None,
                recipe=None,
            )
            self.rest = check(rest)

    def is_alike(self, rows: int) -> bool:
        """Whether the function computes the same ops for so many examples."""
        if rows == self.rows or not self.split:
            return True
        try:
            other = rebuilt(self.part, data_types(self.part, self.split, rows))
        except OnwardError:
            return False
        return _lines(other) == _lines(self.part)


def from_parts(program: Program, results: Results) -> FromParts:
    """How results of a forward Program are put together.

    Args:
        program: a Program; where it cannot be built for another length, all that is known are the means.
        results: its results by name, of the Program for any length.
    """
    try:
        known = program.recipe is not None and program.code is None  # the ops of a file are not looked into
        split = _split(program) if known else ()
        if split:
            rows = max(2, program[split[0]].shape[0])
            part, whole = (_of_length(program, split, n) for n in (rows, 2 * rows))
            following = follow(whole, part, 2, split, _can_have, in_turn=True)
            if following is not None:
                return FromParts(part, rows, split, following, results(part))
    except OnwardError:  # the function takes this length alone
        pass
    return FromParts(program, 1, (), None, results(program))


def _split(program: Program) -> tuple[str, ...]:
    assert program.recipe is not None
    return batch_names(program, (), WEIGHT, program.recipe.origin.fixed_data)


def _of_length(program: Program, split: tuple[str, ...], rows: int) -> Program:
    if program[split[0]].shape[0] == rows:
        return program
    return rebuilt(program, data_types(program, split, rows))


def _can_have(v: Variable, need: Need, reaches: bool) -> bool:
    """All but what comes back to the examples: by then they are gone."""
    return not reaches


def _apart(part: Program, following: Following, v: Variable) -> str:
    """The reason why a result cannot be put together; empty if it can."""
    near = following.reaching(part, [v])
    for op, why in near.mixing:
        return f"{op.type!r}{op.at} {why}"
    for op in near.normalizing:
        return f"{op.type!r}{op.at} reads a statistic of the examples"
    for op in (*near.bent, *near.counting(part)):
        return f"{op.type!r}{op.at} reads or gives a number that counts the examples"
    if following.found[v].kind in (How.OWN, How.ROWS):
        maker = producers(part).get(v)
        return (
            f"{maker.type!r}{maker.at} gives a number of one batch"
            if maker
            else "it is given with each batch"
        )
    return ""


def _grown(builder: Builder, v: Variable, parts: Variable, power: int) -> Variable:
    """A value times a power of the number of parts."""

    def grown(x: Any, n: Any) -> list[Any]:
        return [(x * n.astype(x.dtype) ** power).astype(x.dtype)]

    return builder.add(SCALE, [v, parts], [f"scaled({v.name})"], grown)[0]


def _lines(program: Program) -> list[tuple[str, tuple[str, ...]]]:
    return [(op.type, tuple(v.name for v in op.outputs)) for op in program.ops]
