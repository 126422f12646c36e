"""Why a step that needs all processes does not end, in words, from what was heard of the others.

>>> members = [Member(("127.0.0.1", 0), "spark", 4241), Member(("127.0.0.1", 0), "spark", 4242)]
>>> heard = [LastWord(0.0), LastWord(at=87.5, number=350, word=PeerWord(begun=17, finished=17))]
>>> print(verdict(PeerView(0, members, heard, step=18, label="x [32, 784]", now=100.0, silence=2.0)))
Process 1 (pid 4242 on spark) was last heard of 12.5 s ago, after step 17: it died or was stopped. A step
needs all processes: end them, and start all again from the last checkpoint. onward launch --restarts 1 does
so by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from onward.execute.peers.heartbeat import LastWord, Member, PeerWord, Status

_SHOWN = 5  # processes
_RESTART = (
    "A step needs all processes: end them, and start all again from the last checkpoint. "
    "onward launch --restarts 1 does so by itself."
)
_TIME = "a longer deadline: onward launch --deadline 1800, or ONWARD_DEADLINE=1800"
_COUNT = f"Give all processes the same number of batches. If one only takes longer to read, set {_TIME}."
_SHAPE = "Give all processes batches of the same shape in a step: drop the last, shorter one, or fill it up."
_NUMBERS = (
    "What is not split over the processes each feeds as a whole, with the same numbers: a rate or a key that "
    "all compute alike, a mean over the processes, or a whole batch (batches(..., parts=False))."
)
_CALLS = (
    "All processes do that together, in the same order: none does it alone, such as under "
    f"`if jax.process_index() == 0`. If one only takes longer, set {_TIME}."
)
_SLOW = f"All {{count}} processes are alive and take part, so it may only be slow: set {_TIME}."


class PeerState(IntEnum):
    """How a process stands to a step that another one waits in, the gravest first."""

    FAILED = 0
    DEAD = 1
    SILENT = 2
    MISMATCHED = 3
    FINISHED = 4
    ABSENT = 5
    GAVE_UP = 6
    LATE = 7
    INSIDE = 8
    DONE = 9


GONE = frozenset({PeerState.FAILED, PeerState.DEAD, PeerState.SILENT, PeerState.FINISHED, PeerState.GAVE_UP})
HOPELESS = frozenset(
    {PeerState.FAILED, PeerState.DEAD, PeerState.MISMATCHED, PeerState.FINISHED, PeerState.GAVE_UP}
)
ON_THE_WAY = frozenset({PeerState.ABSENT, PeerState.LATE})
_OF_ORDER = frozenset({PeerState.MISMATCHED, PeerState.FINISHED, PeerState.ABSENT})

_OTHER_PROGRAM = (
    ": these are different Programs. All processes run the same one: the same network, optimizer and rates, "
    "and no constant, shape or seed within it that depends on the process"
)
_CALLING = "is in "  # how the label of a call begins, and not of a step
_ADVICE = {
    PeerState.FAILED: _RESTART,
    PeerState.DEAD: _RESTART,
    PeerState.SILENT: _RESTART,
    PeerState.MISMATCHED: _SHAPE,
    PeerState.FINISHED: _COUNT,
    PeerState.ABSENT: _COUNT,
    PeerState.GAVE_UP: "Start all processes again.",  # its own words say more
}


@dataclass(frozen=True)
class PeerView:
    """The processes as process ``index`` knows them while it waits in a step.

    Args:
        index: which of the members it is.
        members: all processes.
        heard: the last word of each.
        step: the step it waits in, counted from 1.
        label: what it feeds there, or the call that it is in.
        now: the time of ``time.monotonic``.
        silence: seconds after which a process that says nothing is taken for dead or stopped.
    """

    index: int
    members: Sequence[Member]
    heard: Sequence[LastWord]
    step: int
    label: str
    now: float
    silence: float

    @property
    def place(self) -> str:
        """Where it waits, in words: in a step, or in a call."""
        return self.label.removeprefix(_CALLING) if _is_call(self.label) else f"step {self.step}"

    @property
    def others(self) -> list[int]:
        """The indices of the other processes."""
        return [i for i in range(len(self.members)) if i != self.index]

    @property
    def kinds(self) -> set[PeerState]:
        """How the other processes stand to the step."""
        return {self.kind(i) for i in self.others}

    def kind(self, i: int) -> PeerState:
        """How process ``i`` stands to the step."""
        word = self.heard[i].word
        if word.status is not Status.RUNNING:
            return PeerState.DONE if word.finished >= self.step else PeerState[word.status.name]
        if self.is_silent(i):
            return PeerState.DEAD if self.members[i].is_dead else PeerState.SILENT
        if word.finished >= self.step:
            return PeerState.DONE
        if word.begun < self.step:
            return PeerState.ABSENT if word.begun == word.finished else PeerState.LATE
        return PeerState.INSIDE if word.text == self.label else PeerState.MISMATCHED

    def is_silent(self, i: int) -> bool:
        """Whether nothing was heard of a process for too long."""
        return self.now - self.heard[i].at > self.silence

    def is_settled(self, since: float) -> bool:
        """Whether each of the others has said something since then, has left, or is silent.

        A process that was itself asleep finds all others silent, until it has read what they said meanwhile.
        """
        is_awake = self.now - since > self.silence / 4
        return all(
            self.heard[i].at > since
            or self.heard[i].word.status is not Status.RUNNING
            or (is_awake and self.is_silent(i))
            for i in self.others
        )


def verdict(view: PeerView) -> str:
    """The processes that are in the way of the step, each with what it does, and how to go on."""
    guilty = sorted((view.kind(i), i) for i in view.others if view.kind(i) in _ADVICE)
    guilty = [
        (kind, i) for kind, i in guilty if kind is not PeerState.GAVE_UP
    ] or guilty  # these only repeat it
    if not guilty:
        return _SLOW.format(count=len(view.members))
    told = [_told(view, kind, i) for kind, i in guilty[:_SHOWN]]
    if len(guilty) > _SHOWN:
        told.append(f"And {len(guilty) - _SHOWN} more.")
    gravest, first = guilty[0]
    if gravest in _OF_ORDER and (_is_call(view.label) or _is_call(view.heard[first].word.text)):
        return " ".join([*told, _CALLS])
    is_of_numbers = _shapes(view.heard[first].word.text) == _shapes(view.label)
    advice = _NUMBERS if gravest is PeerState.MISMATCHED and is_of_numbers else _ADVICE[gravest]
    return " ".join([*told, advice])


def _told(view: PeerView, kind: PeerState, i: int) -> str:
    """One sentence about one process."""
    member, heard = view.members[i], view.heard[i]
    who = f"process {i} (pid {member.pid} on {member.host})"
    if kind is PeerState.SILENT and heard.number == 0:
        host, port = member.address
        return f"Nothing was ever heard of {who}: it died, or no UDP datagrams come through to {host}:{port}."
    return f"{who[0].upper()}{who[1:]} {_deed(view, kind, heard)}."


def _deed(view: PeerView, kind: PeerState, heard: LastWord) -> str:
    word, step = heard.word, view.step
    text, where = word.text.rstrip("."), _where(word, step)
    match kind:
        case PeerState.FAILED:
            return f"was ended {where} by an error: {text}"
        case PeerState.DEAD:
            return (
                f"died {where}: nothing was heard of it for {view.now - heard.at:.1f} s, and its pid is gone"
            )
        case PeerState.SILENT:
            return f"was last heard of {view.now - heard.at:.1f} s ago, {where}: it died or was stopped"
        case PeerState.MISMATCHED:
            return _differing(text, view)
        case PeerState.FINISHED:
            return f"came to its end {where}, and takes no part in {view.place}"
        case PeerState.ABSENT:
            why = "it does something else" if _is_call(view.label) else "it reads data, or has none left"
            return f"is alive and has not begun {view.place}, which this one waits in: {why}"
        case _:
            return f"gave up {where}: {text}"


def _differing(text: str, view: PeerView) -> str:
    """How another process and this one are at different places, or feed different data."""
    if _is_call(text) or _is_call(view.label):
        theirs = text if _is_call(text) else f"feeds {text} in step {view.step}"
        return f"{theirs}, and this one {view.label if _is_call(view.label) else f'feeds {view.label}'}"
    deed = f"feeds {text or 'nothing that has a name'} in step {view.step}, and this one {view.label}"
    return deed + _OTHER_PROGRAM * (_program(text) != _program(view.label))


def calling(what: str) -> str:
    """The label of a call that all processes make together, from its words.

    >>> calling("the test of loss")
    'is in the test of loss'
    """
    return f"{_CALLING}{what}"


def _is_call(label: str) -> bool:
    return label.startswith(_CALLING)


def _program(label: str) -> str:
    """The Program that a label names at its beginning; empty if it names none."""
    return label.partition(",")[0] if label.startswith("Program ") else ""


def _shapes(label: str) -> str:
    """A label without the numbers in it."""
    return re.sub(r"\] = [^,]*", "]", label)


def _where(word: PeerWord, step: int) -> str:
    """The place of a process in its steps.

    Its last word may be a few steps old; but this process has finished all steps before ``step``, and so has
    every other.
    """
    if word.begun >= step and word.begun > word.finished:
        return f"in step {word.begun}"
    done = max(word.finished, step - 1)
    return f"after step {done}" if done else "before its first step"


_PATIENCE = 4
"""Times the silence after which a step takes a process for stopped: then this one ends without it."""


def all_halt(view: PeerView) -> bool | None:
    """Whether all end before ``view.step``; None while a process has yet to say so, or to begin it.

    No process finishes a step before all have begun it, so where one that was asked to end has not begun the
    next step, none has finished that. One that does not know of it may have begun it: then all take part in
    it. A process that says it would halt begins the step only after another has, or after all have said
    so.

    >>> from onward.execute.peers.heartbeat import LastWord, Member, PeerWord
    >>> members = [Member(("127.0.0.1", 0), "spark", 4241 + i) for i in range(2)]
    >>> def found(**word):
    ...     heard = [LastWord(0.0), LastWord(at=99.9, number=7, word=PeerWord(**word))]
    ...     return all_halt(PeerView(0, members, heard, step=18, label="", now=100.0, silence=2.0))
    >>> found(begun=17, finished=17, halt=18), found(begun=18, finished=17, halt=17)
    (True, False)
    >>> print(found(begun=17, finished=17, halt=17))
    None
    """
    yet = [i for i in view.others if view.heard[i].word.halt != view.step]
    if not yet:
        return True
    if any(view.heard[i].word.begun >= view.step for i in view.others):
        return False
    patient = replace(view, silence=_PATIENCE * view.silence)
    return True if any(patient.kind(i) in GONE for i in yet) else None
