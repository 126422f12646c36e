"""Activations: the functions of ``jax.nn`` as layers, which take Lazy values and name what they return.

Options beside the array are those of the function in ``jax.nn``. Inside of a traced function ``jax.nn``
itself does as well.

>>> import onward as ow
>>> hidden = ow.layer.relu(ow.layer.fc(ow.data("x", (None, 4)), 3))
>>> [v.name for v in ow.trace(hidden).outputs]
['relu_0']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from onward.core.errors import ArgumentError, nearest
from onward.core.source import user_line
from onward.define.layer.base import layer

_DOCSTRING = """{formula}, as ``jax.nn.{name}``.

    Args:
        x: an array of any shape.
        options: those of ``jax.nn.{name}``.
        name: as for every layer.

    Returns:
        An array of the shape and dtype of x.
    {source}
    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> [round(y, 3) for y in ow.layer.{name}(jnp.zeros(2)).tolist()]
        {at_zero}
    """


class Activation(Protocol):
    """A layer that computes number by number, or along the last axis."""

    def __call__(self, x: Any, *, name: str | None = None, **options: Any) -> jax.Array:
        """Compute it of an array."""
        ...


_BY_NAME: dict[str, Callable[..., Any]] = {}


def _activation(
    function: Callable[..., Any], formula: str, source: str = "", zero: float = 0.0
) -> Activation:
    """A layer of one of the functions of ``jax.nn``; ``zero`` is what it makes of two zeros."""

    def activation(x: Any, *, name: str | None = None, **options: Any) -> jax.Array:
        return function(jnp.asarray(x), **options)

    _BY_NAME[function.__name__] = function
    activation.__name__ = activation.__qualname__ = function.__name__
    activation.__doc__ = _DOCSTRING.format(
        formula=formula,
        name=function.__name__,
        source=f"\n    Source: {source}.\n" if source else "",
        at_zero=[zero, zero],
    )
    return layer(activation)


_NAIR = "Nair and Hinton, Rectified Linear Units Improve Restricted Boltzmann Machines, 2010"
_MAAS = "Maas, Hannun and Ng, Rectifier Nonlinearities Improve Acoustic Models, 2013, equation 2"
_CLEVERT = "Clevert, Unterthiner and Hochreiter, Exponential Linear Units, 2016, equation 15"
_KLAMBAUER = "Klambauer et al., Self-Normalizing Neural Networks, 2017, equation 2"
_HENDRYCKS = "Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, section 2"
_ELFWING = "Elfwing, Uchibe and Doya, Sigmoid-Weighted Linear Units, 2018, section 2.2"
_HOWARD = "Howard et al., Searching for MobileNetV3, 2019, section 5.2"

relu = _activation(jax.nn.relu, "``max(x, 0)``", _NAIR)
relu6 = _activation(jax.nn.relu6, "``min(max(x, 0), 6)``")
leaky_relu = _activation(jax.nn.leaky_relu, "``max(x, 0.01 x)``", _MAAS)
elu = _activation(jax.nn.elu, "``x`` above 0, ``exp(x) - 1`` below", _CLEVERT)
selu = _activation(jax.nn.selu, "``elu``, scaled to keep mean 0 and variance 1", _KLAMBAUER)
gelu = _activation(
    jax.nn.gelu,
    "``x P(X <= x)`` for a normal X, approximated with tanh (``approximate=False``: not)",
    _HENDRYCKS,
)
silu = _activation(jax.nn.silu, "``x sigmoid(x)``, also called swish", _ELFWING)
hard_silu = _activation(jax.nn.hard_silu, "``x relu6(x + 3) / 6``, also called hard swish", _HOWARD)
tanh = _activation(jax.nn.tanh, "The hyperbolic tangent")
sigmoid = _activation(jax.nn.sigmoid, "``1 / (1 + exp(-x))``", zero=0.5)
softplus = _activation(jax.nn.softplus, "``log(1 + exp(x))``", zero=0.693)
softmax = _activation(jax.nn.softmax, "``exp(x) / sum(exp(x))`` over the last axis", zero=0.5)
log_softmax = _activation(jax.nn.log_softmax, "``x - log(sum(exp(x)))`` over the last axis", zero=-0.693)


def activated(x: Any, act: str | Callable[..., Any] | None) -> Any:
    """Apply an activation, given by name or as a function, to the array; None leaves it as it is.

    Raises:
        ArgumentError: no activation has this name.
    """
    if act is None:
        return x
    if callable(act):
        return act(x)
    if act not in _BY_NAME:
        raise ArgumentError(
            f"A layer at {user_line()} was given act={act!r}. {nearest(str(act), _BY_NAME)} Or pass a "
            "function."
        )
    return _BY_NAME[act](x)
