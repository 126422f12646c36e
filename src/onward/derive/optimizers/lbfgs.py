"""L-BFGS: Newton's method with a Hessian remembered from the last steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.errors import HyperparameterError
from onward.core.words import UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.checks import check_counts
from onward.derive.optimizers.line_search import Point, strong_wolfe
from onward.derive.rule import Hyperparameter, Slots
from onward.derive.update.loss import Loss

Arrays = tuple[Any, ...]


class LBFGS(Optimizer):
    """A quasi-Newton direction from the last ``memory`` steps, and a line search along it.

    With ``s = w' - w`` and ``y = g' - g`` of the remembered steps, H is the BFGS estimate of the inverse
    Hessian begun at ``(s^T y / y^T y) I`` of the newest pair (``I / max(1, |g|)`` without one);
    ``p = -H g`` by the two-loop recursion; ``w <- w + a p``, where a satisfies the strong Wolfe conditions
    with the constants ``decrease`` and ``curvature``. The search begins at ``a = learning_rate`` and
    evaluates loss and gradient at most ``evaluations`` times; mostly once or twice.

    Both gradients of a pair are of the batch of that step, so a new batch does not disturb them, yet the
    method is meant for large or whole batches. Rules that change the gradient change the direction only:
    search and pairs are about the loss itself. A direction that leads uphill is replaced by ``-g``. A
    step that finds nothing better leaves the parameters and forgets its oldest pair. The slots take
    ``2 * memory`` times the memory of the parameters. Complex parameters count as pairs of real numbers.

    Source: Nocedal and Wright, Numerical Optimization, 2006, algorithms 7.4 and 7.5, equation 7.20; Liu and
    Nocedal, On the limited memory BFGS method, 1989. ``memory`` is 10 in optax and scipy too, 100 in torch,
    whose line search is off by default.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def rosenbrock(w):
        ...     return (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2
        >>> w = jnp.array([-1.2, 1.0])
        >>> step = ow.compile(ow.LBFGS().minimize(rosenbrock, w))
        >>> state = step.init(w)
        >>> for _ in range(40):
        ...     state, out = step(state)
        >>> state.parameters.round(3).tolist()
        [1.0, 1.0]
    """

    type: ClassVar[UpdateType] = UpdateType.ACROSS
    evaluates_loss: ClassVar[bool] = True
    learning_rate: Hyperparameter = 1.0
    memory: int = 10
    evaluations: int = 20
    decrease: float = 1e-4
    curvature: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "memory", "evaluations")
        if not 0 < self.decrease < self.curvature < 1:
            raise HyperparameterError(
                f"LBFGS: decrease is {self.decrease} and curvature {self.curvature}. They must satisfy "
                "0 < decrease < curvature < 1."
            )

    def init(self, parameter: Any) -> Slots:
        history = jnp.zeros((self.memory, *parameter.shape), parameter.dtype)
        return {"steps": history, "changes": history}

    def update(  # type: ignore[override]
        self,
        parameters: Arrays,
        gradients: Arrays,
        slots: tuple[Slots, ...],
        loss: Loss,
    ) -> tuple[Arrays, tuple[Slots, ...]]:
        steps, changes = (tuple(s[name] for s in slots) for name in ("steps", "changes"))
        newest_first = (self.step - 1 - jnp.arange(self.memory)) % self.memory
        value, here = loss.value_and_gradient(*parameters)
        direction = two_loop(gradients, steps, changes, newest_first)
        slope = _dot(direction, here)
        direction = _map(lambda d, g: -jnp.where(slope > 0, d, g), direction, here)
        start = Point(jnp.zeros_like(slope), value.astype(slope.dtype), _dot(direction, here))

        def moved(step: Any) -> Arrays:
            return _map(lambda p, d: p + step.astype(jnp.abs(p).dtype) * d, parameters, direction)

        def evaluate(step: Any) -> tuple[Point, Arrays]:
            value, there = loss.value_and_gradient(*moved(step))
            return Point(step, value.astype(slope.dtype), _dot(direction, there)), there

        first = jnp.asarray(self.learning_rate, slope.dtype)
        end, there = strong_wolfe(
            evaluate, start, here, first, self.decrease, self.curvature, self.evaluations
        )
        new = moved(end.step)
        pair = self.pair(_map(jnp.subtract, new, parameters), _map(jnp.subtract, there, here))
        place = self.step % self.memory
        states = tuple(
            {"steps": s.at[place].set(a), "changes": y.at[place].set(b)}
            for s, y, a, b in zip(steps, changes, *pair, strict=True)
        )
        return new, states

    def pair(self, step: Arrays, change: Arrays) -> tuple[Arrays, Arrays]:
        """A step and the change of the gradient along it; zeros, which count as none, without curvature."""
        product, size = _dot(step, change), _dot(change, change)
        is_curved = product > np.finfo(product.dtype).eps * size
        kept = [_map(lambda x: jnp.where(is_curved, x, 0), x) for x in (step, change)]
        return kept[0], kept[1]


def two_loop(gradients: Arrays, steps: Arrays, changes: Arrays, newest_first: Any) -> Arrays:
    """The gradients times the BFGS estimate of the inverse Hessian.

    Source: Nocedal and Wright, Numerical Optimization, 2006, algorithm 7.4, with equation 7.20.

    Args:
        gradients: one array for each parameter.
        steps: for each parameter, the remembered steps along a first axis; zeros stand for none.
        changes: the changes of the gradients along them.
        newest_first: the order of age, int32 of shape (memory,).

    Example:
        >>> import jax.numpy as jnp
        >>> s = jnp.array([[1.0, 0.0]])
        >>> [d.tolist() for d in two_loop((jnp.ones(2),), (s,), (4 * s,), jnp.arange(1))]
        [[0.25, 0.25]]
    """
    products = jax.vmap(_dot)(steps, changes)
    is_pair = products > 0
    inverse = jnp.where(is_pair, 1 / jnp.where(is_pair, products, 1), 0)

    def back(q: Arrays, i: Any) -> tuple[Arrays, Any]:
        share = inverse[i] * _dot(_at(steps, i), q)
        return _map(lambda x, y: x - _like(share, x) * y, q, _at(changes, i)), share

    def forth(r: Arrays, at: tuple[Any, Any]) -> tuple[Arrays, None]:
        i, share = at
        rest = share - inverse[i] * _dot(_at(changes, i), r)
        return _map(lambda x, s: x + _like(rest, x) * s, r, _at(steps, i)), None

    q, shares = lax.scan(back, gradients, newest_first)
    newest = newest_first[jnp.argmax(is_pair[newest_first])]
    size = _dot(_at(changes, newest), _at(changes, newest))
    length = jnp.sqrt(_dot(gradients, gradients))
    scale = jnp.where(
        is_pair[newest], products[newest] / jnp.where(size > 0, size, 1), 1 / jnp.maximum(1, length)
    )
    r = _map(lambda x: _like(scale, x) * x, q)
    return lax.scan(forth, r, (newest_first, shares), reverse=True)[0]


def _dot(a: Arrays, b: Arrays) -> Any:
    """The sum of the products of all numbers, those of complex ones as of pairs of real numbers."""
    return sum(jnp.vdot(x, y, precision=lax.Precision.HIGHEST).real for x, y in zip(a, b, strict=True))


def _map(function: Any, *arrays: Sequence[Any]) -> Arrays:
    return tuple(function(*each) for each in zip(*arrays, strict=True))


def _at(arrays: Arrays, i: Any) -> Arrays:
    return tuple(x[i] for x in arrays)


def _like(number: Any, array: Any) -> Any:
    """A number as precise as the array, so that arrays of several dtypes keep theirs."""
    return number.astype(jnp.abs(array).dtype)
