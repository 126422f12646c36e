"""The datagrams in which the processes of one computation report their progress to each other.

A process that died sends nothing, and is known by its silence. Each one says about every quarter of a
second, and when a step begins or ends, how far it is. Datagrams carry a code that only those can make who
know the token of the run, and are numbered: what is forged, damaged or said twice is dropped unread.

>>> datagram = pack(PeerWord(begun=18, finished=17, text="batch [32,784]"), 1, 5, b"token")
>>> unpack(datagram, b"token")
(1, 5, PeerWord(begun=18, finished=17, status=<Status.RUNNING: 0>, text='batch [32,784]', halt=0, signal=0))
>>> unpack(datagram, b"another") is None
True
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from hmac import compare_digest
from threading import Event, Lock, Thread

_HEAD = struct.Struct("!4sIQQQQBB")  # what it is, who speaks, its count of datagrams, 3 steps, status, signal
_MAGIC = b"onw3"
_CODE = 16  # bytes
_TEXT = 600  # bytes; a datagram stays below the smallest packet of a network
_LARGEST = _HEAD.size + _TEXT + _CODE


class Status(IntEnum):
    """The status of a process."""

    RUNNING = 0
    FINISHED = 1  # its program came to its end
    FAILED = 2  # an error ended it
    GAVE_UP = 3  # it ended because of another process


@dataclass(frozen=True)
class Member:
    """One of the processes: where it is heard, and how a person finds it."""

    address: tuple[str, int]
    host: str
    pid: int

    @property
    def is_dead(self) -> bool:
        """Whether it is certain that the process is no more, as it can be on this host only."""
        if os.name != "posix" or self.host != own_host():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it belongs to somebody else
            return False
        return False


@dataclass(frozen=True)
class PeerWord:
    """The report of a process on its own progress.

    Args:
        begun: the last step that it began; the first one is step 1.
        finished: the last step that it finished.
        status: whether it still takes part.
        text: what it feeds in the step that it began; once it has left, why.
        halt: the step before which it would end, having been asked to, or heard that another was. One that it
            has finished is a wish: it ends before a later one. 0: none.
        signal: the number of the signal that asked to.
    """

    begun: int = 0
    finished: int = 0
    status: Status = Status.RUNNING
    text: str = ""
    halt: int = 0
    signal: int = 0


@dataclass(frozen=True)
class LastWord:
    """The last word of another process, and when it came (``time.monotonic``)."""

    at: float
    number: int = 0  # of the datagram; 0: none came yet
    word: PeerWord = PeerWord()


def own_host() -> str:
    """The name of this host."""
    return socket.gethostname()[:64]


def short(text: str) -> str:
    """The text as it fits into a datagram; different texts stay different."""
    if len(text) <= _TEXT // 4:  # no character takes more than four bytes
        return text
    return f"{text[: _TEXT // 4 - 20]}... {blake2b(text.encode(), digest_size=8).hexdigest()}"


def pack(word: PeerWord, index: int, number: int, token: bytes) -> bytes:
    """A word of process ``index`` as its datagram ``number``."""
    head = _HEAD.pack(_MAGIC, index, number, word.begun, word.finished, word.halt, word.status, word.signal)
    said = head + word.text.encode(errors="replace")[:_TEXT]
    return said + _code(said, token)


def unpack(datagram: bytes, token: bytes) -> tuple[int, int, PeerWord] | None:
    """Who spoke, the number of the datagram, and the word; None if it is not a datagram of this run."""
    said, code = datagram[:-_CODE], datagram[-_CODE:]
    if len(said) < _HEAD.size or not compare_digest(code, _code(said, token)):
        return None
    magic, index, number, begun, finished, halt, status, signal = _HEAD.unpack_from(said)
    if magic != _MAGIC or status > max(Status):
        return None
    text = said[_HEAD.size :].decode(errors="ignore")
    return index, number, PeerWord(begun, finished, Status(status), text, halt, signal)


def _code(said: bytes, token: bytes) -> bytes:
    return blake2b(said, key=token, digest_size=_CODE).digest()


class Heartbeat:
    """Tells the others how far this process is, and keeps what they told; one daemon thread.

    Args:
        index: which of the members this process is.
        members: all of them, in the order of their indices.
        mailbox: a bound UDP socket, which others reach at ``members[index].address``.
        token: at most 64 bytes that only the members know.
        interval: seconds between two datagrams when nothing happens.

    Attributes:
        heard: the last word of each member; that of this process stays empty.
        news: is set whenever a word comes.
        word: what it tells of this process.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[Member],
        mailbox: socket.socket,
        token: bytes,
        interval: float,
    ) -> None:
        self.index, self.members, self.interval = index, tuple(members), interval
        self.heard = [LastWord(time.monotonic()) for _ in self.members]
        self.news = Event()
        self._mailbox, self._token = mailbox, token
        self.word = PeerWord()
        self._said, self._count = 0.0, 0
        self._lock = Lock()
        self._open = True
        Thread(target=self._talk, name="onward-peers", daemon=True).start()

    def note(self, word: PeerWord) -> None:
        """Tell this with the next datagram."""
        self.word = word

    def say(self, word: PeerWord, now: bool = False) -> None:
        """Tell this, now or, where something was told just before, with the next datagram.

        Steps may be shorter than what it takes to tell all others.
        """
        self.word = word
        if now or time.monotonic() - self._said > self.interval / 25:
            self._tell()

    def leave(self, status: Status, why: str) -> None:
        """Tell that this process takes no part any more; more than once, for datagrams may be lost."""
        self.word = replace(self.word, status=status, text=why)
        for _ in range(3):
            self._tell()

    def close(self) -> None:
        """Say nothing more, and hear nothing more."""
        self._open = False
        self._mailbox.close()

    def _tell(self) -> None:
        with self._lock:
            self._count += 1
            datagram = pack(self.word, self.index, self._count, self._token)
            self._said = time.monotonic()
        for i, member in enumerate(self.members):
            if i != self.index:
                with suppress(OSError):  # a network that is down for a moment
                    self._mailbox.sendto(datagram, member.address)

    def _talk(self) -> None:
        """The thread."""
        while self._open:
            left = self._said + self.interval - time.monotonic()
            if left <= 0:
                self._tell()
                continue
            try:
                self._mailbox.settimeout(left)
                datagram = self._mailbox.recv(_LARGEST + 1)
            except TimeoutError:
                continue
            except OSError:
                time.sleep(self.interval / 25)  # closed, or a network that is down for a moment
                continue
            self._hear(datagram)

    def _hear(self, datagram: bytes) -> None:
        found = unpack(datagram, self._token)
        if found is None:
            return
        index, number, word = found
        if index < len(self.heard) and index != self.index and number > self.heard[index].number:
            self.heard[index] = LastWord(time.monotonic(), number, word)
            self.news.set()
