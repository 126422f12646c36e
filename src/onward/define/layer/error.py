"""A layer that changes nothing on the way forward, and keeps gradients in range on their way back."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import HyperparameterError
from onward.core.structure import is_number
from onward.define.layer.base import layer


@layer
def clip_error(x: Any, max_value: float, *, name: str | None = None) -> jax.Array:
    """The array as it is; on the way back its gradient is moved into ``[-max_value, max_value]``.

    A complex gradient is shortened. The gradient of a mean over a batch is the smaller the longer the batch:
    so is what one device of several, or one of several micro-batches, finds larger.

    Source: Graves, Generating Sequences With Recurrent Neural Networks, 2013, section 2.1.

    Args:
        x: an array of floats of any shape.
        max_value: a number, at least 0.
        name: as for every layer.

    Returns:
        An array of the shape and dtype of x.

    Raises:
        HyperparameterError: ``max_value`` is negative or not finite.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.SGD(1.0).minimize(lambda w: 3 * ow.layer.clip_error(w, 0.5), jnp.float32(1)))
        >>> state, out = step(step.init(jnp.float32(1)))
        >>> float(out.loss), float(state.parameters)
        (3.0, 0.5)
    """
    return back_in_range(jnp.asarray(x), checked_bound(max_value))


def checked_bound(max_value: Any) -> float:
    """The bound as a number that is known while tracing."""
    if not is_number(max_value) or not math.isfinite(max_value) or max_value < 0:
        raise HyperparameterError(
            f"error_clip: max_value is {max_value!r}; expected a finite number of at least 0."
        )
    return float(max_value)


def _same(x: Any, max_value: float) -> Any:
    return x


def _forward(x: Any, max_value: float) -> tuple[Any, None]:
    return x, None


def _backward(max_value: float, _: None, gradient: Any) -> tuple[Any]:
    if jnp.iscomplexobj(gradient):
        size = jnp.abs(gradient)
        return (gradient * jnp.minimum(1, max_value / jnp.maximum(size, np.finfo(size.dtype).tiny)),)
    return (jnp.clip(gradient, -max_value, max_value),)


_same.__name__ = "error_clip"  # the type of its op in a traced network
back_in_range = jax.custom_vjp(_same, nondiff_argnums=(1,))
back_in_range.defvjp(_forward, _backward)
