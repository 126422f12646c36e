"""Gradients that are changed on their way back otherwise than in proportion, as a clip changes them.

A loss that is a mean over fewer examples has larger gradients on the way, and so has one that is scaled: what
clips them clips others. The gradients of the whole batch are then no mean of those of its parts.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.trace(lambda w, x: jnp.mean(jnp.tanh(x @ w)), jnp.ones(3), jnp.ones((4, 3)))
>>> [(op.type, why) for op, why in bending(ow.SGD(0.1).minimize(ow.error_clip(program, "tanh", 0.1)))]
[('error_clip_grad', 'max')]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from onward.core.jaxprs.homogeneous import Degree, grown
from onward.core.marks import FLOAT8_PRODUCT, ONES, SCALE_LOSS, gradient_type
from onward.core.program import Op, Program, Variable
from onward.core.source import user_level
from onward.core.walk import descendants
from onward.core.words import Pass


def bending(program: Program) -> list[tuple[Op, str]]:
    """The ops of the backward pass whose results are not in proportion to the gradients that they read.

    With each the primitive by which they are not. Products in float8 round by scales of their own; of a
    Program that was loaded from a file nothing is known.
    """
    if program.code is not None:
        return []
    found: list[tuple[Op, str]] = []
    degrees: dict[Variable, Degree] = {}
    for op in program.ops:
        given = [degrees.get(v, 0.0) for v in op.inputs]
        if op.made_by is Pass.BACKWARD and op.type in (ONES, SCALE_LOSS):
            degrees.update(dict.fromkeys(op.outputs, 1.0))
        elif op.made_by is not Pass.UPDATE and any(degree != 0.0 for degree in given):
            made, why = grown(op.body, given)
            if why and op.type != gradient_type(FLOAT8_PRODUCT):
                found.append((op, why))
            degrees.update(dict.fromkeys(op.outputs, 1.0) if why else zip(op.outputs, made, strict=True))
    return found


def expect_proportional(program: Program, reason: str, instead: str) -> None:
    """Warn of a backward pass that gives other gradients where those of the loss are others.

    Args:
        program: with a backward pass.
        reason: why they are others.
        instead: what to do about it.
    """
    _warn(program, bending(program), f"{reason}. {instead}")


def expect_proportional_in_sums(program: Program, split: Iterable[str], reason: str) -> None:
    """The same of gradients that are added up over examples, as those of what depends on no data.

    Where a loss is a sum those of examples are the same in all parts, and theirs are changed alike.
    """
    varies = descendants(program, [program[name] for name in split])
    _warn(program, [(op, why) for op, why in bending(program) if op.of not in varies], reason)


def _warn(program: Program, found: Sequence[tuple[Op, str]], reason: str) -> None:
    for op, why in found[:1]:
        warnings.warn(
            f"{program.name}: {op.type!r}{op.at} changes gradients on their way back otherwise than in "
            f"proportion to them ({why!r}), as a clip does, and {reason}",
            stacklevel=user_level(),
        )
