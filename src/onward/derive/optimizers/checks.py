"""Checks, shared by several optimizers, of the fields that are fixed when a Program is derived."""

from __future__ import annotations

from onward.core.errors import HyperparameterError
from onward.core.structure import is_count, is_word
from onward.derive.optimizer import Optimizer


def check_counts(optimizer: Optimizer, *names: str) -> None:
    """Raise ``HyperparameterError`` unless each of these fields is a whole number of at least 1."""
    for name in names:
        value = getattr(optimizer, name)
        if not is_count(value):
            raise HyperparameterError(
                f"{type(optimizer).__name__}: {name} is {value!r}. It must be a whole number of at least 1."
            )


def check_choice(optimizer: Optimizer, name: str, choices: tuple[str, ...]) -> None:
    """Raise ``HyperparameterError`` unless this field is one of the choices."""
    value = getattr(optimizer, name)
    if not is_word(value, choices):
        listed = ", ".join(map(repr, choices))
        raise HyperparameterError(f"{type(optimizer).__name__}: {name} is {value!r}. Write one of {listed}.")


def check_positive(optimizer: Optimizer, name: str) -> None:
    """Raise ``HyperparameterError`` unless this number, which can only grow, begins above 0."""
    value = getattr(optimizer, name)
    if callable(value):
        return
    optimizer.check_hyperparameter(name, value)
    if value == 0:
        raise HyperparameterError(
            f"{type(optimizer).__name__}: {name} is 0, from which nothing moves. It must be greater than 0, "
            "and small, for it only grows."
        )
