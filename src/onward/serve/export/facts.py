"""The facts of a Program by which two can be compared: no names, and numbers in place of lengths.

A function that was traced with a symbol for the length of its batch computes from that symbol what stands
as a number where the length is known: the divisor of a mean. So whatever follows from lengths alone is
computed here, and both are told alike. Where they are not, most of their ops still are, and stand in pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import export

from onward.core.described import DescribedBody
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import jaxprs_in
from onward.core.jaxprs.reading import program_of
from onward.core.program import Op, Program, Variable, programs_within
from onward.serve.export.dimensions import evaluated, written

_FOLLOWS = {"new_sizes", "shape"}  # attributes that the types of the results tell as well

Sizes = Mapping[str, int]
"""The free lengths by name."""


@dataclass(frozen=True, eq=False)
class PairedPrograms:
    """The ops of two Programs, those that compute alike in pairs.

    Attributes:
        twins: for what is given to the one or a pair gives to it, what the other has there.
        rest: the ops of each that are in no pair, but for those that compute known numbers.
        numbers: the ops of each that do.
        apart: what must be equal if all is, and is not the same already: what pairs read, what is returned.
    """

    twins: Mapping[Variable, Variable]
    rest: tuple[tuple[Op, ...], tuple[Op, ...]]
    numbers: tuple[tuple[Op, ...], tuple[Op, ...]]
    apart: tuple[tuple[Variable, Variable], ...]


def paired(program: Program, other: Program, sizes: Sizes) -> PairedPrograms:
    """The pairs of two Programs, for these sizes of the symbols in them.

    Raises:
        ValueError: they take or give something else.

    >>> import jax.numpy as jnp, onward as ow
    >>> mean, total = (ow.trace(lambda x, f=f: f(jnp.exp(x)), jnp.ones(4)) for f in (jnp.mean, jnp.sum))
    >>> found = paired(mean, total, {})
    >>> [op.type for op in found.rest[0]], [(x.name, y.name) for x, y in found.apart]
    (['div'], [('div', 'reduce_sum')])
    """
    told, their_told = ToldProgram(program, sizes), ToldProgram(other, sizes)
    pairs = _pairs(told, their_told)
    twins = {x: y for x, y in _given_pairs(program, other) if _is_same_constant(program, x, other, y)}
    for op, twin in pairs:
        twins |= zip(op.outputs, twin.outputs, strict=True)
    apart = (
        (x, y)
        for x, y in (*_read_by(pairs), *_returned(program, other))
        if twins.get(x) is not y and not told.is_same_number(x, their_told, y)
    )
    in_pairs = {op for pair in pairs for op in pair}
    (mine, numbers), (theirs, their_numbers) = (
        ([op for op in t.keys if op not in in_pairs], [op for op in t.program.ops if op not in t.keys])
        for t in (told, their_told)
    )
    return PairedPrograms(
        twins,
        (tuple(mine), tuple(theirs)),
        (tuple(numbers), tuple(their_numbers)),
        tuple(dict.fromkeys(apart)),
    )


def _pairs(mine: ToldProgram, theirs: ToldProgram) -> list[tuple[Op, Op]]:
    """Ops that are told alike, in the order of both."""
    a, b = [*mine.keys.values()], [*theirs.keys.values()]
    ops, others = [*mine.keys], [*theirs.keys]
    if a == b:
        return list(zip(ops, others, strict=True))
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return [(ops[i + k], others[j + k]) for i, j, length in blocks for k in range(length)]


def _given_pairs(program: Program, other: Program) -> Iterator[tuple[Variable, Variable]]:
    given = ([*p.inputs, *p.state, *p.constants] for p in (program, other))
    return zip(*given, strict=True)  # ValueError where one of them has more


def _is_same_constant(program: Program, x: Variable, other: Program, y: Variable) -> bool:
    """Whether two constants hold the same, if they are any."""
    mine, theirs = program.constants.get(x), other.constants.get(y)
    if mine is None or theirs is None or x.is_key:
        return mine is theirs
    return np.array_equal(np.asarray(mine), np.asarray(theirs))


def _returned(program: Program, other: Program) -> Iterator[tuple[Variable, Variable]]:
    """The values that both return, and the next ones of the state of both."""
    yield from zip(program.outputs, other.outputs, strict=True)
    theirs = {v.name: new for v, new in other.next_state.items()}
    yield from ((new, theirs[v.name]) for v, new in program.next_state.items() if v.name in theirs)


def _read_by(pairs: list[tuple[Op, Op]]) -> Iterator[tuple[Variable, Variable]]:
    """The Variables that the ops of each pair read, place by place."""
    for mine, theirs in pairs:
        operands = ((op.primal or op.body).operands for op in (mine, theirs))
        for x, y in zip(*operands, strict=True):
            if isinstance(x, int) and isinstance(y, int):
                yield mine.inputs[x], theirs.inputs[y]


class ToldProgram:
    """A Program, each op of it told by what it computes and what it reads that is a number.

    Attributes:
        keys: for each op what it is told by; none for those that compute known numbers.
    """

    def __init__(self, program: Program, sizes: Sizes) -> None:
        self.program, self.sizes = program, sizes
        self.known: dict[Variable, str] = {}
        self._within: dict[Any, str] = {}
        values: dict[Variable, Any] = {}
        self.keys: dict[Op, str] = {}
        for op in program.ops:
            found = _computed(op, values, sizes) if values.keys() >= {*op.inputs} else []
            values |= zip(op.outputs, found, strict=False)
            self.known |= {v: _number(x) for v, x in zip(op.outputs, found, strict=False)}
            if not found:
                self.keys[op] = self._key(op)

    def is_same_number(self, v: Variable, other: ToldProgram, theirs: Variable) -> bool:
        """Whether two Variables hold a number that is known."""
        return v in self.known and self.known[v] == other.known.get(theirs)

    def _key(self, op: Op) -> str:
        body = op.primal or op.body
        reads = [self.known.get(op.inputs[x]) if isinstance(x, int) else x for x in _operands(body)]
        types = [(*(_length(n, self.sizes) for n in v.shape), str(v.dtype)) for v in op.outputs]
        return repr((str(op.type), reads, types, self._told(body)))

    def _told(self, body: Body) -> str:
        """The parameters of a body and what is within it; looked at once for all that are equal."""
        key = body.signature
        if key not in self._within:
            self._within[key] = repr(_told(body, self.sizes))
        return self._within[key]


def _whole(program: Program, sizes: Sizes) -> Any:
    """All that is told of a Program within an op."""
    told = ToldProgram(program, sizes)
    given = (*program.inputs, *program.state, *program.constants)
    place: dict[Variable, Any] = {v: i for i, v in enumerate(given)} | told.known
    rows = []
    for number, (op, key) in enumerate(told.keys.items()):
        rows.append((key, [place.get(v) for v in op.inputs]))
        place |= {v: (number, k) for k, v in enumerate(op.outputs)}
    return rows, [place.get(v) for v in program.outputs]


def _told(body: Body, sizes: Sizes) -> Any:
    """The parameters of a body of one equation, and what is within it; of several equations, these."""
    if isinstance(body, DescribedBody):
        told = {key: value for key, value in body.attributes.items() if key not in _FOLLOWS}
        return told, [_whole(part, sizes) for part in programs_within(body).values()]
    if len(body.equations) != 1:
        return _whole(program_of(body.closed, "body"), sizes)
    within = programs_within(body)
    params = next(body.calls).params if not within or body.attributes else {}
    told = {
        key: _text(value, sizes)
        for key, value in params.items()
        if key not in _FOLLOWS and value is not None and not callable(value) and not jaxprs_in(value)
    }
    return told, [_whole(part, sizes) for part in within.values()]


def _operands(body: Body) -> list[int | str]:
    """The inputs that the equation of a body reads, by position, and the numbers that stand in it."""
    if isinstance(body, DescribedBody):
        return [*body.operands]
    pairs = zip(body.operands, body.numbers, strict=True)
    return [operand if number is None else _number(number) for operand, number in pairs]


def _computed(op: Op, known: Mapping[Variable, Any], sizes: Sizes) -> list[Any]:
    """The results of an op that reads known numbers alone; none where they are not single numbers."""
    body = op.primal or op.body
    is_single = all(v.shape == () and jnp.issubdtype(v.dtype, np.number) for v in op.outputs)
    if not is_single or isinstance(body, DescribedBody) or body.has_effects or len(body.equations) != 1:
        return []
    call = next(body.calls)
    try:
        if op.primitive.tells_length:
            return [np.asarray(_length(call.params["dim"], sizes), call.results[0].dtype)]
        return [np.asarray(x) for x in body(*(known[v] for v in op.inputs))]
    except Exception:  # a shape within that is a symbol
        return []


def _number(value: Any) -> str:
    """A number as far as rounding leaves it: Python divides in another precision than a compiled function."""
    value = np.asarray(value)
    return f"{float(value):.5g}" if value.ndim == 0 and value.dtype.kind == "f" else str(value)


def _length(n: Any, sizes: Sizes) -> int | str:
    return evaluated(written(n), sizes)


def _text(value: Any, sizes: Sizes) -> str:
    """A parameter in words, lengths in it as numbers."""
    if isinstance(value, tuple | list):
        return f"({', '.join(_text(part, sizes) for part in value)})"
    if export.is_symbolic_dim(value):
        try:
            return str(_length(value, sizes))
        except ValueError:
            return str(value)
    return str(int(value)) if isinstance(value, np.integer) else str(value)
