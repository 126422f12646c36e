"""Whether a replacement computes what a pattern does: both are run on random numbers, and differentiated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.jaxprs.equations import Type
from onward.core.primitives.traits import Moves
from onward.core.variable import Variable, holds_keys
from onward.develop.rewrite.pattern import Pattern, shown_type

_LARGE = 2**24  # numbers of the largest array that is made
_ROUNDINGS, _MOST = 128, 0.03  # of the largest number of a result: what two ways to compute it may differ by

_NO_GRADIENT = (TypeError, ValueError, NotImplementedError)
_OTHER = (
    "rewrite: the replacement {new} computes something else than the pattern {old}. With {types}, on random "
    "numbers, {what} is {found} at {at}, where {old} makes it {expected}; {bound:.2g} apart would be "
    "rounding. ow.compare of both, traced, tells the op that parts them. If it is meant, give the tolerance: "
    "tolerance=0.01 of the largest number, or math.inf."
)


def expect_equal(old: Pattern, new: Pattern, types: Sequence[Type], tolerance: float | None) -> None:
    """Raise unless both compute the same at these types, and have the same gradients.

    Large arrays are compared at the lengths of ``like``. In a half precision the numbers are compared in
    float32 where both take it, since rounding would hide what differs. The third draw has zeros, ties and
    large numbers: there a gradient is a convention, and a replacement may be finite where the pattern is not.
    """
    _expect_same_results(old, new, types)
    if tolerance == math.inf:
        return
    types = _short(old, new, types)
    wide = tuple(Type(t.shape, jnp.float32) if _is_half(t) else t for t in types)
    wide = wide if _take(old, new, wide) else types
    bound = min(_ROUNDINGS * _coarsest(old, wide), _MOST) if tolerance is None else tolerance
    compared = False
    looks_up = _looks_up(old, wide)
    with jax.ensure_compile_time_eval():  # a Program may be built again while a function is traced
        for draw in range(3):
            values = [
                _drawn(t, np.random.default_rng((draw, i)), draw, wide, looks_up) for i, t in enumerate(wide)
            ]
            for what, expected, found in _both(old, new, values, draw < 2):
                compared |= bool(np.isfinite(expected).any())
                if draw == 2 and expected.dtype.kind in "fc":
                    found = np.where(np.isfinite(expected), found, expected)
                _expect_near(old, new, wide, what, expected, found, bound)
    if not compared:
        raise ArgumentError(
            f"rewrite: {old.name} gives no finite number of random ones, so nothing could be compared. "
            "tolerance=math.inf takes the replacement as it is."
        )


def _short(old: Pattern, new: Pattern, types: Sequence[Type]) -> tuple[Type, ...]:
    """The types to compare at: those of ``like`` where arrays are large and both take these."""
    short = tuple(Type(mine.shape, t.dtype) for mine, t in zip(old.types, types, strict=True))
    program = old.at(types)
    numbers = 0 if program is None else max((v.size for v in program.variables.values()), default=0)
    same_ranks = all(len(a.shape) == len(b.shape) for a, b in zip(short, types, strict=True))
    return short if numbers > _LARGE and same_ranks and _take(old, new, short) else tuple(types)


def _take(old: Pattern, new: Pattern, types: Sequence[Type]) -> bool:
    return old.at(types) is not None and new.at(types) is not None


def _expect_same_results(old: Pattern, new: Pattern, types: Sequence[Type]) -> None:
    """Raise unless both give as many arrays of the same types."""
    expected, found = (
        [(t.shape, np.dtype(t.dtype) if not holds_keys(t.dtype) else t.dtype) for t in body.out_types]
        for body in (old.body(types), new.body(types))
    )
    if expected != found:
        shown = [", ".join(map(shown_type, p.body(types).out_types)) for p in (old, new)]
        raise ArgumentError(
            f"rewrite: with {', '.join(map(shown_type, types))} the pattern {old.name} gives {shown[0]}, and "
            f"{new.name}, which should replace it, {shown[1]}. Expected the same types."
        )


def _both(
    old: Pattern, new: Pattern, values: Sequence[Any], gradients: bool
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Each result and each gradient of both functions, with what it is."""
    chosen = [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, np.inexact)]

    def results(pattern: Pattern) -> list[Any]:
        return jax.jit(pattern.flat)(*values)  # type: ignore[no-any-return]

    def pulled(pattern: Pattern, seeds: Sequence[Any]) -> Any:
        def of(*given: Any) -> list[Any]:
            now = dict(enumerate(values)) | dict(zip(chosen, given, strict=True))
            return [x for x in pattern.flat(*now.values()) if jnp.issubdtype(x.dtype, np.inexact)]

        return jax.jit(lambda given, seeds: jax.vjp(of, *given)[1](list(seeds)))(
            [values[i] for i in chosen], seeds
        )

    mine, theirs = results(old), results(new)
    for j, pair in enumerate(zip(mine, theirs, strict=True)):
        what = f"result {j}" if len(mine) > 1 else "the result"
        yield what, _numbers(pair[0]), _numbers(pair[1])
    seeds = [x for x in mine if jnp.issubdtype(x.dtype, np.inexact)]
    if not (gradients and chosen and seeds):
        return
    random = np.random.default_rng(1)
    seeds = [jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in seeds]
    try:
        expected = pulled(old, seeds)
    except _NO_GRADIENT:
        return
    try:
        made = pulled(new, seeds)
    except _NO_GRADIENT as error:
        raise ArgumentError(
            f"rewrite: {old.name} can be differentiated, and {new.name}, which should replace it, cannot: "
            f"{error}. Give it a rule: jax.custom_vjp."
        ) from error
    for i, g, h in zip(chosen, expected, made, strict=True):
        yield f"the gradient of argument {i}", _numbers(g), _numbers(h)


def _expect_near(
    old: Pattern,
    new: Pattern,
    types: Sequence[Type],
    what: str,
    expected: np.ndarray,
    found: np.ndarray,
    part: float,
) -> None:
    """Raise where two results are further apart than this part of the largest number."""
    finite = np.abs(expected[np.isfinite(expected)])
    scale = float(finite.max()) if finite.size else 0.0
    bound = scale * part
    is_exact = expected.dtype.kind in "biu"
    with np.errstate(invalid="ignore"):
        far = expected != found if is_exact else ~(np.abs(expected - found) <= bound)
    far &= ~((expected == found) | (np.isnan(expected) & np.isnan(found)))
    if far.any():
        at = tuple(int(i) for i in np.argwhere(far)[0])
        names = {"old": old.name, "new": new.name, "types": ", ".join(map(shown_type, types))}
        numbers = {"found": f"{found[at]:.6g}", "expected": f"{expected[at]:.6g}", "bound": bound}
        raise ArgumentError(_OTHER.format(**names, **numbers, what=what, at=list(at)))


def _coarsest(old: Pattern, types: Sequence[Type]) -> float:
    """The largest rounding of any number that a pattern computes."""
    program = old.at(types)
    variables = () if program is None else program.variables.values()
    return max((_rounding(v) for v in variables if v.is_float), default=0.0)


def _looks_up(old: Pattern, types: Sequence[Type]) -> bool:
    """Whether whole numbers may be places in an array."""
    program = old.at(types)
    found = () if program is None else program.ops
    return any(op.primitive.moves in (Moves.LOOKS_UP, Moves.CUTS_AT) or op.primitive.update for op in found)


def _rounding(v: Variable) -> float:
    return float(jnp.finfo(v.dtype).eps)  # type: ignore[no-untyped-call]


def _numbers(value: Any) -> np.ndarray:
    if holds_keys(value.dtype):
        value = jax.random.key_data(value)
    found = np.asarray(value)
    return found if found.dtype.kind in "biufc" else found.astype(np.float32)


def _drawn(t: Type, random: np.random.Generator, draw: int, types: Sequence[Type], looks_up: bool) -> Any:
    """Random numbers of a type: of both signs, such as a logarithm takes, then zeros, ties and large ones.

    Whole numbers are valid places where the pattern looks something up. Each row of bools has a True.
    """
    if holds_keys(t.dtype):
        return jax.random.split(jax.random.key(draw), t.shape)
    if t.dtype == bool:
        chosen = random.random(t.shape) < 0.7
        if t.shape:
            chosen[..., 0] = True
        return jnp.asarray(chosen)
    if jnp.issubdtype(t.dtype, np.integer):
        return jnp.asarray(random.integers(*_range(t, types, looks_up), t.shape), t.dtype)
    if draw == 0:
        value = random.standard_normal(t.shape)
    elif draw == 1:
        value = random.uniform(0.1, 1.0, t.shape)
    else:
        value = random.choice([0.0, 1.0, -1.0, 20.0, -20.0, 100.0, -100.0], t.shape)
    if jnp.issubdtype(t.dtype, np.complexfloating):
        value = value + 1j * random.standard_normal(t.shape)
    return jnp.asarray(value, t.dtype)


def _range(t: Type, types: Sequence[Type], looks_up: bool) -> tuple[int, int]:
    """From where to where whole numbers are drawn."""
    if looks_up:
        return 0, min((n for other in types for n in other.shape if n > 1), default=2)
    told = np.iinfo(t.dtype)
    return max(int(told.min), -200), min(int(told.max), 200)


def _is_half(t: Type) -> bool:
    return not holds_keys(t.dtype) and jnp.issubdtype(t.dtype, np.floating) and t.dtype.itemsize == 2
