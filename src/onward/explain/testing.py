"""Checks for tests of training programs: ``onward.testing``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onward.core.errors import ArgumentError
from onward.core.program import Program
from onward.execute.step import Step
from onward.explain.compare.compare import ComparedPrograms

__all__ = ["assert_same_training"]


def assert_same_training(
    a: Program | Step,
    b: Program | Step,
    state: Any,
    /,
    *batch: Any,
    steps: int = 3,
    batches: Sequence[tuple[Any, ...]] | None = None,
    other_state: Any = None,
    precision: str | None = None,
) -> None:
    """Train with two Programs for some steps, and fail with the page of ``compare`` where they part.

    Each goes on from its own state. Both are compiled once.

    Args:
        a: a Program, or what ``compile`` made of one.
        b: another.
        state: before the first step, as ``compare`` takes it.
        batch: the data of every step.
        steps: how many.
        batches: the data of each step, of equal shapes, instead of the same for all.
        other_state: that of b, if it is not that of a by the same names.
        precision: a dtype whose rounding is admitted throughout.

    Raises:
        AssertionError: they part; the message names step, op, line and values.
        ArgumentError: no steps, or no Programs.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> w, x = jnp.ones(3), jnp.ones((8, 3))
        >>> a = ow.Adam(0.1).minimize(lambda w, x: jnp.mean((x @ w) ** 2), w, x)
        >>> assert_same_training(a, ow.accumulate(a, 2), w, x)
    """
    rounds = [batch] * steps if batches is None else list(batches)
    if not rounds:
        raise ArgumentError("assert_same_training was given no step; expected steps=3, or a batch or more.")
    both = ComparedPrograms(a, b, rounds[0], precision)
    states = both.states(state, other_state)
    for step, data in enumerate(rounds):
        found = both(*states, data, step)
        if not found.equal:
            raise AssertionError(str(found))
        states = both.following
