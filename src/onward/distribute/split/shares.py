"""How much the gradient of each trainer counts where several are merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def weighed(values: Sequence[Any], shares: Any) -> Any:
    """The sum of the trainers' values, each times its share, in the order of the trainers."""
    total = times(values[0], shares, 0)
    for t in range(1, len(values)):
        total = total + times(values[t], shares, t)
    return total


def times(value: Any, shares: Any, t: int) -> Any:
    """A value of one trainer times its share; without shares there is one trainer."""
    return value if shares is None else (value * shares[t]).astype(value.dtype)
