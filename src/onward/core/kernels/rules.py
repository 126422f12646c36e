"""How a compiler makes kernels of equations: the facts that differ between those of XLA.

>>> AS_WRITTEN
KernelRules(in_waves=False, keeps_barriers=True, reduces_apart=False, expands=False)
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from onward.core.compiler import AT_HAND

_IS_NEW = AT_HAND >= (0, 12)


@dataclass(frozen=True)
class KernelRules:
    """The treatment of equations by a compiler; the defaults are those of one that leaves them as written.

    Attributes:
        in_waves: a kernel runs as soon as what it reads is there, before all that can begin later only; so
            random numbers and zeros, which need nothing, come first. Else kernels run as written.
        keeps_barriers: what stands behind an ``optimization_barrier`` waits for all that goes into it.
        reduces_apart: a reduction reads an array, or the product of two; no other arithmetic is done within.
        expands: products and convolutions want their operands in one layout and precision, and the gradient
            of a maximum over windows writes places down; see ``expanded``.
    """

    in_waves: bool = False
    keeps_barriers: bool = True
    reduces_apart: bool = False
    expands: bool = False


AS_WRITTEN = KernelRules()


def rules_at_hand() -> KernelRules:
    """The rules of the compiler for the devices that JAX shows.

    Those of XLA for CPU are read off its compiled steps. Before jaxlib 0.12 it forgot barriers; since then a
    library computes its reductions.

    Example:
        >>> rules_at_hand().in_waves
        True
    """
    if jax.default_backend() != "cpu":
        return AS_WRITTEN
    return KernelRules(in_waves=True, keeps_barriers=_IS_NEW, reduces_apart=_IS_NEW, expands=True)
