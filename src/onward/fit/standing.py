"""Where a training stands: what ``train`` goes on from, and a checkpoint keeps beside the State.

>>> standing = Standing(epoch=2, batch=3, metrics={"loss": float("inf")})
>>> Standing.restored(standing.record(), step=7, words={}, strict=None).metrics
{'loss': inf}
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from onward.core.source import user_level
from onward.execute.fingerprints import differences
from onward.execute.loop.plain import plain, restored
from onward.execute.restore import say

_KEPT = ("epoch", "batch", "begun", "position", "to_test")


@dataclass
class Standing:
    """Where a training stands, beside its State.

    Attributes:
        epoch, batch: epochs, and batches of this epoch, that are done.
        step: steps in all; a checkpoint has it as its own number.
        begun: the epoch in which ``train`` was called, and from which it counts.
        position: of the reader, behind the last batch.
        to_test: the epoch is done, and the test after it is not.
        metrics: of the last step.
        resumed: restored, and not gone on from yet.
        strict: what is to be done where reader or callbacks are others than they were; see ``restore``.
        words: what tells one reader from another.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    begun: int = 0
    position: Any = None
    to_test: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False
    strict: bool | None = None
    words: Mapping[str, str] = field(default_factory=dict)

    def begin(self, epochs: int, words: Mapping[str, str]) -> int:
        """A call of ``train`` begins, or goes on with what was restored: the epoch at which it ends."""
        if self.resumed:
            say(differences({"reader": self.words}, {"reader": words}), self.strict)
        else:
            self.begun, self.metrics = self.epoch, {}
        done, last = self.epoch - self.begun, self.begun + epochs
        if self.resumed and epochs and done >= epochs:
            message = _FINISHED.format(epochs=epochs, done=done, more=done + 1)
            warnings.warn(message, stacklevel=user_level())
        self.words, self.resumed = words, False
        return last

    def record(self) -> dict[str, Any]:
        """The part of it that a checkpoint keeps, as JSON data."""
        kept = {name: getattr(self, name) for name in _KEPT}
        return {**kept, "metrics": {name: plain(float(x)) for name, x in self.metrics.items()}}

    @classmethod
    def restored(
        cls, record: Mapping[str, Any], step: int, words: Mapping[str, str], strict: bool | None
    ) -> Self:
        """The standing of which a checkpoint of this step kept a record; older ones have less in it."""
        kept = {name: record[name] for name in _KEPT if name in record}
        metrics = restored(record.get("metrics", {}))
        return cls(**kept, step=step, metrics=metrics, resumed=True, strict=strict, words=words)


_FINISHED = (
    "train(epochs={epochs}) after a restore has nothing to do: what was restored has done {done} epochs, and "
    "epochs counts from where that training began. Write epochs={more} for one more; or begin again, without "
    "restore."
)
