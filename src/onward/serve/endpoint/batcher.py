"""The thread that computes: requests that wait are joined while it is busy.

A request that finds the thread idle and no other request on its way goes at once. Where several were there
lately, the thread waits until as many are back, at most ``latency`` after the oldest of them has come. So a
single client never waits for company, and many are answered by few large batches.
"""

from __future__ import annotations

import logging
from asyncio import AbstractEventLoop, Future
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from time import monotonic
from typing import Any

import numpy as np

from onward.serve.endpoint.metrics import Counters
from onward.serve.endpoint.plan import Arrays, RequestPlan
from onward.serve.endpoint.probe import Joining, joined
from onward.serve.endpoint.refusal import later

LOG = logging.getLogger("onward.serve")
Outcome = list[np.ndarray] | Exception


@dataclass(eq=False)
class Job:
    """One request that waits to be computed.

    Attributes:
        plan: what it asks.
        joining: with which others it may be computed.
        feed: its arrays.
        rows: how many examples it has.
        loop: the event loop that waits for the answer.
        answer: what it waits for; done before the end if nobody wants it any more.
    """

    plan: RequestPlan
    joining: Joining
    feed: Arrays
    rows: int
    loop: AbstractEventLoop
    answer: Future[list[np.ndarray]]
    arrived: float = field(default_factory=monotonic)

    def joins(self, other: Job) -> bool:
        """Whether it may be computed together with another: examples of a batch are of the same lengths."""
        if self.plan is not other.plan or self.joining != other.joining or self.joining.alone:
            return False
        return all(x.shape[1:] == other.feed[name].shape[1:] for name, x in self.feed.items())


def choose(waiting: Sequence[Job]) -> list[Job]:
    """Choose the next batch: the oldest job, and those that may be joined with it and still fit, in order."""
    first, *others = waiting
    chosen, rows = [first], first.rows
    for job in others:
        if rows >= first.joining.most:
            break
        if job.joins(first) and rows + job.rows <= first.joining.most:
            chosen.append(job)
            rows += job.rows
    return chosen


def patience(waiting: Sequence[Job], company: int, latency: float, now: float) -> float:
    """How many seconds to wait for further requests; none if all that may come are here, or time is up.

    Args:
        waiting: at least one request, the oldest first.
        company: how many requests there were lately, those computed and those that waited meanwhile.
        latency: seconds that the oldest may wait.
        now: the time on the clock that the arrivals were read from.
    """
    first = waiting[0]
    full = sum(job.rows for job in waiting) >= first.joining.most
    if full or first.joining.alone or len(waiting) >= company:
        return 0.0
    return max(0.0, first.arrived + latency - now)


class Batcher:
    """Computes what is put, in a thread of its own, until it is closed; nothing that was put is lost."""

    def __init__(self, latency: float, most_waiting: int, counts: Counters) -> None:
        self.latency, self.most_waiting, self.counts = latency, most_waiting, counts
        self._changed = Condition()
        self._waiting: list[Job] = []
        self._company = 1
        self._wanted = 1  # how many have to wait before the thread is woken
        self._closing = False
        self._thread: Thread | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def put(self, job: Job) -> None:
        """Leave a request to the thread.

        Raises:
            Refusal: too many wait, or the server ends.
        """
        with self._changed:
            if self._closing:
                raise later(503, "The server is ending; ask another one, or this one again.")
            if len(self._waiting) >= self.most_waiting:
                self._forget()
            if len(self._waiting) >= self.most_waiting:
                raise later(503, f"{len(self._waiting)} requests wait already; ask again later.")
            if self._thread is None:
                self._thread = Thread(target=self._work, name="onward-serve", daemon=True)
                self._thread.start()
            self._waiting.append(job)
            if len(self._waiting) >= self._wanted:
                self._changed.notify()

    def close(self, timeout: float | None = None) -> None:
        """Compute what waits, and end; what is put later is refused."""
        with self._changed:
            self._closing = True
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join(timeout)

    def open(self) -> None:
        """Take requests (again)."""
        with self._changed:
            self._closing = False

    def _work(self) -> None:
        while jobs := self._next():
            outcomes = self._computed(jobs)
            with self._changed:
                self._company = len(jobs) + len(self._waiting)
            _deliver(jobs, outcomes)

    def _next(self) -> list[Job]:
        """The next requests to compute together, once it is time; none at the end."""
        with self._changed:
            while True:
                self._forget()
                if not self._waiting:
                    if self._closing:
                        return []
                    self._pause(1, None)
                elif pause := self._patience():
                    self._pause(min(self._company, self._waiting[0].joining.most), pause)
                else:
                    jobs = choose(self._waiting)
                    taken = set(jobs)
                    self._waiting = [job for job in self._waiting if job not in taken]
                    return jobs

    def _forget(self) -> None:
        """Leave out what nobody waits for any more."""
        self._waiting = [job for job in self._waiting if not job.answer.done()]

    def _patience(self) -> float:
        if self._closing:
            return 0.0
        return patience(self._waiting, self._company, self.latency, monotonic())

    def _pause(self, wanted: int, seconds: float | None) -> None:
        self._wanted = wanted
        self._changed.wait(seconds)

    def _computed(self, jobs: list[Job]) -> list[Outcome]:
        """Compute the outcome of each request. If a batch fails, each of its requests is tried alone."""
        try:
            return list(self._run(jobs))
        except Exception as error:
            if len(jobs) > 1:
                LOG.warning(
                    "a batch of %d requests failed (%s); each is tried alone", len(jobs), _line(error)
                )
                return [self._computed([job])[0] for job in jobs]
            return [error]

    def _run(self, jobs: list[Job]) -> Iterable[list[np.ndarray]]:
        plan, joining = jobs[0].plan, jobs[0].joining
        rows = sum(job.rows for job in jobs)
        size = joining.size(rows)
        feeds = [job.feed for job in jobs]
        begun = monotonic()
        whole = plan.run(feeds[0] if joining.alone else joined(feeds, plan, size))
        self._count(len(jobs), rows, size, monotonic() - begun)
        return [whole] if joining.alone else _split(whole, [job.rows for job in jobs])

    def _count(self, jobs: int, rows: int, size: int, seconds: float) -> None:
        self.counts.add("onward_rows_total", rows)
        self.counts.add("onward_padding_total", size - rows)
        self.counts.observe("onward_batch_rows", rows)
        self.counts.observe("onward_batch_requests", jobs)
        self.counts.observe("onward_compute_seconds", seconds)


def _split(whole: list[np.ndarray], rows: Iterable[int]) -> list[list[np.ndarray]]:
    parts, begin = [], 0
    for count in rows:
        parts.append([array[begin : begin + count] for array in whole])
        begin += count
    return parts


def _deliver(jobs: list[Job], outcomes: list[Outcome]) -> None:
    """Hand the outcomes over, with one call for each event loop."""
    by_loop: dict[AbstractEventLoop, list[tuple[Job, Outcome]]] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        by_loop.setdefault(job.loop, []).append((job, outcome))
    for loop, pairs in by_loop.items():
        _call(loop, _settle, pairs)


def _call(loop: AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # the loop was closed: nobody waits any more
        LOG.warning("an event loop ended before its requests were answered")


def _settle(pairs: list[tuple[Job, Outcome]]) -> None:
    for job, outcome in pairs:
        if job.answer.done():
            continue
        if isinstance(outcome, Exception):
            job.answer.set_exception(outcome)
        else:
            job.answer.set_result(outcome)


def _line(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
