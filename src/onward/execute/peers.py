"""What the processes of one computation know of each other, so that none waits for ever for a dead one.

A step over several processes ends when all take part. When one dies, is stopped, or has no data left, the
others block inside XLA, where Python reaches nothing. ``Peers`` runs the step in a thread of its own, waits
for it with a deadline, and says which process is missing, and what it does instead.

>>> peers = Peers.meet()                        # all processes together; here there is only one
>>> peers.run(lambda: 6 * 7, deadline=60.0)
42
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from math import inf
from queue import Empty, SimpleQueue
from secrets import token_hex
from threading import Lock, Thread
from typing import Any, ClassVar, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from onward.core.errors import OnwardError, PeerError
from onward.execute.blame import Kind, View, blame
from onward.execute.hearsay import Hearsay, Member, Status, Word

T = TypeVar("T")

INTERVAL = 0.25  # seconds between two datagrams of a process
SILENCE = 8  # intervals after which a process that says nothing is taken for dead or stopped
_OF_THE_EXCHANGE = re.compile(
    "gloo|nccl|coordination ?service|connection (closed|reset|refused)|socket closed|broken pipe",
    re.IGNORECASE,
)
_LOST = "This process can take no further step: {why}"
_INTERRUPTED = (
    "step {step} was interrupted while it waited for the other processes, which may have gone on. Start all "
    "processes again from the last checkpoint."
)
_NOT_MET = (
    "The {count} processes did not meet: {why}. One of them died, or began its first step long after the "
    "others (on the host, 30 s is the most that they wait for each other here). Do what takes one process "
    "longer, such as preparing data, before the processes start, or in all of them."
)
_CARD = 512  # bytes, for what a process says of itself when all meet


class Peers:
    """What the processes of one computation know of each other: who is alive, and how far each one is.

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
        >>> members = [Member(box.getsockname(), "here", 100 + i) for i, box in enumerate(boxes)]
        >>> one, two = (Peers(i, members, box, b"secret", interval=0.01) for i, box in enumerate(boxes))
        >>> one.run(lambda: "done", deadline=5.0)
        'done'
        >>> two.leave()
        >>> one.run(lambda: time.sleep(1), deadline=5.0)
        Traceback (most recent call last):
        onward.core.errors.PeerError: Step 2 cannot end. Process 1 (pid 101 on here) came to its end before
        its first step, and takes no part in step 2. Give all processes the same number of batches. ...
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
        self._interval = interval
        self._hearsay = Hearsay(index, members, mailbox, token, interval) if mailbox is not None else None
        self._hand = _Hand("onward-step")
        self._turn = Lock()
        self._begun = 0
        self._label = ""
        self._lost = ""

    @classmethod
    def meet(cls, deadline: float | None = None) -> Peers:
        """All processes call it together, once ``jax.distributed`` is initialized; a second call costs nothing.

        Its exchange over all devices also opens the connections that the first step would open: those wait
        30 s for each other and no longer, which compiling a large step may exceed.

        Args:
            deadline: how many seconds to wait for the others; None: as long as JAX does.

        Raises:
            PeerError: the others did not come.
        """
        if cls.met is None:
            cls.met = _alone() if jax.process_count() == 1 else _meeting(deadline)
            atexit.register(cls.met._say_goodbye)
        return cls.met

    def run(self, work: Callable[[], T], deadline: float | None, label: str = "") -> T:
        """Run what needs all processes; every process calls it for the same work in the same order.

        Args:
            work: what to run. It is called in another thread, so contexts such as ``jax.default_device`` do
                not reach it, and has to wait for what it computes (``jax.block_until_ready``).
            deadline: how many seconds it may take; None: any time.
            label: what has to be the same in all processes, such as the shapes of the batch. When it
                changes, the step begins only once all have begun it and are seen to agree: where shapes
                differ, gloo aborts the process.

        Returns:
            what ``work`` returned.

        Raises:
            PeerError: it failed because of another process, or took longer than the deadline; the message
                names the process. No further step can be taken then.
            Exception: what ``work`` raised by itself. The step counts as not begun.
        """
        if self._hearsay is None:
            return work()
        with self._turn:
            if self._lost:
                raise PeerError(_LOST.format(why=self._lost))
            self._lost = _INTERRUPTED.format(step=self._begun + 1)  # unless it ends otherwise
            try:
                return self._step(work, deadline, label)
            except PeerError as error:
                self._lost = str(error)
                raise

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this process takes no further part, and the error that is the reason."""
        if self._hearsay is None:
            return
        if error is None:
            self._hearsay.leave(Status.FINISHED, "")
        else:
            status = Status.GAVE_UP if isinstance(error, PeerError) else Status.FAILED
            self._hearsay.leave(status, _summary(error))

    def close(self) -> None:
        """Fall silent, as a process that died does."""
        if self._hearsay is not None:
            self._hearsay.close()

    def _say_goodbye(self) -> None:
        """At the end of the interpreter, where an error that nobody caught was printed before."""
        self.leave(getattr(sys, "last_value", None))

    def _step(self, work: Callable[[], T], deadline: float | None, label: str) -> T:
        assert self._hearsay is not None
        waiting = _Waiting(self._hearsay, self._begun + 1, label, deadline)
        self._say(waiting.step, label, now=label != self._label)
        if label != self._label:
            waiting.for_all_to_begin()
            self._label = label
        self._hand.begin(work)
        result, error = waiting.for_end_of(self._hand)
        if error is None:
            self._begun = waiting.step
            self._say(self._begun, label)
            self._lost = ""
            return result  # type: ignore[no-any-return]
        if waiting.is_fault_of_others(error):
            raise waiting.failed(error) from error
        self._say(self._begun, self._label)
        self._lost = ""
        raise error

    def _say(self, begun: int, label: str, now: bool = False) -> None:
        assert self._hearsay is not None
        self._hearsay.say(Word(begun, self._begun, text=label), now)


class _Waiting:
    """One step, as the process sees it that waits for its end."""

    def __init__(self, hearsay: Hearsay, step: int, label: str, deadline: float | None) -> None:
        self.hearsay, self.step, self.label, self.deadline = hearsay, step, label, deadline
        self.until = inf if deadline is None else time.monotonic() + deadline

    def view(self) -> View:
        """What is known now."""
        heard = self.hearsay
        now, silence = time.monotonic(), SILENCE * heard.interval
        return View(heard.index, heard.members, tuple(heard.heard), self.step, self.label, now, silence)

    def for_all_to_begin(self) -> None:
        """Wait until every process has begun the step too, with the same label, or is silent."""
        on_the_way = {Kind.ABSENT, Kind.LATE}
        while on_the_way & {view.kind(i) for view in [self.view()] for i in view.others}:
            self.hearsay.news.clear()
            self.hearsay.news.wait(self.hearsay.interval)
            self._check()
        self._check()

    def for_end_of(self, hand: _Hand) -> tuple[Any, BaseException | None]:
        """What the work returned or raised.

        Raises:
            PeerError: it never can, or the time is over.
        """
        hopeless = False
        while True:
            try:
                return hand.result(max(0.0, min(self.hearsay.interval, self.until - time.monotonic())))
            except Empty:
                if hopeless:  # it was so an interval ago, and the work had time to end since
                    self._check()
                hopeless = self.view().is_hopeless
                if time.monotonic() >= self.until:
                    self._check()

    def is_fault_of_others(self, error: BaseException) -> bool:
        """Whether it is an error of the exchange, or one that comes when somebody is missing."""
        if not isinstance(error, Exception) or isinstance(error, OnwardError):
            return False
        view = self.view()
        gone = {Kind.FAILED, Kind.SILENT, Kind.FINISHED, Kind.GAVE_UP}
        return bool(_OF_THE_EXCHANGE.search(str(error)) or gone & {view.kind(i) for i in view.others})

    def failed(self, error: BaseException) -> PeerError:
        """What to raise when the work raised."""
        self._let_silence_show()
        return PeerError(
            f"Step {self.step} failed in the exchange with the other processes. {blame(self.view())} The error "
            f"was: {_summary(error)}"
        )

    def _check(self) -> None:
        """Raise if the step cannot end, or had its time."""
        if self.view().is_hopeless:
            self._let_silence_show()
            raise PeerError(f"Step {self.step} cannot end. {blame(self.view())}")
        if time.monotonic() >= self.until:
            self._let_silence_show()
            raise PeerError(f"Step {self.step} did not end within {self.deadline:g} s. {blame(self.view())}")

    def _let_silence_show(self) -> None:
        """Wait until each of the others has said a new word, has left, or has been silent for too long."""
        since = time.monotonic() + self.hearsay.interval / 2  # what was said before may come a little later
        while not self._is_clear(self.view(), since):
            time.sleep(self.hearsay.interval / 10)

    def _is_clear(self, view: View, since: float) -> bool:
        heard = [(i, view.heard[i]) for i in view.others]
        return all(h.at > since or h.word.status is not Status.RUNNING or view.is_silent(i) for i, h in heard)


class _Hand:
    """A thread that does one piece of work after the other, for somebody who may not wait for the end.

    Handing the work over and taking its result costs some ten microseconds; starting a thread costs more.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = Thread(target=self._labour, name=name, daemon=True)

    def begin(self, work: Callable[[], Any]) -> None:
        """Do this."""
        if not self._thread.is_alive():
            self._thread.start()
        self._work.put(work)

    def result(self, timeout: float | None) -> tuple[Any, BaseException | None]:
        """What it returned, or raised.

        Raises:
            queue.Empty: it is not done.
        """
        return self._done.get(timeout=timeout)

    def _labour(self) -> None:
        while True:
            work = self._work.get()
            try:
                done = work(), None
            except BaseException as error:
                done = None, error
            self._done.put(done)
            del work, done  # or the arrays of this step would live until the next one


def _summary(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _alone() -> Peers:
    return Peers(0, [Member(("127.0.0.1", 0), socket.gethostname(), os.getpid())], None, b"")


def _meeting(deadline: float | None) -> Peers:
    """Exchange addresses with the other processes, over all devices."""
    near, far = _mailbox("127.0.0.1"), _mailbox(_own_address())
    token = token_hex(16)
    card = {
        "index": jax.process_index(),
        "host": socket.gethostname()[:128],
        "pid": os.getpid(),
        "near": near.getsockname(),
        "far": far.getsockname(),
        "token": token,
    }
    hand = _Hand("onward-meeting")
    hand.begin(lambda: _exchanged(card))
    try:
        cards, error = hand.result(deadline)
    except Empty:
        raise PeerError(_not_met(f"{deadline:g} s went by")) from None
    if error is not None:
        if _OF_THE_EXCHANGE.search(str(error)):
            raise PeerError(_not_met(_summary(error))) from error
        raise error
    is_one_host = len({c["host"] for c in cards}) == 1
    kept, other = (near, far) if is_one_host else (far, near)
    other.close()
    which = "near" if is_one_host else "far"
    members = [Member(tuple(c[which]), c["host"], c["pid"]) for c in cards]
    return Peers(card["index"], members, kept, cards[0]["token"].encode())


def _exchanged(card: dict[str, Any]) -> list[dict[str, Any]]:
    """The cards of all processes, in the order of their indices; a collective over all devices."""
    data = json.dumps(card).encode().ljust(_CARD)
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    rows = np.tile(np.frombuffer(data, np.uint8), (jax.local_device_count(), 1))
    mine = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("devices")), rows)
    gather = jax.shard_map(
        lambda x: jax.lax.all_gather(x, "devices", tiled=True),
        mesh=mesh,
        in_specs=PartitionSpec("devices"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    found = [json.loads(row.tobytes()) for row in np.asarray(jax.jit(gather)(mine))]
    return [{c["index"]: c for c in found}[i] for i in range(jax.process_count())]


def _not_met(why: str) -> str:
    return _NOT_MET.format(count=jax.process_count(), why=why.rstrip("."))


def _mailbox(address: str) -> socket.socket:
    box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    box.bind((address, 0))
    return box


def _own_address() -> str:
    """Where other hosts reach this one: the address that it would send from. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address that is reserved for examples
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
