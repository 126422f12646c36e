"""A model with Adam, in Onward and by hand: what the benchmarks of accumulation and of devices compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import onward as ow
from benchmarks.harness import Side
from benchmarks.models import Model, Params

Slots = tuple[Params, ...]
Rule = Callable[[Params, Params, Slots, Array, float], tuple[Params, Slots]]


class Case(NamedTuple):
    """A model, its optimizer in Onward, and the same rule by hand with its number of slots."""

    name: str
    model: Model
    optimizer: Callable[[float], ow.Optimizer]
    rule: Rule
    slots: int


def adam(params: Params, gradient: Params, slots: Slots, t: Array, rate: float) -> tuple[Params, Slots]:
    """One update by Adam."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, slots[0], gradient)
    variance = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, slots[1], gradient)
    scale_m, scale_v = 1 - 0.9**t, 1 - 0.999**t
    direction = jax.tree.map(lambda m, v: (m / scale_m) / (jnp.sqrt(v / scale_v) + 1e-8), mean, variance)
    return jax.tree.map(lambda w, d: w - rate * d, params, direction), (mean, variance)


def check_agreement(case: Case, ours: Side, peer: Side, steps: int = 3) -> None:
    """Raise ``AssertionError`` unless both sides move every parameter to the same place.

    Compared as whole arrays: Adam magnifies the rounding of single gradients that are close to zero.
    """
    ours.seconds(steps)
    peer.seconds(steps)
    found, expected = (jax.tree.leaves(p) for p in (ours.state.parameters, peer.state[0]))
    before = jax.tree.leaves(case.model.params)
    for a, b, start in zip(found, expected, before, strict=True):
        a, b, start = map(np.asarray, (a, b, start))
        apart, moved = (float(np.linalg.norm(np.ravel(x))) for x in (a - b, b - start))
        assert apart <= 1e-3 * moved > 0, f"{case.name}: moved by {moved}, and {apart} apart"
