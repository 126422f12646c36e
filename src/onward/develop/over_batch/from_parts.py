"""Results of all examples from parts of any lengths, such as the batches of a reader.

A mean over examples is a mean of the parts' by their lengths, a sum a sum. Another number, as the quotient of
two sums, is computed of what it is made of: each part hands out the sums, and the ops behind them run once,
on those of all.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, x, counts):
...     return jnp.sum(counts * (x @ w)) / jnp.sum(counts)
>>> found = from_parts(ow.trace(loss, jnp.ones(3), jnp.ones((4, 3)), jnp.ones(4)), lambda p: {"loss": p.loss})
>>> [v.name for v in found.program.outputs], [op.type for op in found.rest(40)[1].ops]
(['div', 'reduce_sum', 'reduce_sum_1'], ['div'])
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from onward.core.check import check
from onward.core.errors import OnwardError, RecipeError
from onward.core.jaxprs.equations import Type
from onward.core.program import Op, Program, Variable
from onward.core.recipe import rebuilt
from onward.core.walk import ancestors, descendants, producers, prune
from onward.core.words import Kind
from onward.develop.batch import WEIGHT, batch_names, data_types
from onward.develop.over_batch.alike import has_same_ops, otherwise
from onward.develop.over_batch.behind import behind, computed
from onward.develop.over_batch.known import Following, Follows, How, Need
from onward.develop.over_batch.walk import follow

Shape = tuple[int, ...]
Results = Callable[[Program], Mapping[str, Variable]]
_PLAIN = Follows(How.MEAN)


class FromParts:
    """The values that each part hands out, and the ops that run on those of all.

    Attributes:
        rows: how many examples the Program of a part was traced for.
        split: the names of the data that hold examples.
        results: the results by name.
        apart: for those that cannot be put together, why; their mean by the lengths of the parts is taken.
        group: how many examples are computed together: batches have a multiple of it.
        whole: the Program of two parts, where it is known.
        found: how each value that is handed out follows.
        by_chance: data that is as long as the batch, and is taken to be no examples.
        program: computes, of a part, the results and what else is handed out.
    """

    def __init__(
        self,
        part: Program,
        rows: int,
        split: tuple[str, ...],
        results: Mapping[str, Variable],
        whole: Program | None = None,
        following: Following | None = None,
        why: str = "",
        by_chance: Collection[str] = (),
    ) -> None:
        self.part, self.rows, self.split, self.results = part, rows, split, results
        self.whole = part if whole is None else whole
        self.by_chance = frozenset(by_chance)
        self.apart: dict[str, str] = dict.fromkeys(results, why) if why else {}
        self.found = dict.fromkeys(results.values(), _PLAIN)
        self._after, self._made = set[Op](), set[Variable]()
        self.group = 1 if following is None else following.group
        if whole is not None and following is not None:
            drawn = descendants(part, [v for v in part.variables.values() if v.is_key])
            after = behind(whole, part, following, (), lambda f: f.kind not in (How.OWN, How.ROWS))
            self._after = {op for op in after if drawn.isdisjoint(op.outputs)}
            self._made = {v for op in self._after for v in op.outputs}
            left = following.without(self._after)
            told = {name: _apart(part, left, v, self._made) for name, v in results.items()}
            self.apart = {name: why for name, why in told.items() if why}
            own = [v for v in results.values() if v not in self.computed]
            handed = (*own, *self._read(results.values()))
            averaged = {results[name] for name in self.apart}
            self.found = {v: _PLAIN if v in averaged else following.found[v] for v in handed}
        self.program = prune(part, list(dict.fromkeys([*results.values(), *self.found])))

    @property
    def computed(self) -> list[Variable]:
        """The results that are computed of the values of all parts."""
        averaged = {self.results[name] for name in self.apart}
        return [v for v in dict.fromkeys(self.results.values()) if v in self._made and v not in averaged]

    def unlike_at(self, shapes: Mapping[str, Shape]) -> list[Variable]:
        """The results that are computed otherwise of the values of parts whose data has these shapes.

        A mean over examples and a second axis is: what it is divided by counts both.
        """
        if all(self.part[name].shape == shape for name, shape in shapes.items()):
            return []
        try:
            other = at_shapes(self.part, shapes)
        except OnwardError:
            return self.computed
        if not has_same_ops(self.part, other):
            return self.computed
        pairs = zip(self.part.ops, other.ops, strict=True)
        changed = [op for op, theirs in pairs if op in self._after and op.body.text != theirs.body.text]
        constants = zip(self.part.constants.items(), other.constants.values(), strict=True)
        begun = {v for (v, x), y in constants if x is not y and not np.array_equal(x, y)}
        ops = {op for op in self._after if op in changed or not begun.isdisjoint(op.inputs)}
        return [v for v in self.computed if not ops.isdisjoint(self._behind([v]))]

    def _behind(self, wanted: Iterable[Variable]) -> list[Op]:
        """The ops by which these are computed once there are the values of all parts."""
        needed = ancestors(self.part, list(wanted))
        return [op for op in self.part.ops if op in self._after and not needed.isdisjoint(op.outputs)]

    def _read(self, wanted: Iterable[Variable]) -> list[Variable]:
        """The values of a part that the ops behind read to compute these."""
        kept = {*self.part.state, *self.part.constants, *self._made}
        return [v for op in self._behind(wanted) for v in op.inputs if v not in kept]

    def rest(self, rows: int) -> tuple[dict[Variable, Variable], Program] | None:
        """The Program that computes results of the values of all parts, which have so many examples.

        With it the result that each of its outputs is; None where there is nothing to compute. Its inputs
        have the names of the values of a part.

        Raises:
            RecipeError: for so many examples the function computes other ops.
        """
        wanted = self.computed
        if not wanted:
            return None
        if not self.is_alike(rows):
            raise RecipeError(f"{self.part.name}: for {rows} examples the function builds another graph.")
        whole = _of_length(self.part, self.split, rows)
        pairs = [*zip(self.part.inputs, whole.inputs, strict=True)]
        like = dict([*pairs, *zip(computed(self.part), computed(whole), strict=True)])
        given = {like[v]: replace(like[v], kind=Kind.DATA) for v in self._read(wanted)}
        results = {like[v]: v for v in wanted}
        ops = [mine for op, mine in zip(self.part.ops, whole.ops, strict=True) if op in self._after]
        made = replace(
            whole,
            name="of_all",
            inputs=tuple(given.values()),
            ops=tuple(replace(op, inputs=tuple(given.get(v, v) for v in op.inputs)) for op in ops),
            outputs=tuple(results),
            next_state={},
            initializers=(),
            loss=None,
            hyperparameters=(),
            signature=None,
            recipe=None,
        )
        return results, check(prune(made, list(results)))

    def is_alike(self, rows: int) -> bool:
        """Whether the function computes the same ops for so many examples."""
        if rows % self.group:
            return False
        if rows == self.rows or not self.split:
            return True
        try:
            other = _of_length(self.part, self.split, rows)
        except OnwardError:
            return False
        ops = zip(self.part.ops, self.whole.ops, other.ops, strict=False)
        before = (each for each in ops if each[0] not in self._after)
        return has_same_ops(self.part, other) and otherwise(before, Fraction(rows, self.rows)) is None


def at_shapes(program: Program, shapes: Mapping[str, Shape]) -> Program:
    """A Program for data of these shapes, by name; other data as it is."""
    assert program.signature is not None
    data = [[Type(shapes.get(v.name, v.shape), v.dtype) for v in s.variables] for s in program.signature.data]
    given = zip(program.signature.data, data, strict=True)
    return rebuilt(program, tuple(s.unflatten(types) for s, types in given))


def from_parts(program: Program, results: Results) -> FromParts:
    """How results of a forward Program are put together.

    Data that is as long as the batch by chance, such as the matrix of a graph, is the one array without which
    the function takes other lengths.

    Args:
        program: a Program; where it cannot be built for another length, all that is known are the means.
        results: its results by name, of the Program for any length.
    """
    known = program.recipe is not None and program.code is None  # the ops of a file are not looked into
    split = _split(program) if known else ()
    if not split:
        return FromParts(program, 1, (), results(program))
    found = [(split, two)] if (two := _two_lengths(program, split)) else _but_one(program, split)
    first = _of_two(program, results, split, found)
    if not first.apart:
        return first
    names = _behind_the_first(program)
    if not names or (two := _two_lengths(program, names)) is None:
        return first
    second = _of_two(program, results, split, [(names, two)])
    return first if second.apart else second


def _of_two(
    program: Program,
    results: Results,
    split: tuple[str, ...],
    found: Sequence[tuple[tuple[str, ...], _TwoLengths]],
) -> FromParts:
    """How results are put together, where one way was found to build the Program for two lengths."""
    if len(found) != 1:
        return FromParts(program, 1, (), results(program), why=one_length(program, split))
    ((told, (part, whole)),) = found
    following = follow(whole, part, 2, told, _can_have, in_turn=True, asks_rules=False)
    if following is None:
        why = "for twice as many examples the function builds another graph"
        return FromParts(program, 1, (), results(program), why=why)
    rows, by_chance = part[told[0]].shape[0], {*split} - {*told}
    return FromParts(part, rows, told, results(part), whole, following, by_chance=by_chance)


def _behind_the_first(program: Program) -> tuple[str, ...]:
    """All data behind the first, such as the weights of classes, if it is as long: it may be the examples."""
    assert program.recipe is not None
    fixed = program.recipe.origin.fixed_data
    arrays = [v for v in program.inputs if v.shape and v.name not in fixed]
    if not arrays or arrays[0].name == WEIGHT:
        return ()
    names = batch_names(program, arrays[:1], WEIGHT, fixed)
    return names if all(v.name in names or v.may_be_key for v in arrays[1:]) else ()


def one_length(program: Program, split: Sequence[str]) -> str:
    """In words, that nothing is known of another length of this data."""
    names = " and ".join(map(repr, split))
    return f"the function takes no other length of {names} than {program[split[0]].shape[0]}"


_TwoLengths = tuple[Program, Program]


def _two_lengths(program: Program, split: tuple[str, ...]) -> _TwoLengths | None:
    """The Program for a part, and for twice as many examples; None where there is none for so many."""
    rows = max(2, program[split[0]].shape[0])
    try:
        return _of_length(program, split, rows), _of_length(program, split, 2 * rows)
    except OnwardError:
        return None


def _but_one(program: Program, split: tuple[str, ...]) -> list[tuple[tuple[str, ...], _TwoLengths]]:
    """The data without one array of it with which the function takes other lengths."""
    others = (split[:i] + split[i + 1 :] for i in range(len(split))) if len(split) > 1 else ()
    return [(names, two) for names in others if (two := _two_lengths(program, names))]


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


def _apart(part: Program, following: Following, v: Variable, made: set[Variable]) -> str:
    """The reason why a result cannot be put together; empty if it can.

    ``made`` is computed of values of the whole; ``following`` tells of the rest.
    """
    near = following.reaching(part, [v])
    for op, why in near.mixing:
        return f"{op.type!r}{op.at} {why}"
    for op in near.normalizing:
        return f"{op.type!r}{op.at} reads a statistic of the examples"
    for op in (*near.bent, *near.counting(part), *near.needs):
        return f"{op.type!r}{op.at} reads or gives a number that counts the examples"
    if v not in made and following.found[v].kind in (How.OWN, How.ROWS):
        maker = producers(part).get(v)
        given = "it is given with each batch"
        return f"{maker.type!r}{maker.at} gives a number of one batch" if maker else given
    return ""
