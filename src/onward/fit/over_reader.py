"""The numbers of a reader, as those of all its examples in one batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from onward.core.compiler import compiled_alone
from onward.core.errors import ArgumentError, OnwardError
from onward.core.lower import lower
from onward.core.program import Program, Variable
from onward.core.source import user_level
from onward.core.walk import producers
from onward.develop.over_batch.from_parts import FromParts, Results, Shape, at_shapes, from_parts, one_length
from onward.develop.over_batch.known import Follows, How
from onward.execute.feeds import data_names
from onward.execute.state import State

_STILL = 2  # in place of 1, for data of one length
_EXTREMES: Mapping[How, Callable[..., Any]] = {How.MOST: np.max, How.LEAST: np.min}


class OfReader:
    """How the numbers of a test Program are put together from batches; made once for data of these names."""

    def __init__(self, program: Program, results: Results) -> None:
        self.results = results
        self.parts = from_parts(program, results)
        self._at: dict[tuple[Shape, ...], OfReader] = {}
        self._unlike: dict[tuple[Shape, ...], list[Variable]] = {}
        self._alike: dict[int, bool] = {}
        self._rest: dict[int, _OfAll] = {}

    def given(self, fed: Mapping[str, Any]) -> tuple[Mapping[str, Any], int, bool]:
        """The data to run for a batch, how many examples it has, and whether they are there twice.

        A single one is laid beside itself where JAX leaves out ops for one.
        """
        arrays = self.arrays(fed)
        lengths = [(name, np.shape(x)[0]) for name, x in arrays if np.shape(x)]
        held = [rows for name, rows in lengths if name in self.parts.split]
        rows = next(iter(held or (rows for _, rows in lengths)), 1)
        if rows == 1 and self.parts.group == 1 and not self.is_alike(1):
            return self._twice(fed), rows, True
        return fed, rows, False

    def rest(self, rows: int) -> _OfAll:
        """From State and the values of all parts, of so many examples, to the results computed of them.

        Raises:
            RecipeError: for so many examples the function computes other ops.
        """
        if rows not in self._rest:
            self._rest = {rows: _rest_of(self.parts.rest(rows))}
        return self._rest[rows]

    def is_alike(self, rows: int) -> bool:
        """Whether batches of this length compute the same ops."""
        if rows not in self._alike:
            self._alike[rows] = self.parts.is_alike(rows)
        return self._alike[rows]

    def at(self, shapes: Mapping[str, Shape]) -> OfReader:
        """The same for batches whose data is as long as this along all axes but the examples'."""
        key = tuple(shapes.values())
        if not (self.parts.split and shapes) or key == tuple(self.parts.part[name].shape for name in shapes):
            return self
        if key not in self._at:
            try:
                self._at[key] = OfReader(at_shapes(self.parts.part, shapes), self.results)
            except OnwardError:  # data of this shape is refused where it is run
                return self
        return self._at[key]

    def unlike(self, fed: Mapping[str, Any]) -> tuple[str, Sequence[Variable]]:
        """The data of a batch that has another shape, and the results that are computed otherwise by it."""
        shapes = self.shapes(fed)
        key = tuple(shapes.values())
        if key not in self._unlike:
            self._unlike[key] = self.parts.unlike_at(shapes)
        known = self.parts.part
        return next((name for name in shapes if known[name].shape != shapes[name]), ""), self._unlike[key]

    def shapes(self, fed: Mapping[str, Any]) -> dict[str, Shape]:
        """The shapes of a batch that has as many examples as was traced."""
        parts = self.parts
        given = ((name, np.shape(x)) for name, x in self.arrays(fed) if name in parts.part.variables)
        return {name: (parts.rows, *s[1:]) if name in parts.split and s else s for name, s in given}

    def _structures(self) -> Mapping[str, Any]:
        program = self.parts.part
        assert program.signature is not None
        return dict(zip(data_names(program), program.signature.data, strict=True))

    def arrays(self, fed: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The arrays of a batch by the names of their Variables."""
        given = [(s, fed[name]) for name, s in self._structures().items() if name in fed]
        leaves = [
            (s, [x] if jax.tree_util.treedef_is_leaf(s.treedef) else jax.tree.leaves(x)) for s, x in given
        ]
        return [(v.name, x) for s, xs in leaves for v, x in zip(s.variables, xs, strict=False)]

    def _twice(self, fed: Mapping[str, Any]) -> Mapping[str, Any]:
        known = self._structures()

        def doubled(name: str, value: Any) -> Any:
            leaves, treedef = jax.tree.flatten(value)
            pairs = zip(known[name].variables, leaves, strict=True)
            laid = [np.concatenate([x, x]) if v.name in self.parts.split else x for v, x in pairs]
            return jax.tree.unflatten(treedef, laid)

        return {name: doubled(name, value) for name, value in fed.items()}


_OfAll = Callable[[State, Mapping[str, Any]], dict[Variable, Any]]


def _rest_of(rest: tuple[dict[Variable, Variable], Program] | None) -> _OfAll:
    if rest is None:
        return lambda state, values: {}
    results, program = rest
    run = compiled_alone(lower(program, program.outputs))

    def computed(state: State, values: Mapping[str, Any]) -> dict[Variable, Any]:
        given = [_whole(v, values[v.name]).astype(v.dtype) for v in program.inputs]
        found = run([state[v.name] for v in program.state], given)
        return dict(zip(results.values(), map(np.asarray, found), strict=True))

    return computed


class ReaderNumbers:
    """The sums and extremes over the batches so far.

    Args:
        reader: how they are put together.
    """

    def __init__(self, reader: OfReader) -> None:
        self.reader, self.parts = reader, reader.parts
        self.apart: Mapping[str, str] = self.parts.apart
        self.rows = self.batches = self.other = 0
        self._places = ["", *(v.name for v in self.parts.part.inputs)]
        self.plain: dict[str, Any] = dict.fromkeys(self.parts.results, 0.0)
        self.total = {v: _nothing(v, follows) for v, follows in self.parts.found.items()}
        self._whole = _WholeData(reader)
        self._unlike: dict[Variable, str] = {}  # the results that are means, for data of another shape
        self._waiting: tuple[int, bool, Mapping[str, Any]] | None = None

    def look(self, fed: Mapping[str, Any]) -> None:
        """Note what of a batch is taken to hold no examples, and is another one than before."""
        self._whole.look(fed)
        name, results = self.reader.unlike(fed)
        self._unlike |= dict.fromkeys(results, name)

    def add(self, rows: int, twice: bool, values: Mapping[str, Any]) -> None:
        """Count a batch of so many examples; its values are read once the next one is on its way."""
        self._settle()
        self._waiting = (rows, twice, values)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        rows, twice, values = waiting
        self._count(rows, {name: values[v.name] for name, v in self.parts.results.items()})
        size = 2 * rows if twice else rows
        if self._whole.is_cut:
            return
        for v, follows in self.parts.found.items():
            x = np.asarray(values[v.name], np.float64)
            if self.total[v].shape != x.shape:
                if set(self._unlike.values()) - set(self.parts.split):
                    continue  # such as a graph: the results that are made of it are means
                raise ArgumentError(_other_shape(self.parts, v, x))
            if follows.kind in _EXTREMES:
                self.total[v] = _EXTREMES[follows.kind]([x, self.total[v]], 0)
            else:
                share = rows * (self.parts.rows / size) ** follows.power
                self.total[v] = self.total[v] + share * x

    def add_other(self, rows: int, results: Mapping[str, Any]) -> None:
        """Count a batch for which the function builds another graph; of all the means are left."""
        self.other = rows
        self._count(rows, results)

    def _count(self, rows: int, results: Mapping[str, Any]) -> None:
        self.rows, self.batches = self.rows + rows, self.batches + 1
        for name, x in results.items():
            self.plain[name] += rows * np.asarray(x, np.float64)

    def told(self) -> np.ndarray:
        """All of it in one row of float64, as long in each process."""
        self._settle()
        unlike = [self._places.index(self._unlike.get(v, "")) for v in self.parts.computed]
        is_other = _STILL if self._whole.stands_still else self._whole.is_cut
        counts = [self.rows, self.batches, self.other, is_other]
        values = (counts, list(self.plain.values()), unlike, *map(np.ravel, self.total.values()))
        return np.concatenate([np.asarray(x, np.float64) for x in values])

    def of_all(self, each: np.ndarray, state: State) -> dict[str, float]:
        """The numbers of all examples, from what each process ``told``, [processes, numbers].

        Warns:
            UserWarning: there were several batches, and one cannot be told from those of each.
        """
        sizes = [4, len(self.plain), len(self.parts.computed), *(x.size for x in self.total.values())]
        counts, plain, unlike, *totals = np.split(each, np.cumsum(sizes)[:-1], axis=1)
        rows, batches = counts[:, :2].sum(0)
        if not rows:
            raise ArgumentError(f"{self.parts.part.name}: the reader has no example: all batches are empty.")
        means = dict(zip(self.plain, plain.sum(0) / rows, strict=True))
        self.other, is_one_length = map(int, counts[:, 2:].max(0))
        self._tell_apart(is_one_length, unlike.max(0), several=batches > 1)
        rest = None if self.other or is_one_length or batches == 1 else self._rest(int(rows))
        if batches > 1:
            self._warn()
        if rest is None:
            return {name: float(x) for name, x in means.items()}
        times, kinds = rows / self.parts.rows, self.parts.found
        found = {
            v: _put_together(x, kinds[v], rows).reshape(v.shape) * times ** kinds[v].power
            for v, x in zip(self.total, totals, strict=True)
        }
        found |= rest(state, {v.name: x for v, x in found.items()})
        exact = {name: float(_whole(v, found[v])) for name, v in self.parts.results.items()}
        return exact | {name: float(x) for name, x in means.items() if name in self.apart}

    def _tell_apart(self, is_one_length: int, unlike: Any, several: bool) -> None:
        """Note the results of which all processes have means alone, given the data that is another shape."""
        parts = self.parts
        if is_one_length:
            why = _standing(parts) if is_one_length == _STILL else _other_data(parts)
            self.apart = dict.fromkeys(parts.results, why)
        elif several:
            of = {v: self._places[int(x)] for v, x in zip(parts.computed, unlike, strict=True)}
            found = ((name, of[v]) for name, v in parts.results.items() if of.get(v))
            why = "has another shape in another batch, apart from the examples"
            self.apart = {**self.apart, **{name: f"{data!r} {why}" for name, data in found}}

    def _rest(self, rows: int) -> _OfAll | None:
        try:
            return self.reader.rest(rows)
        except OnwardError:  # of all examples together the function computes something else
            self.other = rows
            return None

    def _warn(self) -> None:
        name = self.parts.part.name
        for words in self._whole.warnings():
            warnings.warn(words, stacklevel=user_level())
        if self.other:
            warnings.warn(
                f"{name}: for a batch of {self.other} examples the function builds another graph than for "
                f"{self.parts.rows}, so that the numbers are means over batches, each by its number of "
                "examples. Let it branch on no length of its data.",
                stacklevel=user_level(),
            )
        for number, why in self.apart.items():
            warnings.warn(
                f"{name}: {number!r} of a reader cannot be told from that of each batch: {why}. The mean "
                "over batches is given, each by its number of examples. Return what it is made of, such as "
                "sums and counts; or test on one batch.",
                stacklevel=user_level(),
            )


class _WholeData:
    """The data that is taken to hold no examples, and whether it is the same in all batches.

    Attributes:
        is_cut: some of it differs, and is as long as the batch: it seems to hold examples.
    """

    def __init__(self, reader: OfReader) -> None:
        self.is_cut = False
        self._reader = reader
        self._first: dict[str, Any] = {}
        self._differing: dict[str, None] = {}
        self._moves = self._others_move = False

    def look(self, fed: Mapping[str, Any]) -> None:
        """Note what of a batch is another one than before."""
        parts = self._reader.parts
        if not parts.split:
            return
        known = parts.part.variables
        for name, x in self._reader.arrays(fed):
            if name not in known or known[name].may_be_key or not np.ndim(x) or self._is_settled(name, x):
                continue
            if _is_same(self._first.setdefault(name, x), x, known[name].is_float):
                continue
            if name in parts.split:
                self._moves = True
                continue
            self._others_move = True
            if self._is_doubtful(name, x):
                self.is_cut |= name in parts.by_chance
                self._differing[name] = None
        self._first = {name: x for name, x in self._first.items() if not self._is_settled(name, x)}

    def _is_settled(self, name: str, x: Any) -> bool:
        """Whether nothing is left to be told by another comparison of this data."""
        if name in self._differing:
            return True
        return self._moves and (name in self._reader.parts.split or not self._is_doubtful(name, x))

    def _is_doubtful(self, name: str, x: Any) -> bool:
        """Whether data that is taken to hold no examples is as long as if it did."""
        parts = self._reader.parts
        return name in parts.by_chance or np.shape(x)[0] in parts.part[parts.split[0]].shape[1:]

    @property
    def stands_still(self) -> bool:
        """Whether what is taken for the examples is the same in all batches, and other data is not."""
        return self._others_move and not self._moves

    def warnings(self) -> Iterator[str]:
        """In words, what differs and is not as long as the batch."""
        parts = self._reader.parts
        for data in () if self.is_cut else self._differing:
            v, leader = parts.part[data], parts.part[parts.split[0]]
            yield (
                f"{parts.part.name}: {data!r} ({v.type}) is not as long as {leader.name!r} ({leader.type}), "
                "so that it holds no examples, and it differs from batch to batch. Examples are the first "
                "axis of all data: put them there, such as x.swapaxes(0, 1)."
            )


def _is_same(x: Any, other: Any, is_float: bool) -> bool:
    """Whether two arrays have the same numbers, where this process can see them."""
    if x is other or not all(getattr(a, "is_fully_addressable", True) for a in (x, other)):
        return x is other
    return np.array_equal(x, other, equal_nan=is_float)


def _nothing(v: Variable, follows: Follows) -> Any:
    """The value of no examples."""
    least = {How.MOST: -np.inf, How.LEAST: np.inf}
    return np.full(v.shape, least.get(follows.kind, 0.0))


def _standing(parts: FromParts) -> str:
    held = " and ".join(map(repr, parts.split))
    return f"{held}, taken for the examples, is the same in all batches, and other data is not"


def _other_data(parts: FromParts) -> str:
    """The reason why means are left where data that holds no examples differs from batch to batch."""
    names = sorted(parts.by_chance)
    if all(parts.part[name].shape[0] == parts.rows for name in names):
        return one_length(parts.part, (*parts.split, *names))
    held = " and ".join(map(repr, parts.split))
    return f"{names[0]!r} differs from batch to batch, and is not as long as {held}, which hold the examples"


def _other_shape(parts: FromParts, v: Variable, x: Any) -> str:
    maker = producers(parts.part).get(v)
    made = f"{maker.type!r}{maker.at}" if maker else repr(v.name)
    split = " and ".join(map(repr, parts.split)) or "data"
    return (
        f"{parts.part.name}: {made} gives {v.type} of one batch and {x.shape} of another, and the numbers of "
        f"all examples are made of it. Examples are the first axis of {split}: put them there, such as "
        "x.swapaxes(0, 1), and let every batch be as long along other axes."
    )


def _put_together(each: np.ndarray, follows: Follows, rows: float) -> Any:
    """A value over all examples from those of each process, for parts as long as the traced one."""
    return _EXTREMES[follows.kind](each, 0) if follows.kind in _EXTREMES else np.sum(each, 0) / rows


def _whole(v: Variable, x: Any) -> Any:
    """A value of a Variable, a count without its rounding."""
    return np.rint(x) if np.issubdtype(v.dtype, np.integer) else np.asarray(x)
