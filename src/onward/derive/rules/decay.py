"""Parameters that are drawn towards zero: weight decay in three modes, and the L1 and L2 penalties.

The three modes differ in what the decay is multiplied with:

    l2           g <- g + rate w               through the optimizer, as a penalty rate/2 |w|**2 in the loss
    decoupled    w <- w - learning_rate rate w     beside the optimizer, follows the learning rate
    independent  w <- w - rate w                   beside the optimizer, whatever the learning rate
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from onward.core.errors import HyperparameterError
from onward.derive.rule import GradientRule, Hyperparameter, ParameterRule, Slots

_MODES = ("decoupled", "independent", "l2")


class L2(GradientRule):
    """A penalty of ``rate / 2 |w|**2`` on the loss: ``g <- g + rate w``.

    What torch.optim's ``weight_decay`` of SGD and Adam is, and Paddle's ``L2Decay``; Keras' ``l2(r)`` has no
    half, ``rate = 2 r``. With an adaptive optimizer it is not weight decay: see ``WeightDecay``.

    Source: Krogh and Hertz, A Simple Weight Decay Can Improve Generalization, 1991, section 2.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(1.0, rules=[ow.L2(0.5)])
        >>> step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2)))
        >>> state, out = step(step.init(jnp.array([2.0, -4.0])), jnp.zeros(2))
        >>> state.parameters.tolist()
        [1.0, -2.0]
    """

    rate: Hyperparameter = 1e-4

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The gradient of the loss with the penalty."""
        return gradient + self.rate * parameter, slots


class L1(GradientRule):
    """A penalty of ``rate |w|_1`` on the loss: ``g <- g + rate sign(w)``.

    Source: Tibshirani, Regression Shrinkage and Selection via the Lasso, 1996, as a subgradient. For weights
    that become exactly zero take a proximal optimizer (``ProximalGD``, ``FTRL``).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(1.0, rules=[ow.L1(0.5)])
        >>> step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2)))
        >>> state, out = step(step.init(jnp.array([2.0, -4.0])), jnp.zeros(2))
        >>> state.parameters.tolist()
        [1.5, -3.5]
    """

    rate: Hyperparameter = 1e-4

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The gradient of the loss with the penalty."""
        return gradient + self.rate * jnp.sign(parameter), slots


class WeightDecay(ParameterRule):
    """Weight decay, in one vocabulary for every optimizer.

    ``mode`` is ``"decoupled"``: ``w - learning_rate rate w``, as in torch's, optax's and Paddle's AdamW;
    ``"independent"``: ``w - rate w``, whatever the learning rate, as in the paper; or ``"l2"``: in the
    gradient, which makes an ``L2`` of it. Where an optimizer finds its step size itself (Prodigy, DoG), the
    learning rate is
    1: choose the rate accordingly. ``where`` picks the parameters that decay. An optimizer that has a
    ``weight_decay`` of its own (AdamW, Lion, LAMB) decays by that as well.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithms 1 and 2.

    Raises:
        HyperparameterError: another mode, or a rate that is negative or not finite.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> params = {"w": jnp.float32(1), "b": jnp.float32(1)}
        >>> optimizer = ow.Momentum(0.1, rules=[ow.WeightDecay(0.5, where="w")])
        >>> step = ow.compile(optimizer.minimize(lambda p, x: (p["w"] + p["b"]) * x, params, jnp.float32(1)))
        >>> state, out = step(step.init(params), jnp.float32(0))
        >>> round(float(state.parameters["w"]), 3), float(state.parameters["b"])
        (0.95, 1.0)
        >>> ow.WeightDecay(0.5, "l2")
        L2(rate=0.5)
    """

    rate: Hyperparameter = 1e-2
    mode: str = "decoupled"

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """An ``L2`` for the mode of that name."""
        made = super().__new__(cls, *args, **options)
        given = dict(zip(("rate", "mode"), args, strict=False)) | options
        if given.pop("mode", "decoupled") != "l2":
            return made
        return L2(**{"rate": cls.rate, **given})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in _MODES:
            raise HyperparameterError(
                f"WeightDecay: mode is {self.mode!r}; expected 'decoupled' (times the learning rate), "
                "'independent' or 'l2'."
            )

    def update(self, parameter: Any, updated: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The parameter, drawn towards zero."""
        if self.mode == "independent":
            return updated - self.rate * parameter, slots
        if "learning_rate" not in self.optimizer:
            raise HyperparameterError(
                "WeightDecay is decoupled and multiplied with the learning rate, and the optimizer has none. "
                "Write WeightDecay(rate, 'independent')."
            )
        return updated - self.optimizer["learning_rate"] * self.rate * parameter, slots
