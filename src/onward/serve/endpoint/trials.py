"""Whether requests of a plan may be joined, for each of the lengths that their data may have.

A network may mix its examples at some lengths and not at others: beyond a window, in the last chunk. So the
trial at the start tells about the lengths that were traced and no others. Another length is tried once that
helps: when a second request of it comes before the first is answered, or when rows would be added to one.
Until it has passed the trial, its requests are computed one at a time.
"""

from __future__ import annotations

from asyncio import Future as Answer
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from onward.serve.endpoint.compiled import MOST_LENGTHS, Lengths
from onward.serve.endpoint.plan import Arrays, RequestPlan
from onward.serve.endpoint.probe import Joining, probe

Submit = Callable[[Callable[[], Joining]], Future[Joining]]


class LengthTrials:
    """The trials of the lengths that were asked for last.

    Args:
        plan: what is asked.
        traced: how requests of the lengths that were traced may be joined.
    """

    def __init__(self, plan: RequestPlan, traced: Joining) -> None:
        self.plan, self.traced = plan, traced
        self._lock = Lock()
        self._tried: dict[Lengths, Future[Joining]] = {}  # what was asked last stands last
        self._latest: WeakValueDictionary[Lengths, Answer[Any]] = WeakValueDictionary()

    def joining(self, feed: Arrays, rows: int, answer: Answer[Any], submit: Submit) -> Future[Joining]:
        """How a request may be joined, or a future of it where nothing can be computed before.

        Args:
            feed: its arrays.
            rows: how many examples it has.
            answer: what it waits for.
            submit: has a trial run in another thread.
        """
        lengths = self.plan.lengths_of(feed)
        if self.traced.alone or lengths == self.plan.traced_lengths:
            return _known(self.traced)
        padded = rows not in self.traced.sizes
        waits = padded and 1 not in self.traced.sizes  # the file takes some number of examples and no other
        with self._lock:
            meets = self._meets(lengths, answer)
            helps = waits or ((meets or padded) and not self._busy())
            trial = self._trial(lengths, submit if helps else None)
        if trial is not None and (waits or trial.done()):
            return trial
        return _known(self._alone("requests of this length were not tried yet"))

    def _meets(self, lengths: Lengths, answer: Answer[Any]) -> bool:
        """Whether the request before, of the same lengths, is not answered yet."""
        before = self._latest.get(lengths)
        self._latest[lengths] = answer
        return before is not None and not before.done()

    def _busy(self) -> bool:
        """Whether a length is being tried: one at a time, so that other things are compiled in between."""
        return not all(trial.done() for trial in self._tried.values())

    def _trial(self, lengths: Lengths, submit: Submit | None) -> Future[Joining] | None:
        """The trial of some lengths; a new one, if there is none, only where it can be submitted."""
        trial = self._tried.pop(lengths, None)
        if trial is None or trial.cancelled():
            trial = submit(partial(self._found, lengths)) if submit is not None else None
        if trial is not None:
            self._tried[lengths] = trial
            if len(self._tried) > MOST_LENGTHS:
                del self._tried[next(iter(self._tried))]
        return trial

    def _found(self, lengths: Lengths) -> Joining:
        """Try some lengths."""
        try:
            found = probe(self.plan, self.traced.most, lengths=lengths)
        except Exception as error:
            return self._alone(f"the trial of this length failed: {error}")
        if found.alone:
            return self._alone(found.alone)
        if found.sizes != self.traced.sizes:
            return self._alone("batches of some sizes cannot be computed at this length")
        return self.traced

    def _alone(self, why: str) -> Joining:
        return replace(self.traced, alone=why)


def _known(joining: Joining) -> Future[Joining]:
    found: Future[Joining] = Future()
    found.set_result(joining)
    return found
