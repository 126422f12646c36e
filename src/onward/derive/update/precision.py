"""How slots and low precision parameters are kept between steps: exactly, rounded at random, or in 8 bits.

Rules compute in float32 or wider. What does not fit the dtype it is kept in must not be lost: a bfloat16
number of 1.0 does not change when 0.001 is added to it, however often.

>>> import jax.numpy as jnp
>>> w, rest = jnp.bfloat16(1.0), jnp.float32(0.0)
>>> for _ in range(100):
...     w, rest = narrowed(widened(w) + rest + 0.001, jnp.bfloat16)
>>> float(w), round(float(w) + float(rest), 4)
(1.1015625, 1.1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.errors import GraphError, HyperparameterError
from onward.core.jaxprs.equations import Type
from onward.core.structure import describe, is_word
from onward.core.variable import limits_of

_FORMS = ("float32", "bfloat16", "float16", "int8")
_BLOCK = 256
_SMALL = 4096  # numbers; what is smaller is not worth 8 bits


@dataclass(frozen=True)
class KeptSlot:
    """A slot as it is kept: the arrays that hold it, by what is added to its name."""

    used: Type
    form: str | None = None

    @property
    def types(self) -> dict[str, Type]:
        """The arrays, by the ending of their names."""
        if self.form != "int8":
            return {"": Type(self.used.shape, np.dtype(self.form or self.used.dtype))}
        blocks = -(-prod(self.used.shape) // _BLOCK)
        return {
            "": Type((blocks, _BLOCK), np.dtype(np.uint8)),
            "/scale": Type((blocks,), np.dtype(np.float32)),
        }

    def read(self, arrays: Sequence[Any]) -> Any:
        """The slot as the rule takes it."""
        if self.form == "int8":
            codes, scale = arrays
            numbers = jnp.asarray(_codebook())[codes] * scale[:, None]
            return numbers.ravel()[: prod(self.used.shape)].reshape(self.used.shape).astype(self.used.dtype)
        return arrays[0].astype(self.used.dtype)

    def write(self, value: Any, step: Any) -> list[Any]:
        """The arrays that hold the next value."""
        if self.form == "int8":
            return _in_blocks(value, step)
        (kind,) = self.types.values()
        if kind.dtype.itemsize < np.dtype(self.used.dtype).itemsize:
            top = float(limits_of(kind.dtype).max)
            held = jnp.where(jnp.isfinite(value), jnp.clip(value, -top, top), value)  # not to become infinite
            return [_not_vanished(held, rounded_at_random(held, kind.dtype, step))]
        return [jnp.asarray(value, kind.dtype)]


def kept(slot: Any, parameter: Any, form: str | None) -> KeptSlot:
    """How a slot is kept where ``form`` is asked for: only floats as many as those of their parameter."""
    used = Type(slot.shape, slot.dtype)
    fits = slot.shape == parameter.shape and slot.dtype == np.float32
    if form is None or not fits or (form == "int8" and prod(slot.shape) < _SMALL):
        return KeptSlot(used)
    return KeptSlot(used, form)


def slots_of(rule: Any, parameter: Any, form: str | None) -> dict[str, KeptSlot]:
    """The slots that a rule keeps for a parameter of this shape and dtype, by name."""
    like = Type(parameter.shape, jnp.promote_types(parameter.dtype, np.float32))
    types = jax.eval_shape(lambda p: _expect_mapping(rule, rule.init(p)), like)
    return {name: kept(used, like, form) for name, used in types.items()}


def _expect_mapping(rule: Any, slots: Any) -> dict[str, Any]:
    """The slots that a rule makes, which have to be arrays by name."""
    if not isinstance(slots, Mapping) or not all(isinstance(name, str) for name in slots):
        raise GraphError(
            f"{type(rule).__name__}.init returned {describe(slots)}; expected a dict of arrays by name, such "
            "as {'mean': jnp.zeros_like(parameter)}, or {} for a rule without slots."
        )
    return dict(slots)


def dtype_word(dtype: Any) -> Any:
    """The name of a dtype that was given as one, such as ``jnp.bfloat16``; anything else as it is."""
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        return dtype


def check_form(what: str, form: object) -> None:
    """Raise ``HyperparameterError`` unless this says how slots are kept."""
    if form is not None and not is_word(form, _FORMS):
        raise HyperparameterError(
            f"{what}: slot_dtype is {form!r}; expected {', '.join(map(repr, _FORMS))}, or None for what the "
            "rule asks for."
        )


def real_of(parameters: Sequence[Any]) -> np.dtype[Any]:
    """The dtype of real numbers that parameters are computed with: theirs, at least float32."""
    wide = jnp.result_type(np.float32, *(p.dtype for p in parameters))
    return np.empty(0, wide).real.dtype


def is_low(dtype: Any) -> bool:
    """Whether a dtype of floats is narrower than float32."""
    return bool(jnp.issubdtype(dtype, np.floating)) and np.dtype(dtype).itemsize < 4


def widened(value: Any) -> Any:
    """A value in the dtype in which rules compute: its own, at least float32."""
    return value.astype(jnp.promote_types(value.dtype, np.float32))


def narrowed(value: Any, dtype: Any) -> tuple[Any, Any]:
    """A value in a lower dtype, and what that leaves out; together they are the value again."""
    near = _rounded(value, dtype)
    rest = value - near.astype(value.dtype)
    return near, jnp.where(jnp.isfinite(rest), rest, 0)


def master(parameter: Any, rest: Any) -> list[Any]:
    """The value of a low precision parameter and what it leaves out; alone, if another one was put there."""
    value = widened(parameter) + rest
    return [jnp.where(_rounded(value, parameter.dtype) == parameter, value, widened(parameter))]


def rounded_at_random(value: Any, dtype: Any, step: Any) -> Any:
    """A value rounded up or down, each as often as it is near, so that the mean over many steps is exact.

    What decides is a hash of the number, its place in the array and the step: equal runs are equal, and equal
    numbers are rounded each by itself. Of a part of an array, as ``Sharded`` has them, the place is that in
    the part.

    Source: Gupta et al., Deep Learning with Limited Numerical Precision, 2015, section 3.
    """
    value = value.astype(np.float32)
    near = _rounded(value, dtype)
    error = value - near.astype(np.float32)
    other = _neighbour(near, error > 0)
    gap = jnp.abs(other.astype(np.float32) - near.astype(np.float32))
    turned = jnp.isfinite(gap) & (_chance(value, step) * gap < jnp.abs(error))
    return jnp.where(turned, other, near)


def _not_vanished(value: Any, near: Any) -> Any:
    """Replace a zero rounded from another value by the smallest number of its dtype: zeros are divided by."""
    return jnp.where((near == 0) & (value != 0), _neighbour(jnp.zeros_like(near), value > 0), near)


def _rounded(value: Any, dtype: Any) -> Any:
    """The nearest number of a lower dtype, behind a barrier: XLA takes there and back again for nothing."""
    return lax.optimization_barrier(value.astype(dtype))


def _chance(value: Any, step: Any) -> Any:
    """A number from 0 to 1 that looks random, by the bits of a float32, its place and the step."""
    bits = lax.bitcast_convert_type(value, np.uint32)
    place = lax.iota(np.uint32, value.size).reshape(value.shape)
    hashed = _hashed(bits ^ _hashed(place + step.astype(np.uint32) * np.uint32(0x9E3779B9)))
    return (hashed >> 8).astype(np.float32) / 2**24


def _neighbour(value: Any, above: Any) -> Any:
    """The next number of a 16 bit dtype, above or below."""
    bits = lax.bitcast_convert_type(value, np.uint16)
    away = jnp.where(above == (value > 0), bits + np.uint16(1), bits - np.uint16(1))
    sign = jnp.where(above, np.uint16(0), np.uint16(0x8000))
    return lax.bitcast_convert_type(jnp.where(value == 0, sign | np.uint16(1), away), value.dtype)


def _hashed(bits: Any) -> Any:
    """Well mixed bits: the finalizer of MurmurHash3 (Appleby, 2008)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * np.uint32(factor)
    return bits ^ (bits >> 16)


def _in_blocks(value: Any, step: Any) -> list[Any]:
    """Codes and scales, block by block of 256 numbers; rounded at random, and to zero only what is zero.

    A mean that is rounded to the nearest code would never move by the small steps of a decay near 1, and a
    variance of zero would divide.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022, sections 2.1 and 3, but for
    the rounding, which is that of Gupta et al., Deep Learning with Limited Numerical Precision, 2015.
    """
    flat = jnp.pad(value.ravel().astype(np.float32), (0, -value.size % _BLOCK)).reshape(-1, _BLOCK)
    scale = jnp.max(jnp.abs(flat), axis=1)
    unit = flat / jnp.where(scale == 0, 1, scale)[:, None]
    book = jnp.asarray(_codebook())
    below = jnp.clip(jnp.searchsorted(book, unit, side="right") - 1, 0, book.size - 2)
    share = (unit - book[below]) / (book[below + 1] - book[below])
    code = below + (_chance(flat, step) < share)
    vanished = (book[code] == 0) & (unit != 0)
    code = jnp.where(vanished, code + jnp.where(unit > 0, 1, -1), code)
    return [code.astype(np.uint8), scale]


@cache
def _codebook() -> np.ndarray[Any, Any]:
    """256 numbers from -1 to 1, the denser the nearer to zero: the signed dynamic tree."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        ends = np.linspace(0.1, 1.0, 2**exponent + 1)
        middles = (ends[1:] + ends[:-1]) / 2
        numbers += [sign * m * 10.0 ** (exponent - 6) for m in middles for sign in (1, -1)]
    return np.sort(np.asarray(numbers, np.float32))
