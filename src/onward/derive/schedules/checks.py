"""Checks of the numbers of a schedule, and the error messages where a number is not valid.

A field of a schedule is annotated with one of the names below, by which it is checked.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.errors import HyperparameterError
from onward.core.structure import describe
from onward.derive.rule import expect_held

Value = float
"""A finite number of at least 0, which the dtype of a schedule holds."""

Factor = float
"""A finite number above 0."""

Steps = int
"""A whole number of at least 1."""

Count = int
"""A whole number of at least 0."""

LAST = 2**31 - 1
"""The last step there is: the step counter is int32."""


def checked(owner: str, name: str, kind: str, value: Any) -> Any:
    """The value of a field as a plain number; raises ``HyperparameterError`` if it is not of its kind.

    >>> checked("linear", "steps", "Steps", np.int64(10))
    10
    >>> checked("linear", "steps", "Steps", 0)
    Traceback (most recent call last):
        ...
    onward.core.errors.HyperparameterError: linear: steps is 0; expected a whole number of at least 1.
    """
    if kind.endswith(" | None"):
        return None if value is None else checked(owner, name, kind.removesuffix(" | None"), value)
    if kind in ("Steps", "Count"):
        return whole(owner, name, value, int(kind == "Steps"))
    if kind in ("Value", "Factor"):
        found = number(owner, name, value, above=kind == "Factor")
        if kind == "Value":
            expect_held(f"{owner}: {name}", found, jnp.result_type(float))
        return found
    return value


def whole(owner: str, name: str, value: Any, least: int) -> int:
    """A whole number of steps as an ``int``."""
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_whole or not least <= value <= LAST:
        most = " and at most 2**31 - 1" if is_whole and value > LAST else ""
        hint = f" Write {int(value)}." if isinstance(value, float) and value.is_integer() else ""
        raise HyperparameterError(
            f"{owner}: {name} is {describe(value)}; expected a whole number of at least {least}{most}.{hint}"
        )
    return int(value)


def number(owner: str, name: str, value: Any, above: bool = False) -> float:
    """A finite number that is not negative, or ``above`` 0, as a ``float``."""
    try:
        found = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found) or found < 0 or (above and found == 0):
        raise HyperparameterError(
            f"{owner}: {name} is {describe(value)}; expected a finite number "
            f"{'above 0' if above else 'of at least 0'}."
        )
    return found


def one_of(owner: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ``HyperparameterError`` unless the value is one of these words."""
    if value not in choices:
        raise HyperparameterError(
            f"{owner}: {name} is {describe(value)}; expected {', '.join(map(repr, choices[:-1]))} or "
            f"{choices[-1]!r}."
        )


def fits(owner: str, steps: int, rest: int, **parts: int) -> None:
    """Raise ``HyperparameterError`` unless these parts of the whole leave at least this rest of it.

    >>> fits("cosine", 100, 1, warmup=100)
    Traceback (most recent call last):
        ...
    onward.core.errors.HyperparameterError: cosine: steps is 100 and warmup is 100. steps counts the whole
    schedule and warmup is a part of it: give steps of at least 101.
    """
    least = sum(parts.values()) + rest
    if steps < least:
        found = ", ".join(f"{name} is {count}" for name, count in parts.items())
        are = "is a part" if len(parts) == 1 else "are parts"
        raise HyperparameterError(
            f"{owner}: steps is {steps} and {found}. steps counts the whole schedule and "
            f"{' and '.join(parts)} {are} of it: give steps of at least {least}."
        )


def increasing(owner: str, boundaries: Any, pieces: int, what: str) -> tuple[int, ...]:
    """The boundaries between this many pieces; raises ``HyperparameterError`` if they are not."""
    listed = tuple(whole(owner, "a boundary", b, 1) for b in sequence(owner, "boundaries", boundaries))
    if len(listed) != pieces - 1:
        raise HyperparameterError(
            f"{owner}: there are {pieces} {what} and {len(listed)} boundaries; expected one boundary fewer "
            f"than {what}, each the first step of the next: {pieces - 1} of them."
        )
    for before, after in pairwise(listed):
        if after <= before:
            raise HyperparameterError(
                f"{owner}: the boundaries are {list(listed)}, and {after} comes after {before}; expected "
                "steps counted from the beginning of the training, each larger than the one before."
            )
    return listed


def sequence(owner: str, name: str, value: Any) -> tuple[Any, ...]:
    """A list, tuple or array as a tuple."""
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1):
        return tuple(value)
    raise HyperparameterError(f"{owner}: {name} is {describe(value)}; expected a list.")
