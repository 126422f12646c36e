"""Walks over a Program and questions about it: who reads what, where passes begin, what transforms did.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.trace(lambda w, x: jnp.sum(jnp.tanh(w * x)), jnp.ones(3), jnp.ones(3))
>>> [op.type for op in ow.graph.consumers(program)[program["w"]]]
['mul']
"""

from onward.core.homes import homes
from onward.core.jaxprs.body import body_of
from onward.core.pointing import pointing
from onward.core.walk import ancestors, consumers, descendants, liveness, producers
from onward.develop.attention.report import attentions_of
from onward.develop.chunk.chunk import attention_scores, chunks_of
from onward.develop.fence import fences, worth_fencing
from onward.develop.fission.fission import fissions
from onward.develop.offload import offloaded
from onward.develop.recompute.report import recomputed
from onward.develop.rewrite.rewrite import matches_of
from onward.develop.roll.cost import worth_rolling
from onward.develop.roll.roll import rolls_of
from onward.develop.seam import forward_pass, update_pass

__all__ = [
    "ancestors",
    "attention_scores",
    "attentions_of",
    "body_of",
    "chunks_of",
    "consumers",
    "descendants",
    "fences",
    "fissions",
    "forward_pass",
    "homes",
    "liveness",
    "matches_of",
    "offloaded",
    "producers",
    "recomputed",
    "rolls_of",
    "update_pass",
    "worth_fencing",
    "worth_rolling",
]

__getattr__ = pointing(__name__, "ow.graph")
