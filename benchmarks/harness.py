"""Measure sides in turn and compare them round by round.

>>> from benchmarks.harness import compare
>>> row = compare("a case", "the peer", ours=lambda: 2.0, peer=lambda: 4.0, rounds=3, target=1.0)
>>> row.ratio, row.met
(0.5, True)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import jax

Measure = Callable[[], float]  # runs once, returns seconds
ONWARD = "onward"


@dataclass(frozen=True)
class Row:
    """One side against another: medians in seconds, and the ratios of the rounds.

    ``cores`` is how many the side kept busy, where that was measured: its CPU time is ``time`` times that.
    Of a side that failed there are none, and the note says why.
    """

    case: str
    against: str
    rounds: int = 0
    time: float | None = None
    peer: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    target: float | None = None
    side: str = ONWARD
    note: str = ""
    cores: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        return None if self.target is None else self.ratio is not None and self.ratio <= self.target


def compare(
    case: str, against: str, ours: Measure, peer: Measure, rounds: int, target: float | None = None
) -> Row:
    """Measure Onward and a peer in turn, as often as there are rounds."""
    times = in_turn({ONWARD: ours, against: peer}, rounds)
    return ratio_row(case, against, times[ONWARD], times[against], target=target)


def in_turn(
    sides: Mapping[str, Measure], rounds: int, budget: float | None = None, least: int = 5
) -> dict[str, list[float]]:
    """Measure every side once in each round, every other round in the opposite order.

    After ``budget`` seconds no further round begins, once there were ``least``.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    begin = perf_counter()
    for i in range(rounds):
        for name in list(sides) if i % 2 == 0 else reversed(list(sides)):
            gc.collect()
            times[name].append(sides[name]())
        if budget is not None and i + 1 >= least and perf_counter() - begin > budget:
            break
    return times


def ratio_row(
    case: str, against: str, times: Sequence[float], reference: Sequence[float], **more: Any
) -> Row:
    """The medians of both sides, and those of their ratios in each round."""
    ratios = [a / b for a, b in zip(times, reference, strict=True)]
    numbers = median(times), median(reference), median(ratios), min(ratios), max(ratios)
    return Row(case, against, len(ratios), *numbers, **more)


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = perf_counter()
    function()
    return perf_counter() - begin


class Side:
    """A step with the state it goes on from, in this process: ``state, out = step(state, *data)``."""

    def __init__(self, step: Callable[..., tuple[Any, Any]], state: Any, data: tuple[Any, ...]) -> None:
        self.step, self.state, self.data = step, state, data

    def seconds(self, count: int) -> float:
        """How long one of ``count`` steps takes, each of them waited for, by what it returns."""
        begin = perf_counter()
        for _ in range(count):
            self.state, self.out = self.step(self.state, *self.data)
            jax.block_until_ready(jax.tree.leaves(self.out) or jax.tree.leaves(self.state)[0])
        return (perf_counter() - begin) / count

    def loss(self) -> float:
        """What the last step returned, of which the loss is the first."""
        return float(jax.tree.leaves(self.out)[0])
