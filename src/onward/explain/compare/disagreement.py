"""A value that differs by more than rounding explains, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.program import Variable
from onward.explain.compare.rounding import BoundedValue
from onward.explain.compare.twins import is_key, widened

_SUBNORMAL = 16 * float(np.finfo(np.float32).tiny)  # what compilers take for 0


@dataclass(frozen=True, eq=False)
class Disagreement:
    """A value that ops of one Program give otherwise than those of the other, of the same numbers.

    Attributes:
        mine: the Variable of the Program whose ops were run.
        theirs: that of the other; None where it has none.
        expected: what the ops gave, and how far rounding can lead from it.
        found: what the other Program has there.
    """

    mine: Variable
    theirs: Variable | None
    expected: BoundedValue
    found: Any

    @property
    def excess(self) -> np.ndarray:
        """For each number the difference; 0 where rounding explains it."""
        return excess(self.expected, self.found)


def excess(expected: BoundedValue, found: Any) -> np.ndarray:
    """For each number its difference from what was expected; 0 where that is within the bound."""
    if is_key(expected.value) or not jnp.issubdtype(expected.value.dtype, jnp.inexact):
        differs = widened(expected.value) != widened(found)
        may = False if expected.bound is None else np.asarray(expected.bound) > 0
        return np.where(may, 0.0, differs.astype(float))
    x, y = widened(expected.value), widened(found)
    with np.errstate(all="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        difference = np.where(same, 0.0, np.abs(x - y))
        difference = np.where(np.isnan(difference), np.inf, difference)
        return np.where(difference <= expected.bound + _SUBNORMAL, 0.0, difference)
