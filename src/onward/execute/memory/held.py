"""Records of the memory of a step: what it is taken for, at each op, and what lies there at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from onward.core.program import Op, Variable


class MemoryShare(StrEnum):
    """The purposes that memory is taken for, the longest-lived first.

    ``SAVED`` was made by the forward pass for the backward pass, ``GRADIENTS`` by the backward pass for the
    update; ``RESULTS`` is handed out, next state among it that has no place in the old one. All else that is
    computed is ``TEMPORARIES``.
    """

    PARAMETERS = "parameters"
    STATE = "other state"
    FEEDS = "feeds"
    CONSTANTS = "constants"
    RESULTS = "results"
    SAVED = "saved for backward"
    GRADIENTS = "gradients"
    TEMPORARIES = "temporaries"


@dataclass(frozen=True, eq=False)
class Held:
    """Something that lies in memory at the peak.

    Attributes:
        variable: what lies there; the first, if several are the same array.
        bytes: how much it takes.
        share: what for.
        maker: the op that computes it; None if it is there before the step.
        reader: the op that reads it last; None if it stays.
    """

    variable: Variable
    bytes: int
    share: MemoryShare
    maker: Op | None
    reader: Op | None


@dataclass(frozen=True, eq=False)
class PeakMoment:
    """The memory in use while one op runs, at the moment when it is most."""

    op: Op
    bytes: int
    shares: Mapping[MemoryShare, int]
