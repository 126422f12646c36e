"""The differences between two Programs as data, which lines and pages are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onward.core.cost import cost
from onward.core.program import Op, Program
from onward.execute.memory.use import MemoryUse
from onward.explain.diff.compare import Fact, Pair
from onward.explain.diff.match import Matching


@dataclass(frozen=True, eq=False, repr=False)
class Changes:
    """The fields of a ``Diff``."""

    before: Program
    after: Program
    added: tuple[Op, ...]
    removed: tuple[Op, ...]
    rewired: tuple[Pair, ...]
    changed: tuple[Pair, ...]
    same: tuple[Pair, ...]
    moved: int
    facts: tuple[Fact, ...]
    matching: Matching

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.rewired or self.changed or self.moved or self.facts)

    def __len__(self) -> int:
        return len(self.added) + len(self.removed) + len(self.rewired) + len(self.changed)

    @property
    def costs(self) -> Mapping[str, tuple[int, int]]:
        """Estimates for both: operations, bytes moved and exchanged, and the peak of ``memory`` in bytes.

        The first three are of the ops as they stand, the last is of the step that ``compile`` makes of them.
        """
        old, new = cost(self.before), cost(self.after)
        before, after = (MemoryUse(p).peak for p in (self.before, self.after))
        return {
            "operations": (old.flops, new.flops),
            "bytes moved": (old.bytes, new.bytes),
            "bytes exchanged": (old.exchanged, new.exchanged),
            "peak memory": (before, after),
        }
