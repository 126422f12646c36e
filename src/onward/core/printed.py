"""``show``: a Program printed as ``print(program)`` shows it, folded, or with the lines of its ops."""

from __future__ import annotations

from onward.core.check import expect_program
from onward.core.program import Program
from onward.core.show import listing


def show(
    program: Program, depth: int | None = None, source: bool = False, initializers: bool = False
) -> None:
    """Print a Program.

    Args:
        program: what to print.
        depth: fold the scopes below this level.
        source: add the user's file and line to every op.
        initializers: add the operators that give state its first values, each run once.

    Raises:
        ArgumentError: something else than a Program, such as the function to trace one from.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> def loss(w, x):
    ...     with jax.named_scope("block"):
    ...         y = jnp.sin(w * x)
    ...     return jnp.sum(y)
    >>> ow.show(ow.trace(loss, jnp.ones(3), jnp.ones(3)), depth=1)
    Program loss: 1 feed, 1 parameter (3 numbers), 3 ops
    <BLANKLINE>
    feed      │ f32[3]  x
    parameter │ f32[3]  w
    ──────────┼──────────────────────────────────────────────────────────────────────
    forward   │ 2 ops   block: mul 1, sin 1
              │ f32[]   reduce_sum = reduce_sum(block/sin, axes=(0,))
    ──────────┼──────────────────────────────────────────────────────────────────────
    return    │ f32[]   reduce_sum  (the loss)
    """
    expect_program(program, "show")
    print(listing(program, depth, source, initializers))
