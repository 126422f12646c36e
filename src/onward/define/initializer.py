"""First values of Variables, as functions ``(key, shape, dtype) -> array``.

    constant   normal  truncated_normal  uniform
    xavier_*   he_*  lecun_*             scaled by the number of inputs and outputs (fans) of the kernel
    orthogonal

An initializer is data: two made alike are equal, and its name is the type of the op that runs it. The
mathematics is that of ``jax.nn.initializers``, whose functions a declaration takes just as well. Numbers of
16 bits are drawn with 32 and rounded.

>>> import jax, onward as ow
>>> first = ow.initializer.he_normal()
>>> first == ow.initializer.kaiming_normal()
True
>>> first(jax.random.key(0), (784, 128), "bfloat16").dtype
dtype(bfloat16)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from onward.core.errors import ArgumentError
from onward.core.pointing import pointing
from onward.core.source import user_line
from onward.core.structure import describe

__all__ = [
    "Initializer",
    "constant",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
    "kaiming_normal",
    "kaiming_uniform",
    "lecun_normal",
    "lecun_uniform",
    "normal",
    "orthogonal",
    "truncated_normal",
    "uniform",
    "xavier_normal",
    "xavier_uniform",
]

__getattr__ = pointing(__name__, "ow.initializer")

_NEEDS_TWO_AXES = ("xavier", "he", "lecun", "orthogonal")


@dataclass(frozen=True, repr=False)
class Initializer:
    """A function of (key, shape, dtype) that is known by its name and its numbers."""

    name: str
    arguments: tuple[tuple[str, float], ...] = ()

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: Any = "float32") -> Any:
        """The array, in one compiled call for each shape.

        Raises:
            ArgumentError: a shape without fans, or numbers to draw that are not floating point numbers.
        """
        kind = jnp.dtype(dtype)
        if self.name == "constant":
            self._expect_held(kind)
            return jnp.full(shape, self.arguments[0][1], kind)
        self._check(tuple(shape), kind)
        return _drawn(key, self, tuple(shape), kind)

    def _expect_held(self, dtype: Any) -> None:
        """Raise ``ArgumentError`` where whole numbers of this dtype would be another number in silence."""
        value = self.arguments[0][1]
        if not jnp.issubdtype(dtype, jnp.integer):
            return
        limits = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
        if not (math.isfinite(value) and int(value) == value and limits.min <= value <= limits.max):
            raise ArgumentError(
                f"{self!r} at {user_line()}: the Variable is {dtype}, which cannot hold {value!r}. Give a "
                f"whole number from {limits.min} to {limits.max}, or declare it as float32."
            )

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments)})"

    def _check(self, shape: tuple[int, ...], dtype: Any) -> None:
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise ArgumentError(
                f"{self!r} at {user_line()} draws floating point numbers, and the Variable is {dtype}. "
                "Declare it as float32, or begin it with onward.initializer.constant(0)."
            )
        if len(shape) < 2 and self.name.split("_")[0] in _NEEDS_TWO_AXES:
            raise ArgumentError(
                f"{self!r} at {user_line()} needs a shape of inputs and outputs, at least 2 axes, and was "
                f"given {list(shape)}. For vectors write onward.initializer.constant(0.0) or normal(0.02)."
            )


def constant(value: float) -> Initializer:
    """The same number everywhere.

    Example:
        >>> import jax, onward as ow
        >>> ow.initializer.constant(2.0)(jax.random.key(0), (3,), "int32")
        Array([2, 2, 2], dtype=int32)
    """
    if not isinstance(value, int | float | np.number | np.bool):
        raise ArgumentError(f"initializer.constant: value is {describe(value)}; expected a number.")
    return Initializer("constant", (("value", value),))


def normal(stddev: float = 0.02, mean: float = 0.0) -> Initializer:
    """Normal numbers.

    Example:
        >>> import onward as ow
        >>> ow.initializer.normal(0.1)
        normal(stddev=0.1, mean=0.0)
    """
    return Initializer("normal", _spread("normal", stddev, mean))


def truncated_normal(stddev: float = 0.02, mean: float = 0.0) -> Initializer:
    """Normal numbers, those further than 2 ``stddev`` from the mean drawn again.

    ``stddev`` is that of the normal distribution before it is cut; afterwards it is 0.88 of it, as in torch,
    Keras and jax.

    Example:
        >>> import jax, onward as ow
        >>> w = ow.initializer.truncated_normal(0.1)(jax.random.key(0), (1000,))
        >>> bool((abs(w) <= 0.2).all())
        True
    """
    return Initializer("truncated_normal", _spread("truncated_normal", stddev, mean))


def uniform(low: float = -0.05, high: float = 0.05) -> Initializer:
    """Numbers evenly from ``low`` up to ``high``.

    Example:
        >>> import onward as ow
        >>> ow.initializer.uniform(0.0, 1.0)
        uniform(low=0.0, high=1.0)
    """
    limits = (("low", _number("uniform", "low", low)), ("high", _number("uniform", "high", high)))
    if low > high:
        raise ArgumentError(
            f"initializer.uniform: low is {low!r} and high is {high!r}; expected low to be the smaller one: "
            f"uniform({high!r}, {low!r})."
        )
    return Initializer("uniform", limits)


def xavier_uniform() -> Initializer:
    """Uniform with variance ``2 / (inputs + outputs)``; for tanh, and for layers without activation.

    Inputs and outputs of a kernel are its last two axes, times the window for a convolution (HWIO).

    Source: Glorot and Bengio, Understanding the Difficulty of Training Deep Feedforward Neural Networks,
    2010, equation 16.

    Example:
        >>> import jax, onward as ow
        >>> w = ow.initializer.xavier_uniform()(jax.random.key(0), (100, 200))
        >>> bool((abs(w) <= (6 / 300) ** 0.5).all())
        True
    """
    return Initializer("xavier_uniform")


def xavier_normal() -> Initializer:
    """Normal with variance ``2 / (inputs + outputs)``, cut at 2 standard deviations (torch: not cut).

    Source: Glorot and Bengio, 2010, equation 12.

    Example:
        >>> import onward as ow
        >>> ow.initializer.glorot_normal() == ow.initializer.xavier_normal()
        True
    """
    return Initializer("xavier_normal")


def he_uniform() -> Initializer:
    """Uniform with variance ``2 / inputs``; for relu.

    Source: He, Zhang, Ren and Sun, Delving Deep into Rectifiers, 2015, equation 10.

    Example:
        >>> import jax, onward as ow
        >>> w = ow.initializer.he_uniform()(jax.random.key(0), (3, 3, 16, 32))
        >>> bool((abs(w) <= (6 / (3 * 3 * 16)) ** 0.5).all())
        True
    """
    return Initializer("he_uniform")


def he_normal() -> Initializer:
    """Normal with variance ``2 / inputs``, cut at 2 standard deviations (torch: not cut); for relu.

    Source: He, Zhang, Ren and Sun, Delving Deep into Rectifiers, 2015, equation 10.

    Example:
        >>> import onward as ow
        >>> ow.initializer.he_normal().name
        'he_normal'
    """
    return Initializer("he_normal")


def lecun_uniform() -> Initializer:
    """Uniform with variance ``1 / inputs``; for selu.

    Source: LeCun, Bottou, Orr and Müller, Efficient BackProp, 1998, section 4.6.

    Example:
        >>> import onward as ow
        >>> ow.initializer.lecun_uniform()
        lecun_uniform()
    """
    return Initializer("lecun_uniform")


def lecun_normal() -> Initializer:
    """Normal with variance ``1 / inputs``, cut at 2 standard deviations; for selu.

    Source: LeCun, Bottou, Orr and Müller, Efficient BackProp, 1998, section 4.6.

    Example:
        >>> import onward as ow
        >>> ow.initializer.lecun_normal()
        lecun_normal()
    """
    return Initializer("lecun_normal")


def orthogonal(scale: float = 1.0) -> Initializer:
    """A matrix whose columns, or rows if these are fewer, are orthonormal, times ``scale``.

    All axes but the last count as one.

    Source: Saxe, McClelland and Ganguli, Exact Solutions to the Nonlinear Dynamics of Learning in Deep Linear
    Neural Networks, 2014, section 2.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> w = ow.initializer.orthogonal()(jax.random.key(0), (8, 4))
        >>> bool(jnp.allclose(w.T @ w, jnp.eye(4), atol=1e-5))
        True
    """
    return Initializer("orthogonal", (("scale", _number("orthogonal", "scale", scale)),))


glorot_uniform, glorot_normal = xavier_uniform, xavier_normal
kaiming_uniform, kaiming_normal = he_uniform, he_normal


def _spread(owner: str, stddev: Any, mean: Any) -> tuple[tuple[str, float], ...]:
    """The arguments of a normal distribution."""
    return ("stddev", _number(owner, "stddev", stddev, 0.0)), ("mean", _number(owner, "mean", mean))


def _number(owner: str, name: str, value: Any, least: float = -math.inf) -> Any:
    """The number, if it is finite and at least ``least``; else ``ArgumentError``.

    >>> _number("normal", "stddev", -1.0, 0.0)
    Traceback (most recent call last):
        ...
    onward.core.errors.ArgumentError: initializer.normal: stddev is -1.0; expected a finite number of at
    least 0.
    """
    if not isinstance(value, int | float | np.number) or not math.isfinite(value) or value < least:
        above = "" if least == -math.inf else f" of at least {least:g}"
        found = describe(value) if not isinstance(value, int | float) else repr(value)
        raise ArgumentError(f"initializer.{owner}: {name} is {found}; expected a finite number{above}.")
    return value


def _normal(stddev: float, mean: float) -> Any:
    return lambda *args: mean + initializers.normal(stddev)(*args)


def _truncated_normal(stddev: float, mean: float) -> Any:
    return lambda *args: mean + initializers.truncated_normal(stddev)(*args)


def _uniform(low: float, high: float) -> Any:
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, low, high)


_MATHEMATICS: dict[str, Callable[..., Any]] = {
    "normal": _normal,
    "truncated_normal": _truncated_normal,
    "uniform": _uniform,
}  # the others are those of jax.nn.initializers


@partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: Any, initializer: Initializer, shape: tuple[int, ...], dtype: Any) -> Any:
    mathematics = _MATHEMATICS.get(initializer.name) or getattr(initializers, initializer.name)
    draw = mathematics(**dict(initializer.arguments))
    return draw(key, shape, jnp.promote_types(dtype, "float32")).astype(dtype)
