"""How many updates each parameter of an optimizer has had, where a Session runs the updates in parts.

An optimizer has one step counter. Updates that are run one after the other, as parts of one step, all count
from where that step began.

>>> counts = UpdateCounts()
>>> for part in (["w"], ["b"], ["w"], ["b"]):
...     print(counts.shifts(part, is_read=True))
...     counts.add(part)
(0, 0)
(-1, 0)
(0, 0)
(-1, 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onward.core.errors import StateError
from onward.core.marks import COUNT
from onward.core.program import Program, Variable
from onward.core.words import Kind


class UpdateCounts:
    """The updates of each parameter since the step counter was set."""

    def __init__(self, had: Mapping[str, int] | None = None) -> None:
        self.had = Counter(had or {})

    def shifts(self, trained: Sequence[str], is_read: bool) -> tuple[int, int]:
        """The amounts to add to the step counter before these parameters are updated, and afterwards.

        Raises:
            StateError: the counter is read, and they have had different numbers of updates.
        """
        most = max(self.had.values(), default=0)
        behind = {most - self.had[name] for name in trained} or {0}
        if len(behind) > 1 and is_read:
            raise StateError(self._unequal(trained))
        lag = behind.pop() if len(behind) == 1 else 0
        moves = not trained or any(self.had[name] == most for name in trained)
        return -lag, 0 if moves else lag - 1

    def add(self, trained: Iterable[str]) -> None:
        """These were updated."""
        self.had.update(trained)

    def _unequal(self, trained: Sequence[str]) -> str:
        least, most = min(trained, key=lambda n: self.had[n]), max(trained, key=lambda n: self.had[n])
        return (
            f"{most!r} has had {self.had[most]} updates here and {least!r} {self.had[least]}, and the "
            "optimizer reads one step counter for both. Run the updates of an optimizer always together, or "
            "always in the same parts; or give each part an optimizer of its own: minimize(cost, "
            "parameter_list=[...])."
        )


@dataclass(frozen=True)
class CountedPart:
    """The updates in a Program, or in a part of one.

    Attributes:
        trained: the names of the parameters that are updated.
        counter: the step counter that moves on with them, if there is one.
        is_read: whether anything but the counting itself depends on it.
    """

    trained: tuple[str, ...]
    counter: Variable | None
    is_read: bool

    @classmethod
    def of(cls, program: Program) -> CountedPart:
        """The updates of this Program."""
        trained = tuple(v.name for v in program.next_state if v.kind is Kind.PARAMETER)
        counters = (op.inputs[0] for op in program.ops if op.type is COUNT)
        counter = next((v for v in counters if v in program.next_state), None)
        is_read = any(counter in op.inputs for op in program.ops if op.type is not COUNT)
        return cls(trained, counter, is_read)
