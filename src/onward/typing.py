"""The types of what functions return and callbacks are given, to annotate with.

>>> import jax.numpy as jnp, onward as ow
>>> def thousands(cost: ow.typing.Cost) -> float:
...     return cost.flops / 1000
>>> thousands(ow.cost(ow.trace(lambda w: w @ w, jnp.ones(3))))
0.006
"""

from onward.core.first_use import from_stub

__getattr__, __dir__, __all__ = from_stub(__name__, "ow.typing")
