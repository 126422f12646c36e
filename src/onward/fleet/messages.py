"""The messages that trainers and servers exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from onward.distribute.split.joined import Seen
from onward.fleet.fence import FIRST, Epoch
from onward.fleet.holding import Gradients, Values


class ServerWord(StrEnum):
    """How a server answers.

    ``DONE``: as asked. ``WAIT``: not yet; ask again. ``MISSING``: send the gradient of this round again, the
    server has lost it. ``BEHIND``: the server went back to an older version. ``STALE``: the caller is of an
    older generation, all must say hello again. ``SUPERSEDED``: another process has taken the caller's place.
    ``OVER``: no trainer has a batch any more. ``PARTS``: tell the first server what the others add to sums.
    """

    DONE = "done"
    WAIT = "wait"
    MISSING = "missing"
    BEHIND = "behind"
    STALE = "stale"
    SUPERSEDED = "superseded"
    OVER = "over"
    PARTS = "parts"


@dataclass(frozen=True)
class Sender:
    """The sender of a message: a trainer's number, how often it was started, its generation, its driver."""

    trainer: int
    incarnation: int
    generation: int = 0
    driver: int = 0


@dataclass(frozen=True)
class Push:
    """A gradient on its way to one server.

    Attributes:
        sender: whose it is.
        sequence: its number among the trainer's; in rounds, the version that it is to replace.
        basis: the version at which it was computed.
        weight: how many examples it is the mean over.
        gradients: the arrays; None from a trainer that has no batch any more.
        row: the step, for the history, as far as it is known; for the first server.
    """

    sender: Sender
    sequence: int
    basis: int
    weight: float
    gradients: Gradients | None
    row: HistoryRow | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return 0 if self.gradients is None else self.gradients.nbytes


@dataclass(frozen=True)
class Told:
    """Reports to a server about the gradients of the others, by the server that they come from.

    Attributes:
        of: by server, which start of each trainer sent the gradients that it speaks of.
        arrays: by server, what it adds to the sums; from the first one, the sums.
    """

    of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    arrays: dict[int, tuple[np.ndarray, ...]] = field(default_factory=dict)

    def and_also(self, other: Told) -> Told:
        """Both, without servers that say nothing."""
        said = {i: x for i, x in other.arrays.items() if x}
        return Told(self.of | other.of, self.arrays | said)


@dataclass(frozen=True)
class Reply:
    """A server's answer.

    Attributes:
        word: how it stands.
        version: updates made by the server so far.
        values: what was asked for, whole, of this version.
        staleness: how many updates were made between a gradient's basis and its own update.
        lag: how many steps the trainer is ahead of the slowest.
        epoch: of the server; an answer of an older one than the last does not count.
        told: from the first server, the sums of the update that made this version; from another one that is
            asked, what it adds to those of the next.
        seen: what ``watch`` saw of the update that made this version.
    """

    word: ServerWord
    version: int
    values: Values | None = None
    staleness: int = 0
    lag: int = 0
    epoch: Epoch = FIRST
    told: Told = field(default_factory=Told)
    seen: Seen = ()


@dataclass(frozen=True)
class Welcome:
    """A server's answer to a trainer that says hello: where it stands, and what it has of this trainer."""

    version: int
    generation: int
    sequence: int
    staged: bool
    epoch: Epoch = FIRST


@dataclass(frozen=True)
class ServerStatus:
    """How a server is doing.

    Attributes:
        birth: a number that no other start of a server has.
        pushes: gradients applied; ``duplicates``: recognised as sent again, and not applied.
        queue: gradients that wait for their round.
        busy: seconds spent on updates and records.
        received: bytes of arrays; ``sent``: the same, the other way.
        written: bytes of records.
        rows: the steps whose gradients it applied, from the first that was asked for.
        skipped: updates left out because they were not finite; of several servers the first one tells.
    """

    index: int
    pid: int
    host: str
    birth: str
    version: int
    generation: int
    pushes: int = 0
    duplicates: int = 0
    queue: int = 0
    busy: float = 0.0
    received: int = 0
    sent: int = 0
    written: int = 0
    epoch: Epoch = FIRST
    rows: list[HistoryRow] = field(default_factory=list)
    skipped: int = 0


@dataclass(frozen=True)
class HistoryRow:
    """One step of a trainer, for the history."""

    trainer: int
    sequence: int
    metrics: dict[str, float]
    staleness: int
    lag: int
    examples: int
    sent: int
    received: int
    seconds: float
    waited: float
    ended: float
    seen: tuple[Seen, ...] = ()


@dataclass(frozen=True)
class TrainerStatus:
    """How a trainer is doing, and the steps it made since it was last asked.

    ``stuck``: the version whose round can't be completed, because a gradient of it is lost; else None.
    """

    trainer: int
    incarnation: int
    pid: int
    host: str
    rows: list[HistoryRow] = field(default_factory=list)
    finished: bool = False
    stuck: int | None = None
    where: str = ""
