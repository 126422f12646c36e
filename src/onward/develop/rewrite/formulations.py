"""``reformulated``: single ops with other bodies, which compute the same and are faster on a platform.

A rule is a function from a Body to an equal one, or None where it has nothing to say. It sees no names and
no neighbours, so it applies wherever such an op stands: in a user's network, in a library's layer, in a
gradient, in the turns of a loop. ``compile`` applies them; what people replace by patterns of several ops is
``rewrite``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from onward.core.compiler import AT_HAND
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.edited import rewritten
from onward.core.jaxprs.products import in_other_order, turned_first
from onward.core.program import Op, Program
from onward.core.transform import transform
from onward.develop.rewrite.windows import touching_windows

BodyRule: TypeAlias = Callable[[Body], Body | None]

RULES: dict[str, tuple[BodyRule, ...]] = {
    "cpu": (touching_windows, in_other_order, *((turned_first,) if AT_HAND >= (0, 12) else ()))
}


@transform
def reformulated(program: Program, platform: str = "cpu") -> Program:
    """Replace the bodies of ops by equal formulations that are faster on a platform.

    On CPU: max pooling with windows that touch, forward and backward, by comparing whole arrays, which gives
    the same numbers; and gradients of weights that are sums over several axes, such as examples and tokens,
    as products without a transpose, and those with one long side, of what is transposed before, the same
    within rounding; in what ops run, too, such as the turns of loops. Changes bodies, and nothing else:
    types, names and wiring stay.

    Args:
        program: a Program, with or without backward and update; a backward pass that is derived later is not
            rewritten, so it comes last, before ``fence``.
        platform: what it should run on, as ``jax.default_backend()`` says it.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     largest = jax.lax.reduce_window(w * x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID")
        ...     return jnp.sum(largest)
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones(4), jnp.ones(4))
        >>> [op.type for op in reformulated_ops(program, "cpu")]
        ['reduce_window_max', 'reduce_window_max_grad']
        >>> reformulated_ops(reformulated(program), "cpu")
        ()
    """
    return replace(program, ops=tuple(_rewritten(op, platform) for op in program.ops))


def reformulated_ops(program: Program, platform: str) -> tuple[Op, ...]:
    """The ops of a Program that ``reformulated`` would give another body."""
    return tuple(op for op in program.ops if _rewritten(op, platform) is not op)


def _rewritten(op: Op, platform: str) -> Op:
    body = rewritten(op.body, partial(_faster, rules=RULES.get(str(platform), ())))
    return op if body is None else replace(op, body=body)


def _faster(body: Body, rules: Iterable[BodyRule]) -> Body | None:
    """The Body that the rules make one after the other; None where none has anything to say."""
    found = None
    for rule in rules:
        found = rule(found or body) or found
    return found
