"""The processes of one computation watch each other, so that none waits forever for a dead one.

A step over several processes ends when all take part. When one dies, is stopped, or has no data left, the
others block inside XLA, where Python reaches nothing. ``Peers`` runs the step in a thread of its own, waits
for it with a deadline, and says which process is missing, and what it does instead.

>>> peers = Peers.meet()                        # all processes together; here there is only one
>>> peers.run(lambda: 6 * 7, deadline=60.0)
42
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from threading import Lock
from typing import Any, ClassVar, TypeVar

from onward.core.errors import OnwardError, PeerError
from onward.execute.peers.background import TaskThread
from onward.execute.peers.heartbeat import Heartbeat, Member, PeerWord, Status, short
from onward.execute.peers.rendezvous import OF_THE_EXCHANGE, meet, summary
from onward.execute.peers.verdict import GONE, HOPELESS, ON_THE_WAY, PeerView, all_halt, verdict

T = TypeVar("T")

INTERVAL = 0.25  # seconds between two datagrams of a process
SILENCE = 8  # intervals after which a process that says nothing is taken for dead or stopped
_LOST = "This process can take no further step. {why}"
_INTERRUPTED = (
    "Step {step} was interrupted while it waited for the other processes, which may have gone on. Start all "
    "processes again from the last checkpoint."
)


class Peers:
    """The processes of one computation, as one of them knows them: which are alive, and how far each one is.

    Every process makes one with ``Peers.meet()``. The constructor is for processes that found each other in
    another way.

    Args:
        index: which of the members this process is.
        members: all processes, in the order of their indices.
        mailbox: a UDP socket, bound where the others reach ``members[index]``; None for a process alone.
        token: at most 64 bytes that only these processes know.
        interval: seconds between two datagrams of a process.

    Attributes:
        met: what ``meet`` made in this process, or None.

    Example:
        >>> boxes = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
        >>> for box in boxes:
        ...     box.bind(("127.0.0.1", 0))
        >>> members = [Member(box.getsockname(), "spark", 100 + i) for i, box in enumerate(boxes)]
        >>> one, two = (Peers(i, members, box, b"secret", interval=0.01) for i, box in enumerate(boxes))
        >>> one.run(lambda: "done", deadline=5.0)
        'done'
        >>> two.leave()
        >>> one.run(lambda: time.sleep(1), deadline=5.0)
        Traceback (most recent call last):
        onward.core.errors.PeerError: Step 2 cannot end. Process 1 (pid 101 on spark) came to its end after
        step 1, and takes no part in step 2. Give all processes the same number of batches. If one only takes
        longer to read, set a longer deadline: onward launch --deadline 1800, or ONWARD_DEADLINE=1800.
        >>> one.close(), two.close()
        (None, None)
    """

    met: ClassVar[Peers | None] = None

    def __init__(
        self,
        index: int,
        members: Sequence[Member],
        mailbox: socket.socket | None,
        token: bytes,
        *,
        interval: float = INTERVAL,
    ) -> None:
        self.index, self.members = index, tuple(members)
        self._heartbeat = None if mailbox is None else Heartbeat(index, members, mailbox, token, interval)
        self._background = TaskThread("onward-step")
        self._turn = Lock()
        self._finished = 0
        self._label = ""
        self._lost = ""
        self._halt = self._halted = 0  # the step before which it would end; the last one where all would
        self._signal = 0

    @classmethod
    def meet(cls, deadline: float | None = None) -> Peers:
        """All processes call it together, after ``jax.distributed.initialize``; only the first call works.

        It waits for all, and opens the connections that the first step would open: there processes wait 30 s
        for each other and no longer, which one that compiles for longer than the others may exceed.

        Args:
            deadline: how many seconds to wait for the others; None: any time.

        Raises:
            PeerError: they did not come.
        """
        if cls.met is None:
            found = meet(deadline)
            cls.met = cls(found.index, found.members, found.mailbox, found.token)
            atexit.register(cls.met._say_goodbye)
        return cls.met

    def run(self, work: Callable[[], T], deadline: float | None, label: str = "") -> T:
        """Run what needs all processes; every process calls it for the same work in the same order.

        Args:
            work: what to run. It is called in another thread, so contexts such as ``jax.default_device`` do
                not reach it, and has to wait for what it computes (``jax.block_until_ready``).
            deadline: how many seconds it may take; None: any time.
            label: what has to be the same in all processes, such as the shapes of the batch. A step with
                another label than the one before begins only once all have begun it and are seen to agree:
                where shapes differ, gloo ends the process without an error.

        Returns:
            what ``work`` returned.

        Raises:
            PeerError: it failed because of another process, or took longer than the deadline; the message
                names the process. No further step can be taken then.
            Exception: what ``work`` raised by itself. The step counts as not begun.
        """
        if self._heartbeat is None:
            return work()
        with self._turn:
            if self._lost:
                raise PeerError(_LOST.format(why=self._lost))
            step = _WaitedStep(self._heartbeat, self._finished + 1, short(label), deadline)
            self._lost = _INTERRUPTED.format(step=step.number)  # unless it ends otherwise
            try:
                result = self._run(step, work)
            except PeerError as error:
                self._lost = str(error)
                raise
            return result

    def ask_to_halt(self, number: int) -> None:
        """Tell all processes that this one was asked to end, by that signal; its handler may call it."""
        self._halt, self._signal = max(self._halt, self._finished), max(self._signal, number)
        if self._heartbeat is not None:
            self._heartbeat.note(replace(self._heartbeat.word, halt=self._halt, signal=self._signal))

    def halts(self, deadline: float | None, number: int = 0) -> int:
        """The signal by which all processes end here, after the same step, or 0; asked before every step.

        Who was asked to end, or hears that another was, says so and waits: all have said it, and end, or one
        had begun the next step without knowing, and all take part in it and ask again after it. Where another
        one takes no part any more, this one ends by itself.

        Args:
            deadline: how many seconds to wait for the others; None: any time.
            number: the signal that asked this process to end; 0: none did.
        """
        heard = () if self._heartbeat is None else self._heartbeat.heard
        found = max([number, *(h.word.signal for h in heard if h.word.halt > self._halted)])
        if not found:
            return 0
        step, self._signal = self._finished + 1, found
        self._halt = step
        if self._heartbeat is not None and not self._agreed(self._heartbeat, step, deadline):
            return 0
        self._halted, self._signal = step, 0
        return found

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this process takes no further part, and the error that is the reason."""
        if self._heartbeat is None:
            return
        if error is None:
            self._heartbeat.leave(Status.FINISHED, "")
        else:
            status = Status.GAVE_UP if isinstance(error, PeerError) else Status.FAILED
            self._heartbeat.leave(status, summary(error))

    def close(self) -> None:
        """Fall silent, as a process that died does."""
        if self._heartbeat is not None:
            self._heartbeat.close()

    def _say_goodbye(self) -> None:
        """At the end of the interpreter."""
        self.leave(_uncaught())

    def _agreed(self, heartbeat: Heartbeat, step: int, deadline: float | None) -> bool:
        """Whether all end before this step, once that is certain."""
        asked = _WaitedStep(heartbeat, step, self._label, deadline)
        word = self._word(self._finished, self._finished)
        heartbeat.say(word, now=True)
        while True:
            heartbeat.news.clear()
            found = all_halt(asked.view)
            if found is not None or asked.is_late:
                break
            heartbeat.news.wait(asked.moment)
        for _ in range(3 if found else 0):  # datagrams may be lost, and others wait for this one
            heartbeat.say(word, now=True)
        return found is not False

    def _word(self, begun: int, finished: int) -> PeerWord:
        """The report of this process on its own progress."""
        return PeerWord(begun, finished, text=self._label, halt=self._halt, signal=self._signal)

    def _run(self, step: _WaitedStep, work: Callable[[], T]) -> T:
        begun = replace(self._word(step.number, self._finished), text=step.label)
        if step.label != self._label:
            step.heartbeat.say(begun, now=True)
            step.wait_for_all_to_begin()
            self._label = step.label
        self._background.begin(work)
        step.heartbeat.say(begun)
        result: T
        result, error = step.wait_for_end(self._background)
        if error is None:
            self._finished = step.number
        elif step.is_fault_of_others(error):
            raise step.failed(error) from error
        step.heartbeat.note(self._word(self._finished, self._finished))
        self._lost = ""
        if error is not None:
            raise error
        return result


class _WaitedStep:
    """One step, for the process that waits for its end."""

    def __init__(self, heartbeat: Heartbeat, number: int, label: str, deadline: float | None) -> None:
        self.heartbeat, self.number, self.label, self.deadline = heartbeat, number, label, deadline
        self.until = inf if deadline is None else time.monotonic() + deadline

    @property
    def view(self) -> PeerView:
        """The processes as they are known now."""
        heard = self.heartbeat
        silence = SILENCE * heard.interval
        return PeerView(
            heard.index, heard.members, heard.heard[:], self.number, self.label, time.monotonic(), silence
        )

    def wait_for_all_to_begin(self) -> None:
        """Wait until every process has begun the step too, with the same label, or is silent.

        Raises:
            PeerError: they feed something else, or the time is over.
        """
        while True:
            self.heartbeat.news.clear()
            self._check(self.view.kinds & HOPELESS)
            if not self.view.kinds & ON_THE_WAY:
                return
            self.heartbeat.news.wait(self.moment)

    def wait_for_end(self, background: TaskThread) -> tuple[Any, BaseException | None]:
        """Wait for the work; return its value, and the exception that it raised.

        Raises:
            PeerError: it cannot end, or the time is over.
        """
        before = False
        while (done := background.result(self.moment)) is None:
            now = bool(self.view.kinds & HOPELESS)
            self._check(before and now)  # the work had an interval's time to end
            before = now
        return done

    def is_fault_of_others(self, error: BaseException) -> bool:
        """Whether it is an error of the exchange, or one raised while a process was missing."""
        if not isinstance(error, Exception) or isinstance(error, OnwardError):
            return False
        if OF_THE_EXCHANGE.search(str(error)):
            return True
        if self.view.kinds & GONE:
            self._settle()
        return bool(self.view.kinds & GONE)

    def failed(self, error: BaseException) -> PeerError:
        """The error to raise when the work raised one."""
        found = self._error("failed in the exchange between the processes")
        return PeerError(f"{found} The error was: {summary(error)}")

    @property
    def is_late(self) -> bool:
        """Whether it had its time."""
        return time.monotonic() >= self.until

    @property
    def moment(self) -> float:
        """How long to wait before looking around again."""
        return max(0.0, min(self.heartbeat.interval, self.until - time.monotonic()))

    def _check(self, is_hopeless: object) -> None:
        """Raise if the step cannot end, or had its time."""
        if is_hopeless:
            raise self._error("cannot end")
        if self.is_late:
            raise self._error(f"did not end within {self.deadline:g} s")

    def _error(self, what: str) -> PeerError:
        """The error that says what happened, and because of which process."""
        self._settle()
        place = self.view.place
        return PeerError(f"{place[0].upper()}{place[1:]} {what}. {verdict(self.view)}")

    def _settle(self) -> None:
        """Wait a moment, in which the living say something and the dead become silent."""
        since = time.monotonic() + self.heartbeat.interval / 2  # datagrams of before may come a little later
        while not self.view.is_settled(since):
            time.sleep(self.heartbeat.interval / 10)


def _uncaught() -> BaseException | None:
    """The error that ends this process, which Python has printed; None if none does."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


@atexit.register  # here, so that it runs after all that scripts register, and just before JAX's own
def _end_without_waiting() -> None:
    """End a process that failed before JAX waits, for minutes, for others that may be dead."""
    error = _uncaught()
    is_one_of_many = Peers.met is not None and len(Peers.met.members) > 1
    if error is None or not (is_one_of_many or isinstance(error, PeerError)):
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
