"""For which batches a Program is written to a file: of any length where it can be, else of some.

The function is traced again with symbols in place of lengths, as ``jax.export`` allows, and the result
compared with what it is for numbers.

Source: the shape polymorphism of ``jax.export`` (JAX documentation, "Shape polymorphism").
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jax import export
from jax.errors import InconclusiveDimensionOperation

from onward.core.errors import ArgumentError, OnwardError
from onward.core.program import Program, Variable
from onward.core.source import user_level
from onward.core.structure import Static
from onward.develop.batch import WEIGHT, batch_names
from onward.execute.feeds import data_names
from onward.serve.export.agreement import expect_same
from onward.serve.export.executable import exported
from onward.serve.export.questions import heard
from onward.serve.export.replay import Replay
from onward.serve.export.writing import Writing

BATCH = "b"
Shapes = Mapping[str, Sequence[int | str]]

_NO_LEN = "... Write x.shape[0] in place of len(x), which Python lets be nothing but a number."

# Raised by what cannot be computed for a length that is only a name, in the person's function or in ours.
_NOT_ANY = (OnwardError, ValueError, TypeError, NotImplementedError, InconclusiveDimensionOperation)


def writings(
    program: Program, values: Mapping[str, Any], batch: Any, shapes: Shapes | None, trainable: bool
) -> list[Writing]:
    """The Writings of a Program: one for any batch, or one for each length.

    Raises:
        ArgumentError: lengths or shapes that make no sense, or a Program that cannot be exported.
    """
    if batch is not None:
        return [_fixed(program, n, trainable) for n in _lengths(batch)]
    try:
        return [_free(program, values, shapes or {}, trainable)]
    except _NOT_ANY as error:
        if shapes:
            raise ArgumentError(f"{program.name!r} cannot be saved with these shapes: {error}") from error
        length = _batch_length(program)
        found = [_fixed(program, None, trainable)]
        if length not in (None, 1) and not program.updates:  # one example asks; it does not train
            found += _attempted(program, 1, trainable)
        if length is not None:
            _warn(program, [length, 1][: len(found)], error)
        return found


def _lengths(batch: Any) -> list[int]:
    found = [batch] if isinstance(batch, int) else list(batch)
    if not found or not all(type(n) is int and n > 0 for n in found):
        raise ArgumentError(f"batch={batch!r}; expected a length such as 1, or several, (1, 8, 64).")
    return list(dict.fromkeys(found))


def _warn(program: Program, lengths: list[int], error: Exception) -> None:
    said = " ".join(str(error).split())
    said = said[:300] + (_NO_LEN if "cannot be interpreted as an integer" in said else "")
    warnings.warn(
        f"{program.name!r} cannot be exported for a batch of any length; the file takes batches of "
        f"{' or '.join(map(str, lengths))}. save(..., batch=(1, 8, 64)) chooses. The reason: {said}",
        stacklevel=user_level(),
    )


def _attempted(program: Program, length: int, trainable: bool) -> list[Writing]:
    try:
        return [_fixed(program, length, trainable)]
    except OnwardError:
        return []


def _free(program: Program, values: Mapping[str, Any], shapes: Shapes, trainable: bool) -> Writing:
    """The Program with free lengths: that of the batch, and those that are named."""
    if not program.inputs:
        return _fixed(program, None, trainable)
    wanted = _wanted(program, shapes)
    names = sorted({n for shape in wanted.values() for n in shape if isinstance(n, str)})
    if not names:
        return _fixed(program, None, trainable)
    symbols = dict(zip(names, export.symbolic_shape(", ".join(names)), strict=True))

    lengths = [pair for v in program.inputs for pair in zip(wanted[v.name], v.shape, strict=True)]
    sizes = {n: size for n, size in lengths if isinstance(n, str)}
    if twice := [n for n, size in lengths if isinstance(n, str) and sizes[n] != size]:
        raise ArgumentError(
            f"shapes= calls two lengths {twice[0]!r} that were traced as {sizes[twice[0]]} and as another "
            "one; give each length its own name"
        )
    replay = Replay(program, wanted)
    with heard(symbols.values()) as questions:
        found = replay.whole(symbols)
    _expect_no_length(found)
    writing = _writing(program, found, sizes, trainable)
    expect_same(program, writing, replay, symbols, values, questions)
    return writing


def _fixed(program: Program, length: int | None, trainable: bool) -> Writing:
    """The Program for batches of one length; None: the one that it has."""
    if length is None or length == _batch_length(program):
        return _writing(program, program, {}, trainable)
    found = Replay(program, _wanted(program, {})).whole({BATCH: length})
    return _writing(program, found, {}, trainable)


def _writing(program: Program, found: Program, sizes: Mapping[str, int], trainable: bool) -> Writing:
    if [v.name for v in found.state] != [v.name for v in program.state]:
        raise ArgumentError("another length of the batch gives it another state")
    gives = [v for op in found.ops for v in op.outputs]
    return Writing(found, sizes, exported(found, gives, trainable))


def _expect_no_length(found: Program) -> None:
    """Raise ``ArgumentError`` for a length among what the function returns: a number, not an array."""
    leaves = () if found.signature is None else found.signature.result.leaves
    if any(isinstance(leaf, Static) and export.is_symbolic_dim(leaf.value) for leaf in leaves):
        raise ArgumentError(
            "it returns the length of the batch as a Python number, which an array in a file cannot be; "
            "return jnp.asarray(x.shape[0])"
        )


def _wanted(program: Program, shapes: Shapes) -> dict[str, tuple[int | str, ...]]:
    """The shape of each data Variable of the signature, free lengths by name."""
    assert program.signature is not None
    data = [v for s in program.signature.data for v in s.variables]
    known = {v.name: v for v in data}
    if unknown := sorted(shapes.keys() - known.keys()):
        raise ArgumentError(f"shapes= names {unknown[0]!r}; the data is {', '.join(known)}.")
    length, fixed = _batch_length(program), fixed_data(program)

    def shape(v: Variable) -> tuple[int | str, ...]:
        if v.name in shapes:
            return _checked(v, tuple(shapes[v.name]))
        follows = v.shape[:1] == (length,) and v.name not in fixed
        return (BATCH, *v.shape[1:]) if follows else v.shape

    return {v.name: shape(v) for v in data}


def _checked(v: Variable, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
    fits = len(shape) == len(v.shape) and all(
        isinstance(n, str) or n == m for n, m in zip(shape, v.shape, strict=False)
    )
    if not fits or not all(n.isidentifier() for n in shape if isinstance(n, str)):
        raise ArgumentError(
            f"shapes= gives {v.name!r} the shape {shape}; it was traced as {v.type}. Give a name for each "
            'length that is free, and leave the others: ("b", 16).'
        )
    return shape


def _batch_length(program: Program) -> int | None:
    """How long the batch was when the Program was traced."""
    names = batch_names(program, (), WEIGHT, fixed_data(program))
    return next((v.shape[0] for v in program.inputs if v.name in names and v.size), None)


def fixed_data(program: Program) -> frozenset[str]:
    """The data that was declared with a length of its own."""
    declared = frozenset() if program.recipe is None else program.recipe.origin.fixed_data
    return declared & {*data_names(program)}
