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
from onward.core.variable import Variable, holds_keys
from onward.develop.rewrite.pattern import Pattern, shown_type

_LARGE = 2**20  # numbers that a pattern reads
_ROUNDINGS = 32  # of the largest number of a result: what two ways to compute it may differ by

_OTHER = (
    "rewrite: {new} computes something else than {old}. With {types}, on random numbers, {what} is {found} "
    "at {at}, where {old} makes it {expected}; {bound:.2g} apart would be rounding. The op that parts them: "
    "print(ow.compare(ow.trace({old}, ...), ow.trace({new}, ...))). If it is meant, give the tolerance: "
    "tolerance=0.01 of the largest number, or math.inf."
)


def expect_equal(
    old: Pattern, new: Pattern, types: Sequence[Type], tolerance: float | None, gradients: bool
) -> None:
    """Raise unless both compute the same at these types, and have the same gradients.

    Large arrays are compared at the lengths of ``like``. In a half precision the numbers are compared in
    float32 where both take it, since rounding would hide what differs.
    """
    _expect_same_results(old, new, types)
    if tolerance == math.inf:
        return
    types = _short(old, new, types)
    wide = tuple(Type(t.shape, jnp.float32) if _is_half(t) else t for t in types)
    wide = wide if _take(old, new, wide) else types
    compared = False
    for draw in range(2):
        values = [_drawn(t, np.random.default_rng((draw, i)), draw, wide) for i, t in enumerate(wide)]
        for what, expected, found in _both(old, new, values, gradients):
            compared |= bool(np.isfinite(expected).any())
            _expect_near(old, new, wide, what, expected, found, tolerance)
    if not compared:
        raise ArgumentError(
            f"rewrite: {old.name} gives no finite number of random ones, so nothing could be compared. "
            "tolerance=math.inf takes the replacement as it is."
        )


def _short(old: Pattern, new: Pattern, types: Sequence[Type]) -> tuple[Type, ...]:
    """The types to compare at: those of ``like`` where arrays are large and both take these."""
    short = tuple(Type(mine.shape, t.dtype) for mine, t in zip(old.types, types, strict=True))
    numbers = sum(math.prod(t.shape) for t in types)
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
    for i, g, h in zip(chosen, pulled(old, seeds), pulled(new, seeds), strict=True):
        yield f"the gradient of argument {i}", _numbers(g), _numbers(h)


def _expect_near(
    old: Pattern,
    new: Pattern,
    types: Sequence[Type],
    what: str,
    expected: np.ndarray,
    found: np.ndarray,
    tolerance: float | None,
) -> None:
    """Raise where two results are further apart than rounding, or than the tolerance."""
    finite = np.abs(expected[np.isfinite(expected)])
    scale = float(finite.max()) if finite.size else 0.0
    bound = scale * (_ROUNDINGS * _coarsest(old, new, types) if tolerance is None else tolerance)
    is_exact = expected.dtype.kind in "biu"
    with np.errstate(invalid="ignore"):
        far = expected != found if is_exact else ~(np.abs(expected - found) <= bound)
    far &= ~((expected == found) | (np.isnan(expected) & np.isnan(found)))
    if far.any():
        at = tuple(int(i) for i in np.argwhere(far)[0])
        names = {"old": old.name, "new": new.name, "types": ", ".join(map(shown_type, types))}
        numbers = {"found": f"{found[at]:.6g}", "expected": f"{expected[at]:.6g}", "bound": bound}
        raise ArgumentError(_OTHER.format(**names, **numbers, what=what, at=list(at)))


def _coarsest(old: Pattern, new: Pattern, types: Sequence[Type]) -> float:
    """The largest rounding of any number that either computes."""
    programs = (old.at(types), new.at(types))
    variables = (v for p in programs if p is not None for v in p.variables.values())
    return max((_rounding(v) for v in variables if v.is_float), default=0.0)


def _rounding(v: Variable) -> float:
    return float(jnp.finfo(v.dtype).eps)  # type: ignore[no-untyped-call]


def _numbers(value: Any) -> np.ndarray:
    if holds_keys(value.dtype):
        value = jax.random.key_data(value)
    found = np.asarray(value)
    return found if found.dtype.kind in "biufc" else found.astype(np.float32)


def _drawn(t: Type, random: np.random.Generator, draw: int, types: Sequence[Type]) -> Any:
    """Random numbers of a type: of both signs first, then such as a logarithm takes."""
    if holds_keys(t.dtype):
        return jax.random.split(jax.random.key(draw), t.shape)
    if t.dtype == bool:
        return jnp.asarray(random.random(t.shape) < 0.7)
    if jnp.issubdtype(t.dtype, np.integer):
        high = min((n for other in types for n in other.shape if n > 1), default=2)
        return jnp.asarray(random.integers(0, min(high, 100), t.shape), t.dtype)
    value = random.standard_normal(t.shape) if draw == 0 else random.uniform(0.1, 1.0, t.shape)
    if jnp.issubdtype(t.dtype, np.complexfloating):
        value = value + 1j * random.standard_normal(t.shape)
    return jnp.asarray(value, t.dtype)


def _is_half(t: Type) -> bool:
    return not holds_keys(t.dtype) and jnp.issubdtype(t.dtype, np.floating) and t.dtype.itemsize == 2
