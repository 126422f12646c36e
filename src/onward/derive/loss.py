"""The loss as a function of the parameters, for rules that evaluate it again: on all devices the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from onward.core.jaxprs import current_axis


@dataclass(frozen=True)
class Loss:
    """``loss(*parameters)`` on the batch of this step; of all devices together, where there are several.

    What a rule differentiates by itself with ``jax.grad`` is each device's own: take ``value_and_gradient``
    and ``hessian_times``, which are those of the whole batch.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = Loss(lambda x, y: jnp.sum(x**2) * y)
        >>> value, gradients = loss.value_and_gradient(jnp.ones(2), jnp.float32(3.0))
        >>> float(value), [g.tolist() for g in gradients]
        (6.0, [[6.0, 6.0], 2.0])
    """

    own: Callable[..., Any]

    def __call__(self, *parameters: Any) -> Any:
        """The loss."""
        return _mean(self.own(*parameters))

    def value_and_gradient(self, *parameters: Any) -> tuple[Any, tuple[Any, ...]]:
        """The loss and its gradients, each pointing uphill (of a complex parameter the conjugate of JAX's)."""
        value, gradients = jax.value_and_grad(self.own, tuple(range(len(parameters))))(*parameters)
        return _mean(value), tuple(map(_uphill, map(_mean, gradients)))

    def hessian_times(self, parameters: Sequence[Any], vectors: Sequence[Any]) -> tuple[Any, ...]:
        """The second derivatives of the loss, times a vector that has the types of the parameters."""

        def slope(*at: Any) -> Any:
            return jax.grad(self.own, tuple(range(len(at))))(*at)

        return tuple(map(_mean, jax.jvp(slope, tuple(parameters), tuple(vectors))[1]))


def _mean(value: Any) -> Any:
    """The mean over the devices that this is traced for."""
    axis = current_axis()
    return value if axis is None else lax.pmean(value, axis.name)


def _uphill(gradient: Any) -> Any:
    return gradient.conj() if jax.numpy.iscomplexobj(gradient) else gradient
