"""What a Step looks at before and after it runs: whether training stopped, and where it became not finite.

The step itself tells whether it was finite, and changes nothing if not, nor do the steps after it. So the
host need not wait: it looks at what is known by now, and at what is two calls old. A step that was not finite
is run once more then, on the State that it left alone and on its batch, and the op is named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from onward.core.errors import NonFiniteError
from onward.core.program import Program
from onward.derive.check_finite import Check, check_of
from onward.execute.feeds import Feeds
from onward.execute.nonfinite.find import find
from onward.execute.out import Out
from onward.execute.state import State
from onward.execute.stopped import Stopped

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The data of a step, by place and by name."""

_AHEAD = 1  # calls whose verdict may still be open when the next one begins


class _Verdict(NamedTuple):
    """What a call said of its steps, which may still be computing, and their batches."""

    finite: Any
    batches: Sequence[Arguments]


class Checked:
    """Raises for a checked Program, and keeps the batches of which nothing is known yet."""

    def __init__(self, program: Program, check: Check) -> None:
        self.program, self.check = program, check
        self._open: deque[_Verdict] = deque()

    def look(self, state: State, wait: bool = False) -> None:
        """Raise ``NonFiniteError`` if one of the steps before this State was not finite."""
        while self._open:
            finite = self._open[0].finite
            is_known = jax.process_count() == 1 and finite.is_ready()  # all processes must judge at one call
            if not (wait or is_known or len(self._open) > _AHEAD):
                return
            verdict = self._open.popleft()
            good = np.atleast_1d(np.asarray(finite))
            if not good.all() and _has_stopped(state, self.check):
                self._open.clear()
                raise self._error(state, verdict.batches[int(np.argmin(good))])

    def seen(self, out: Out, batches: Sequence[Arguments]) -> None:
        """Remember what a call returned for these batches."""
        finite = out[self.check.following.name]
        if not isinstance(finite, jax.core.Tracer):
            self._open.append(_Verdict(finite, batches))

    def _error(self, state: State, batch: Arguments) -> NonFiniteError:
        values = {v.name: x for v, x in zip(state.layout.variables, state.values, strict=True)}
        data, feed = batch
        arguments = Feeds(self.program).named(data, feed) if feed else data
        finding = find(self.program, values, arguments)
        error = NonFiniteError(_MESSAGE.format(finding if finding is not None else _NOT_AGAIN))
        error.finding, error.state = finding, state.replace({self.check.finite.name: True})
        return error


class Checks:
    """Both looks of a Step: at what ``guard(program, "stop")`` and at what ``check_finite`` says.

    Attributes:
        fetch: the names that the step has to return for that.
    """

    def __init__(self, stopped: Stopped | None, checked: Checked | None) -> None:
        self.stopped, self.checked = stopped, checked
        self.fetch = () if checked is None else (checked.check.following.name,)

    @classmethod
    def of(cls, program: Program) -> Checks | None:
        """Those of a Program; None if it never tells."""
        check = check_of(program)
        checked = None if check is None else Checked(program, check)
        stopped = Stopped.of(program)
        return None if checked is None and stopped is None else cls(stopped, checked)

    def look(self, state: State, wait: bool = False) -> None:
        """Raise ``NonFiniteError`` if a step before this State was not finite, as far as that is known."""
        if self.checked is not None:
            self.checked.look(state, wait)
        if self.stopped is not None:
            self.stopped.look(state, wait)

    def seen(self, out: Out, batches: Sequence[Arguments]) -> None:
        """Remember what a call returned for these batches."""
        if self.checked is not None:
            self.checked.seen(out, batches)


_MESSAGE = (
    "A step was not finite, and changed nothing: error.state is the state before it; go on from there.\n{}"
)
_NOT_AGAIN = (
    "Run once more, it is finite: its batch was changed meanwhile (a reader that fills the same array again),"
    " or the compiled step rounds in another way."
)


def _has_stopped(state: State, check: Check) -> bool:
    """Whether a State is one that the check holds; another may come from elsewhere."""
    if state.is_spent or check.finite.name not in state.layout.position:
        return False
    flag = state[check.finite.name]
    return not isinstance(flag, jax.core.Tracer) and not bool(flag)
