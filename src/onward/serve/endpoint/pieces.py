"""The numbers of a large JSON body, read piece by piece into the array that they become.

``json`` makes an object of Python of each number, which takes eight times what a float32 takes. Here brackets
and commas are compared with those of a whole array first, so its shape and its size are known before memory
is taken for it; then some numbers at a time are read, by ``json`` as well, and put where they belong. Small
bodies are read at once: see ``bodies``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NoReturn

import jax
import numpy as np

from onward.serve.endpoint.refusal import Refusal

LARGE = 2**18
"""Bytes of a body that is read in pieces."""

_PIECE = 2**17
_DEEPEST = 32
_WHITE = b" \t\r\n"
_REST = bytes(set(range(256)) - set(b"[],"))
_NO_BRACKETS = bytes.maketrans(b"[]", b"  ")
_BEGIN = re.compile(rb"[ \t\r\n]*\{")
_NAME = re.compile(rb'[ \t\r\n]*("(?:[^"\\]|\\.)*+")[ \t\r\n]*:')
_OPEN, _CLOSE, _COMMA = b"[],"[0], b"[],"[1], b"[],"[2]
Listed = Callable[[list[Any]], np.ndarray]


def refuse_constant(name: str) -> NoReturn:
    """For NaN and infinity, which ``json`` would read."""
    raise ValueError(f"{name} is not a number that JSON can hold; such numbers travel as application/x-npy")


_JSON = json.JSONDecoder(parse_constant=refuse_constant)


def values_of(body: bytes) -> Iterator[tuple[str, range]]:
    """The names in the object that a body holds, each with the place of its value.

    Raises:
        Refusal: the body holds something else than arrays of numbers by name.

    Example:
        >>> list(values_of(b'{"x": [[1, 2]], "y": 3}'))
        [('x', range(5, 14)), ('y', range(20, 22))]
    """
    first, last = _BEGIN.match(body), body.rfind(b"}")
    if first is None or last < 0 or body[last + 1 :].strip(_WHITE):
        raise Refusal(400, "The body is not a JSON object, from one brace to the other.")
    at = first.end()
    if not body[at:last].strip(_WHITE):
        return
    while at < last:
        found = _NAME.match(body, at, last)
        if found is None:
            raise Refusal(400, f"The body is not JSON: at byte {at} stands no name in quotes with a colon.")
        name, begin = _name(found[1]), found.end()
        at = body.find(b'"', begin, last)
        at = last if at < 0 else at
        end = last if at == last else body.rfind(b",", begin, at)
        if end < 0 or body[end + 1 : at].strip(_WHITE):
            raise Refusal(422, f"{name[:80]!r} holds a string.")
        yield name, range(begin, end)


def _name(text: bytes) -> str:
    try:
        return str(json.loads(text))
    except UnicodeDecodeError:
        raise Refusal(400, "The body is not JSON: a name is not UTF-8.") from None
    except ValueError as error:
        raise Refusal(400, f"The body is not JSON: {str(error)[:200]}.") from None


def array_of(
    name: str,
    body: bytes,
    place: range,
    dtype: Any,
    listed: Listed,
    expect: Callable[[tuple[int, ...]], None] = lambda shape: None,
) -> np.ndarray:
    """The array of nested lists of numbers.

    Args:
        name: what it is called.
        body: JSON, of which the lists are a part.
        place: where in it they are.
        dtype: what the array should hold.
        listed: makes an array of some numbers: whole ones of this dtype, fractions that are rounded to it.
        expect: raises a Refusal for a shape that it should not have.

    Raises:
        Refusal: something else is there.

    Example:
        >>> array_of("x", b"[[1, 2], [3, 4.5]]", range(18), np.dtype("float32"), np.float32)
        array([[1. , 2. ],
               [3. , 4.5]], dtype=float32)
    """
    steps = range(place.start, place.stop, _PIECE)
    kept = (body[i : min(i + _PIECE, place.stop)].translate(None, _REST) for i in steps)
    shape = _shape(name, b"".join(kept))
    expect(shape)
    array, done = np.empty(prod(shape), dtype), 0
    for at, piece in _pieces(body, place):
        numbers = _numbers(name, at, piece)
        if not numbers and array.size == 1:
            return np.empty((*shape[:-1], 0), dtype)
        part = _fitting(name, listed(numbers), array.dtype)
        array[done : done + len(part)] = part
        done += len(part)
    return array.reshape(shape)


def _shape(name: str, skeleton: bytes) -> tuple[int, ...]:
    """The shape of lists of which there are brackets and commas only, if all are of equal lengths."""
    depth = len(skeleton) - len(skeleton.lstrip(b"["))
    if depth > _DEEPEST:
        raise Refusal(400, f"{name[:80]!r} is nested too deep.")
    shape: list[int] = []
    unit = b""
    for level in range(1, depth + 1):  # from the innermost list to the whole
        size = skeleton.find(b"]" * level) + level - (depth - level)
        shape.insert(0, (size - 1) // (len(unit) + 1))
        unit = b"[" + ((unit + b",") * shape[0])[:-1] + b"]"  # not joined, which takes 80 bytes for each
    if unit != skeleton:
        raise Refusal(422, f"{name[:80]!r} has lists of different lengths or depths.")
    return tuple(shape)


def _pieces(body: bytes, place: range) -> Iterator[tuple[int, bytes]]:
    """Parts of the lists of some numbers each, without the comma behind them, and where they begin."""
    at, stop = place.start, place.stop
    while stop - at > _PIECE:
        end = body.rfind(b",", at, at + _PIECE)
        end = body.find(b",", at + _PIECE, stop) if end < 0 else end
        if end < 0:
            break
        yield at, body[at:end]
        at = end + 1
    yield at, body[at:stop]


def _numbers(name: str, at: int, piece: bytes) -> list[Any]:
    """The numbers of a piece, the brackets around them in their places."""
    _expect_outside(name, np.frombuffer(piece.translate(None, _WHITE), np.uint8))
    try:
        found: list[Any] = _JSON.decode(f"[{piece.translate(_NO_BRACKETS).decode('ascii')}]")
    except json.JSONDecodeError as error:
        where = f"{error.msg} at byte {at + error.pos - 1}"
        raise Refusal(400, f"{name[:80]!r} is not lists of numbers in JSON: {where}.") from None
    except ValueError as error:
        raise Refusal(400, f"{name[:80]!r} is not lists of numbers in JSON: {str(error)[:200]}.") from None
    if odd := set(map(type, found)) - {bool, int, float}:
        raise Refusal(422, f"{name[:80]!r} holds {'null' if odd == {type(None)} else 'more than numbers'}.")
    return found


def _expect_outside(name: str, text: np.ndarray) -> None:
    """Raise ``Refusal`` for a bracket that opens behind a number, or closes before one."""
    opens, closes = np.flatnonzero(text[1:] == _OPEN), np.flatnonzero(text[:-1] == _CLOSE) + 1
    before, behind = text[opens], text[closes]
    if np.any((before != _OPEN) & (before != _COMMA)) or np.any((behind != _CLOSE) & (behind != _COMMA)):
        raise Refusal(400, f"{name[:80]!r} is not JSON: a number stands beside a list without a comma.")


def _fitting(name: str, part: np.ndarray, dtype: Any) -> np.ndarray:
    """Some numbers in the dtype of the array; whole ones are of it already, fractions are rounded to it."""
    if part.dtype == dtype:
        return part
    if part.dtype.kind != "f" or not jax.numpy.issubdtype(dtype, np.floating):
        raise Refusal(422, f"{name[:80]!r} holds numbers that are {part.dtype}, and not {dtype}.")
    with np.errstate(over="ignore"):
        narrow = part.astype(dtype)
    if not np.isfinite(narrow).all():
        raise Refusal(422, f"{name[:80]!r} holds a number beyond what {dtype} can hold.")
    return narrow
