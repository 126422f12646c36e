"""How trainers and servers work together: in rounds, or each trainer at its own pace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onward.core.errors import ArgumentError
from onward.core.structure import describe, expect_count
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers import Momentum


@dataclass(frozen=True)
class Sync:
    """Rounds: all trainers compute gradients at the same parameters, which one update of their mean replaces.

    A round is made by all servers or by none. A trainer without a batch takes part with nothing.
    """


@dataclass(frozen=True)
class Async:
    """Each trainer at its own pace: every gradient is an update at once, at whatever the parameters then are.

    Source: Dean et al., Large Scale Distributed Deep Networks, 2012, section 4.1 (Downpour SGD).
    """


@dataclass(frozen=True)
class Bounded:
    """Each trainer at its own pace, but none begins a step over ``staleness`` steps ahead of the slowest.

    >>> Bounded(staleness=4)
    Bounded(staleness=4)

    Source: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, 2013,
    section 2.
    """

    staleness: int

    def __post_init__(self) -> None:
        expect_count(self.staleness, "Bounded: staleness", 0, "a number of steps")


@dataclass(frozen=True)
class Local:
    """Rounds of ``every`` steps that each trainer makes for itself; how far it came is its gradient.

    The mean over the trainers of ``w - w/local`` goes to the outer optimizer on the servers. ``SGD(1.0)`` as
    the outer optimizer makes the parameters the mean of the trainers' own. Slots and step of the inner
    optimizer stay with the trainer: one that takes another's place begins them again.

    Source: Douillard et al., DiLoCo, 2023, algorithm 1.
    """

    every: int
    outer: Optimizer = field(default_factory=lambda: Momentum(0.7, 0.9, nesterov=True))

    def __post_init__(self) -> None:
        expect_count(self.every, "Local: every", of="a number of steps")
        if not isinstance(self.outer, Optimizer):
            raise ArgumentError(
                f"Local: outer is {describe(self.outer)}; expected an optimizer, such as SGD(1.0)."
            )


Mode = Sync | Async | Bounded | Local


def as_mode(mode: Any) -> Mode:
    """The mode that somebody means.

    >>> as_mode("async")
    Async()
    """
    words: dict[str, Mode] = {"sync": Sync(), "async": Async()}
    if isinstance(mode, Sync | Async | Bounded | Local):
        return mode
    if isinstance(mode, str) and mode in words:
        return words[mode]
    raise ArgumentError(
        f"mode is {describe(mode)}; expected 'sync', 'async', cluster.Bounded(staleness=4) or "
        "cluster.Local(every=8)."
    )


def in_rounds(mode: Mode) -> bool:
    """Whether all trainers wait for each other at each update."""
    return isinstance(mode, Sync | Local)
