"""The results of a watched step: statistics by name, once the device has computed them.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.5).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
>>> step = ow.compile(ow.watch(program, "mul", updates=True, statistics=["mean", "max"], every=1))
>>> state, out = step(step.init(jnp.ones(2)), jnp.array([2.0, 4.0]))
>>> out.watched
Watched(step 1: mul mean 3, max 4; update(w) mean -1.5, max -1)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError, UnknownNameError, nearest
from onward.core.jaxprs.body import Body
from onward.core.program import Program, programs_within
from onward.develop.watch.statistics import Statistic

NOT_NOW = -1  # in place of the number of a step in which nothing was looked at


@dataclass(frozen=True)
class Cell:
    """Where in the array of all statistics one of them lies: at ``begin``, of this ``shape``.

    ``role`` says what it is a statistic of, a value, a gradient or an update, and ``name`` of which Variable.
    """

    label: str
    role: str
    name: str
    statistic: Statistic
    begin: int
    shape: tuple[int, ...]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for cells that mean the same."""
        return self.label, self.role, self.statistic.name, self.begin, self.shape

    def read(self, numbers: np.ndarray) -> Any:
        """The statistic as people see it."""
        end = self.begin + int(np.prod(self.shape))
        return self.statistic.shown(numbers[self.begin : end].reshape(self.shape))


class Watching(Body):
    """The body of an op that looks; ``cells`` tell what its numbers mean."""

    def __init__(self, closed: Any, cells: tuple[Cell, ...], every: int) -> None:
        super().__init__(closed)
        self.cells, self._every = cells, every

    @property
    def attributes(self) -> Mapping[str, str]:
        """How often it looks, and at how much."""
        return {"every": str(self._every), "statistics": str(len(self.cells))}


@programs_within.register
def _programs_within(body: Watching) -> Mapping[str, Program]:
    """None that are worth a look."""
    return {}


Part = tuple[tuple[Cell, ...], Any, Any]  # cells, the number of the step, the array of all statistics


class Watched(Mapping[str, Mapping[str, Any]]):
    """The statistics of one step by name: ``out.watched["grad(w)"]["norm"]``.

    Empty for a step in which nothing was looked at. Made without waiting; reading waits for the device.

    Attributes:
        parts: for each op that looks, what its numbers mean, the number of the step, and the numbers.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    @property
    def is_ready(self) -> bool:
        """Whether the device has computed it."""
        return all(x.is_ready() for part in self.parts for x in part[1:] if hasattr(x, "is_ready"))

    def apart(self, steps: int) -> list[Watched]:
        """Of the statistics of several steps, one more axis in front, those of each; waits for the device."""
        whole = [(cells, np.asarray(at), np.asarray(numbers)) for cells, at, numbers in self.parts]
        return [Watched([(cells, at[i], numbers[i]) for cells, at, numbers in whole]) for i in range(steps)]

    @cached_property
    def _taken(self) -> tuple[tuple[int, tuple[Cell, ...], np.ndarray], ...]:
        found = []
        for cells, at, numbers in self.parts:
            if np.ndim(at):
                raise ArgumentError(
                    f"These are the statistics of {len(at)} steps, as a scan returns them. Take them apart: "
                    f"out.watched.apart({len(at)}) is a list with those of each step."
                )
            if (step := int(at)) != NOT_NOW:
                found.append((step, cells, np.asarray(numbers)))
        return tuple(found)

    @property
    def step(self) -> int | None:
        """How many updates were made, this step included; None if nothing was looked at.

        0 in a Program that counts no steps.
        """
        return max((step for step, *_ in self._taken), default=None)

    @cached_property
    def subjects(self) -> dict[str, tuple[str, str]]:
        """Of what each thing is: ``"value"``, ``"gradient"`` or ``"update"``; and the Variable's name."""
        return {cell.label: (cell.role, cell.name) for cells, *_ in self.parts for cell in cells}

    @cached_property
    def _found(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for _, cells, numbers in self._taken:
            for cell in cells:
                found.setdefault(cell.label, {})[cell.statistic.name] = cell.read(numbers)
        return found

    def __getitem__(self, label: str) -> Mapping[str, Any]:
        """The statistics of one thing that is watched, by their names.

        Raises:
            UnknownNameError: it is not watched, or was not in this step.
        """
        try:
            return self._found[label]
        except KeyError:
            if not self._taken:
                raise UnknownNameError(
                    f"Nothing was watched in this step, so there is no {label!r}. watch(..., every=k) looks "
                    "at the first step and at every k-th after it; out.watched is empty in the others."
                ) from None
            raise UnknownNameError(f"{label!r} is not watched. {nearest(label, self._found)}") from None

    def __contains__(self, label: object) -> bool:
        return label in self._found

    def get(self, label: str, default: Any = None) -> Any:
        """The statistics of one thing, or ``default`` where there are none."""
        return self._found.get(label, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        if not self._taken:
            return "Watched(not in this step)"
        each = [f"{label} {_in_words(found)}" for label, found in list(self._found.items())[:4]]
        more = f"; and {len(self) - 4} more" if len(self) > 4 else ""
        return f"Watched(step {self.step}: {'; '.join(each)}{more})"


def sent(watched: Watched) -> None:
    """Begin the transfers to the host."""
    for _, at, numbers in watched.parts:
        for value in (at, numbers):
            if isinstance(value, jax.Array):
                value.copy_to_host_async()


def _in_words(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {x:.4g}" if isinstance(x, float) else name for name, x in found.items())
