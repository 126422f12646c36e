"""A Program run in pieces, those that are alike compiled once: to look at all values of a step.

What repeats in a Program, in the backward pass or in the update, is cut alike wherever it stands. So to
look at each value of a hundred layers takes about as long to compile as a loop over them, and the ops are
those of the Program. A value is let go behind the last piece that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np

from onward.core.compiler import compiled_alone
from onward.core.lower import lower
from onward.core.program import Op, Program, Variable
from onward.develop.roll.find import periods, stretches

_SHORTEST, _LONGEST = 8, 32  # ops in a piece: short ones take longer to start, long ones to compile apart
_AROUND = 10  # how many ops to either side decide whether a long row is cut at one


@dataclass(frozen=True, eq=False)
class ProgramPiece:
    """Ops that run together.

    Attributes:
        ops: in order.
        reads: what they read that others made.
        kept: what others read of theirs.
        lets_go: what nothing reads behind them.
    """

    ops: tuple[Op, ...]
    reads: tuple[Variable, ...]
    kept: tuple[Variable, ...]
    lets_go: tuple[Variable, ...]

    @property
    def made(self) -> tuple[Variable, ...]:
        """All that they compute."""
        return tuple(v for op in self.ops for v in op.outputs)


Compiled = MutableMapping[Any, Callable[..., list[Any]]]


class PiecewiseRun:
    """A Program of one device, run piece by piece.

    Args:
        program: with ops that have code of their own, so not one from a file.
        compiled: what was compiled for other Programs, which is used for this one too, and grows.
        compile: makes of a piece, as a Program without state, a compiled function of a list of its inputs.
    """

    def __init__(
        self,
        program: Program,
        compiled: Compiled | None = None,
        compile: Callable[[Program], Callable[..., list[Any]]] | None = None,  # noqa: A002
    ) -> None:
        self.program = program
        self.pieces = pieces_of(program)
        self._compile = compile or _plainly
        self._compiled: Compiled = {} if compiled is None else compiled

    def __call__(
        self, given: Mapping[Variable, Any], asks: Callable[[Variable], bool], *more: Any
    ) -> Iterator[dict[Variable, Any]]:
        """Run the pieces in order; what is asked for of each is handed out before the next one runs.

        Args:
            given: the values of data, state and constants.
            asks: whether the value of a Variable is asked for.
            more: what each compiled function takes behind its list.
        """
        env = dict(given)
        for piece in self.pieces:
            asked = [v for v in piece.made if asks(v)]
            gives = tuple(dict.fromkeys((*piece.kept, *asked)))
            results = self._call(piece, gives)([env[v] for v in piece.reads], *more)
            found = dict(zip(gives, results, strict=True))
            env |= {v: found[v] for v in piece.kept}
            for v in piece.lets_go:
                del env[v]
            yield {v: found[v] for v in asked}

    def _call(self, piece: ProgramPiece, gives: tuple[Variable, ...]) -> Callable[..., list[Any]]:
        """The compiled function of a piece, or of another one that computes the same."""
        key = _computed(piece, gives)
        if key not in self._compiled:
            part = Program(self.program.name, inputs=piece.reads, ops=piece.ops, outputs=gives)
            self._compiled[key] = self._compile(part)
        return self._compiled[key]


def _plainly(part: Program) -> Callable[..., list[Any]]:
    return compiled_alone(partial(lower(part, part.outputs, at_once=True), ()))


def _computed(piece: ProgramPiece, gives: Sequence[Variable]) -> Any:
    """A key that is the same for pieces that compute the same, whatever their Variables are called."""
    place = {v: i for i, v in enumerate(piece.reads)}
    rows = []
    for op in piece.ops:
        rows.append((op.body.signature, tuple(place[v] for v in op.inputs)))
        place.update((v, len(place) + k) for k, v in enumerate(op.outputs))
    return tuple(rows), tuple(v.kind for v in piece.reads), tuple(place[v] for v in gives)


def pieces_of(program: Program) -> list[ProgramPiece]:
    """The ops of a Program in pieces, in their order.

    >>> import jax.numpy as jnp, onward as ow
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = x + jnp.tanh(x @ w) * 2
    ...     return jnp.mean(x**2)
    >>> found = pieces_of(ow.trace(loss, [jnp.eye(4)] * 6, jnp.ones((2, 4))))
    >>> [len(piece.ops) for piece in found]
    [8, 8, 8, 3]
    """
    known: dict[Any, int] = {}
    numbers = [known.setdefault(op.body.signature, len(known)) for op in program.ops]
    cuts = _with_none_too_long(_cuts(np.array(numbers, np.int64)), _marks(program.ops))
    parts = [program.ops[begin:end] for begin, end in pairwise(cuts)]
    last = {v: i for i, ops in enumerate(parts) for op in ops for v in op.inputs}
    return [_piece(ops, i, last) for i, ops in enumerate(parts)]


def _piece(ops: tuple[Op, ...], i: int, last: Mapping[Variable, int]) -> ProgramPiece:
    made = dict.fromkeys(v for op in ops for v in op.outputs)
    reads = tuple(dict.fromkeys(v for op in ops for v in op.inputs if v not in made))
    kept = tuple(v for v in made if last.get(v, i) > i)
    return ProgramPiece(ops, reads, kept, tuple(v for v in reads if last[v] == i))


def _cuts(numbers: np.ndarray[Any, np.dtype[np.int64]]) -> list[int]:
    """Where a line of ops is cut, equal numbers standing for equal ops: what repeats is cut alike."""
    cuts, is_free = {0, len(numbers)}, np.ones(len(numbers), bool)
    found = [(begin, end, period) for period in periods(numbers) for begin, end in stretches(numbers, period)]
    for begin, end, period in sorted(found, key=lambda f: f[0] + f[2] - f[1]):
        taken = np.flatnonzero(~is_free[begin:end])
        end = begin + int(taken[0]) if len(taken) else end  # only its part before what was cut already
        unit = period * -(-_SHORTEST // period)
        if end - begin >= 2 * unit:
            is_free[begin:end] = False
            cuts |= {*range(begin, end + 1, unit)}
    return sorted(cuts)


def _with_none_too_long(cuts: Sequence[int], marks: Sequence[int]) -> list[int]:
    """The same cuts and more between two that are far apart.

    The ops around decide where, not how many stand before: a Program that has one op more is cut alike but
    for that place, and what is compiled for the one serves for the other.
    """
    tops = [i for i, mark in enumerate(marks) if _is_top(marks, i, mark)]
    among = [0]
    for begin, end in pairwise(cuts):
        own = [i for i in tops if begin + _SHORTEST <= i <= end - _SHORTEST] if end - begin > _LONGEST else []
        for left, right in pairwise((begin, *own, end)):
            count = -(-(right - left) // _LONGEST)
            among += [left + (right - left) * k // count for k in range(1, count + 1)]
    return among


def _is_top(marks: Sequence[int], i: int, mark: int) -> bool:
    """Whether no mark near this one is larger, nor as large before it."""
    before, behind = marks[max(i - _AROUND, 0) : i], marks[i + 1 : i + _AROUND + 1]
    return mark > max(before, default=-1) and mark >= max(behind, default=-1)


def _marks(ops: Sequence[Op]) -> list[int]:
    """For each op a number that is the same wherever it stands, by what it is and what stands before it."""
    words = [f"{op.type} {[v.aval for v in (*op.inputs, *op.outputs)]}".encode() for op in ops]
    return [crc32(b + a) for a, b in zip(words, [b"", *words], strict=False)]
