"""The checks of a Step before and after it runs: whether training stopped, and where NaN or infinity arose.

The step itself tells whether it was finite, and changes nothing if not, nor do the steps after it. So the
host need not wait: it looks at what is known by now, and at what is two calls old. A step that was not finite
is run once more then, on the State that it left alone and on its batch, and the op is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import jax
import numpy as np

from onward.core.errors import NonFiniteError
from onward.core.first_use import at_first_call
from onward.core.program import Program
from onward.develop.check_finite import Check, check_of
from onward.develop.guard import Stop, stop_of
from onward.execute.feeds import Feeds
from onward.execute.out import Out
from onward.execute.state import State, is_deleted

_find = at_first_call("onward.execute.nonfinite.find", "find")

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""The data of a step, by place and by name."""


_AHEAD = 1  # calls whose verdict may still be open when the next one begins
_LINES = 16  # States at once whose batches are kept
_AT_LEAST = 64  # calls after which a State of which nothing is known is waited for


class _CallVerdict(NamedTuple):
    """Whether each step of a call was finite, which may still be computing, and the batches of the steps."""

    finite: Any
    batches: Sequence[Arguments]


class _CallLine(NamedTuple):
    """The calls that led to a State, told by its flag, and of which nothing is known yet."""

    flag: ReferenceType[Any]
    verdicts: tuple[_CallVerdict, ...]

    @property
    def is_over(self) -> bool:
        """Whether no step can continue from that State: its flag is gone, or deleted."""
        return (flag := self.flag()) is None or is_deleted(flag)


class Checked:
    """Raises for a State of a checked Program, and keeps the batches of which nothing is known yet.

    Any number of States may run through one Step, from any thread: what is known of a State hangs on the
    array of its flag.
    """

    def __init__(self, program: Program, check: Check) -> None:
        self.program, self.check = program, check
        self._lines: dict[int, _CallLine] = {}
        self._lock = Lock()
        self._calls = 0

    def look(self, state: State, wait: bool = False) -> None:
        """Raise ``NonFiniteError`` if one of the steps before this State was not finite."""
        self._calls += 1
        flag = self._flag(state)
        if flag is None:
            return
        verdicts = self._verdicts(flag)
        if not verdicts and _is_due(flag, self._calls, wait) and not bool(flag):
            self._stop(state)
        open_ = verdicts
        while open_ and (wait or len(open_) > _AHEAD or _is_known(open_[0].finite)):
            if not (good := np.atleast_1d(np.asarray(open_[0].finite))).all():
                self._stop(state, open_, int(np.argmin(good)))
            open_ = open_[1:]
        if open_ is not verdicts:
            self._keep(flag, open_)

    def seen(self, before: State, after: State, out: Out, batches: Sequence[Arguments]) -> None:
        """Remember what a call returned for these batches, which led from one State to another."""
        finite, flag = out[self.check.following.name], self._flag(after)
        if flag is not None and not isinstance(finite, jax.core.Tracer):
            old = self._array(before)
            verdicts = self._verdicts(old)
            with self._lock:
                self._lines.pop(id(old), None)
            self._keep(flag, (*verdicts, _CallVerdict(finite, batches)))

    def _array(self, state: State) -> Any:
        """The array that tells whether all was finite before a State."""
        name, storage = self.check.finite.name, state.storage
        return state.buffers[state.layout.position[name] if storage is None else storage.place[name][0]]

    def _flag(self, state: State) -> Any:
        """The same; None if it is spent, or traced, or that of several States in one."""
        flag = self._array(state)
        is_one = not isinstance(flag, jax.core.Tracer) and flag.shape == () and not is_deleted(flag)
        return flag if is_one else None

    def _verdicts(self, flag: Any) -> tuple[_CallVerdict, ...]:
        """The verdicts still open for the calls that led to the State with this flag."""
        line = self._lines.get(id(flag))
        return line.verdicts if line is not None and line.flag() is flag else ()

    def _keep(self, flag: Any, verdicts: tuple[_CallVerdict, ...]) -> None:
        with self._lock:
            kept = {key: line for key, line in self._lines.items() if not line.is_over and key != id(flag)}
            if verdicts:
                kept[id(flag)] = _CallLine(ref(flag), verdicts)
            self._lines = dict(list(kept.items())[-_LINES:])

    def _stop(self, state: State, verdicts: Sequence[_CallVerdict] = (), place: int = 0) -> None:
        """Raise for a State, unless it is spent in part, with what is found in a batch of the first call."""
        if state.is_spent:
            return
        words = _NO_BATCH
        finding = self._found(state, verdicts[0].batches[place]) if verdicts else None
        if verdicts:
            words = _NOT_AGAIN if finding is None else str(finding)
        error = NonFiniteError(_MESSAGE.format(words))
        error.finding, error.state = finding, state.replace({self.check.finite.name: True})
        error.undone = sum(len(v.batches) for v in verdicts) - place
        raise error

    def _found(self, state: State, batch: Arguments) -> Any:
        """The first op that is not finite in this step."""
        values = {v.name: x for v, x in zip(state.layout.variables, state.values, strict=True)}
        data, feed = batch
        return _find(self.program, values, Feeds(self.program).named(data, feed) if feed else data)


class Stopped:
    """Raises for a State in which ``guard(program, "stop")`` stopped, as soon as that is known."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self._calls = 0

    def look(self, state: State, wait: bool = False) -> None:
        """Raise ``NonFiniteError`` if this State is one in which training stopped."""
        self._calls += 1
        if state.is_spent or isinstance(flag := state[self.stop.stopped.name], jax.core.Tracer):
            return
        if _is_due(flag, self._calls, wait) and bool(flag):
            step = None if self.stop.step is None else int(state[self.stop.step.name])
            culprits = np.asarray(state[self.stop.culprits.name])
            raise NonFiniteError(self.stop.message(culprits.tolist(), step))


class Checks:
    """Both looks of a Step: at what ``guard(program, "stop")`` and at what ``check_finite`` says.

    Attributes:
        fetch: the names that the step has to return for that.
        begun: what they add to the state, and its first values: a State without can be given these.
    """

    def __init__(self, stopped: Stopped | None, checked: Checked | None) -> None:
        self.stopped, self.checked = stopped, checked
        self.fetch = () if checked is None else (checked.check.following.name,)
        self.begun = {} if checked is None else {checked.check.finite: True}

    @classmethod
    def of(cls, program: Program) -> Checks | None:
        """Those of a Program; None if it never tells."""
        check, stop = check_of(program), stop_of(program)
        checked = None if check is None else Checked(program, check)
        stopped = None if stop is None else Stopped(stop)
        return None if checked is None and stopped is None else cls(stopped, checked)

    def look(self, state: State, wait: bool = False) -> None:
        """Raise ``NonFiniteError`` if a step before this State was not finite, as far as that is known."""
        if self.checked is not None:
            self.checked.look(state, wait)
        if self.stopped is not None:
            self.stopped.look(state, wait)

    def seen(self, before: State, after: State, out: Out, batches: Sequence[Arguments]) -> None:
        """Remember what a call returned for these batches, which led from one State to another."""
        if self.checked is not None:
            self.checked.seen(before, after, out, batches)


def _is_due(flag: Any, calls: int, wait: bool) -> bool:
    """Whether a flag is read at this call: one that is known, or has not been waited for lately."""
    return wait or _is_known(flag) or calls % _AT_LEAST == 0


def _is_known(flag: Any) -> bool:
    """Whether a flag may be read without waiting; all processes must judge at one call."""
    return jax.process_count() == 1 and bool(not hasattr(flag, "is_ready") or flag.is_ready())


_MESSAGE = (
    "A step was not finite, and changed nothing: error.state is the state before it; go on from there.\n{}"
)
_NOT_AGAIN = (
    "Run once more, it is finite: its batch was changed meanwhile (a reader that fills the same array again),"
    " or the compiled step rounds in another way."
)
_NO_BATCH = (
    "Which batch it was is not known: the State was copied, or came out of jax.jit or jax.lax.scan. Look "
    "yourself: find_nonfinite(step, error.state, batch)."
)
