"""The optimizers, simplest first: gradient descent, then those with a step size for every number."""

from onward.derive.optimizers.adaptive import Adagrad, Adam, AdamW
from onward.derive.optimizers.gradient_descent import SGD, Momentum

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Momentum"]
