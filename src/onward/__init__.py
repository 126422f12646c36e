"""Onward: you write the forward pass, Onward derives the rest.

    core        what a Program is
    define      a pure function becomes a forward Program
    derive      forward, then backward, then update
    develop     the same training in less memory and time
    distribute  one Program for many devices
    execute     a Program becomes an executable and runs
    explain     what a person wants to know about a Program
    fit         a step becomes a trained model
    fleet       one training in many processes
    serve       a trained Program becomes a file, and answers
    shell       the command line

>>> import jax.numpy as jnp, onward as ow
>>> def loss(params, x, y):
...     return jnp.mean((x @ params["w"] - y) ** 2)
>>> params = {"w": jnp.zeros((2, 1))}
>>> x, y = jnp.eye(2), jnp.ones((2, 1))
>>> program = ow.SGD(0.5).minimize(loss, params, x, y)
>>> step = ow.compile(program)
>>> state = step.init(params)
>>> for _ in range(20):
...     state, out = step(state, x, y)
>>> [[round(float(w), 2)] for w in state.parameters["w"][:, 0]]
[[1.0], [1.0]]
"""

from importlib.metadata import version
from typing import Any

from onward.core.first_use import from_stub

# The names are listed in __init__.pyi, and loaded when they are first asked for.
_names = from_stub(__name__, "ow")

__all__ = list(_names.public)
__dir__ = _names.listed
__version__ = version("onward")


def __getattr__(name: str) -> Any:
    """``AdagradOptimizer``, as the early designs of Paddle call it, is ``Adagrad``."""
    stem = name.removesuffix("Optimizer").lower()
    if stem and name.endswith("Optimizer"):
        optimizers = _names.get("optimizer")
        for own in optimizers.__all__:
            if own.lower() == stem:
                return getattr(optimizers, own)
    return _names.get(name)
