"""The loss as a function of the parameters, for rules that evaluate it again: on all devices the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.jaxprs.tracing import current_axis
from onward.core.lower import lower
from onward.core.marks import WEIGH
from onward.core.program import Program, Variable
from onward.core.walk import prune


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
    counts: Any = None  # False on a device none of whose examples counts, where a mean is 0 / 0

    def __call__(self, *parameters: Any) -> Any:
        """The loss."""
        return _mean(self.own(*parameters))

    def value_and_gradient(self, *parameters: Any) -> tuple[Any, tuple[Any, ...]]:
        """The loss and its gradients, each pointing uphill (of a complex parameter JAX's conjugate)."""
        value, gradients = jax.value_and_grad(self.own, tuple(range(len(parameters))))(*parameters)
        return _mean(value), tuple(map(_uphill, map(self._merged, gradients)))

    def hessian_times(self, parameters: Sequence[Any], vectors: Sequence[Any]) -> tuple[Any, ...]:
        """The second derivatives of the loss, times a vector that has the types of the parameters."""

        def slope(*at: Any) -> Any:
            return jax.grad(self.own, tuple(range(len(at))))(*at)

        return tuple(map(self._merged, jax.jvp(slope, tuple(parameters), tuple(vectors))[1]))

    def _merged(self, gradient: Any) -> Any:
        return _mean(gradient if self.counts is None else jnp.where(self.counts, gradient, 0))


class LossFunction:
    """The forward pass as a function of some of the parameters."""

    def __init__(self, program: Program, trained: Sequence[Variable]) -> None:
        assert program.loss is not None
        self.trained = tuple(trained)
        self.part = prune(program, [program.loss])
        weighing = (op.inputs[1] for op in self.part.ops if op.type is WEIGH)
        self.run = lower(self.part, [*self.part.outputs, *weighing])
        self.reads = (*self.part.state, *self.part.inputs)

    def at(self, env: Mapping[Variable, Any]) -> Loss:
        """The loss of the parameters with everything else as it is in this step."""

        def run(parameters: Sequence[Any]) -> list[Any]:
            given = (x.astype(p.dtype) for p, x in zip(self.trained, parameters, strict=True))
            values = {**env, **dict(zip(self.trained, given, strict=True))}
            state = [values[v] for v in self.part.state]
            return self.run(state, [values[v] for v in self.part.inputs])

        factors = run([env[p] for p in self.trained])[1:]  # how much a device counts, whatever the parameters
        return Loss(lambda *parameters: run(parameters)[0], factors[0] != 0 if factors else None)


def _mean(value: Any) -> Any:
    """The mean over the devices that this is traced for."""
    axis = current_axis()
    return value if axis is None else lax.pmean(value, axis.name)


def _uphill(gradient: Any) -> Any:
    return gradient.conj() if jnp.iscomplexobj(gradient) else gradient
