"""Whether all processes end before the same step, of which one or several were asked to: a pure function.

No process finishes a step before all have begun it, so where one that was asked to end has not begun the next
step, none has finished that. One that does not know of it may have begun it: then all take part in it.
A process that says it would halt begins the step only after another has, or after all have said so.

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

from __future__ import annotations

from dataclasses import replace

from onward.execute.peers.verdict import GONE, PeerView

_PATIENCE = 4
"""Times the silence after which a step takes a process for stopped: then this one ends without it."""


def all_halt(view: PeerView) -> bool | None:
    """Whether all end before ``view.step``; None while a process has yet to say so, or to begin it."""
    yet = [i for i in view.others if view.heard[i].word.halt != view.step]
    if not yet:
        return True
    if any(view.heard[i].word.begun >= view.step for i in view.others):
        return False
    patient = replace(view, silence=_PATIENCE * view.silence)
    return True if any(patient.kind(i) in GONE for i in yet) else None
