"""One version of a model, and the ways in which it has been asked so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from onward.core.errors import ArgumentError
from onward.serve.endpoint.plan import RequestPlan
from onward.serve.endpoint.probe import Joining, probe
from onward.serve.endpoint.refusal import later
from onward.serve.endpoint.source import OpenedModel
from onward.serve.endpoint.trials import LengthTrials

_MOST_WAYS = 64  # each is compiled for every batch size, which takes memory


@dataclass(frozen=True)
class Ready:
    """A plan that is compiled, and how requests may be joined: at the traced lengths, and at others."""

    plan: RequestPlan
    joining: Joining
    trials: LengthTrials


class Served:
    """A model that answers; a reload makes another one beside it.

    Args:
        source: the model and its version.
        outputs: what is answered unless a request names something; none for what the network returns.
        most: examples in a batch at most.
        join: whether requests may be computed together at all.
    """

    def __init__(self, source: OpenedModel, outputs: Iterable[str], most: int, join: bool = True) -> None:
        self.source, self.most, self.join = source, most, join
        self.plan = RequestPlan.of(source.model, outputs)
        self._lock = Lock()
        self._preparer = _preparer()
        self._asked: dict[tuple[str, ...], Future[Ready]] = {}  # what was asked last stands last

    def ask(self, names: Iterable[str] = ()) -> Future[Ready]:
        """A future of the compiled plan for these names; for none, of that for the outputs.

        Raises:
            UnknownNameError: no Variable has such a name.
            Refusal: too many different choices are being compiled already.
        """
        program = self.source.model.test_program
        fetch = tuple(sorted({program[name].name for name in names}))
        if not fetch or fetch == tuple(sorted(self.plan.fetch)):
            fetch = self.plan.fetch
        with self._lock:
            known = self._asked.pop(fetch, None)
            if known is None or _failed(known):
                self._make_room()
                known = self._preparer.submit(self._prepared, fetch)
            self._asked[fetch] = known
            return known

    def tried(self, trial: Callable[[], Joining]) -> Future[Joining]:
        """A future of what a trial finds, which runs when what was asked for before is compiled."""
        with self._lock:
            return self._preparer.submit(trial)

    def close(self) -> None:
        """Compile nothing more of what waits to be; what is asked later is compiled again."""
        with self._lock:
            self._preparer.shutdown(wait=False, cancel_futures=True)
            self._preparer = _preparer()

    def _make_room(self) -> None:
        """Leave out what failed and, where there are too many choices, the one not asked for the longest."""
        self._asked = {fetch: known for fetch, known in self._asked.items() if not _failed(known)}
        others = [fetch for fetch in self._asked if fetch != self.plan.fetch]
        if len(others) < _MOST_WAYS:
            return
        oldest = next((fetch for fetch in others if self._asked[fetch].done()), None)
        if oldest is None:
            raise later(429, f"{_MOST_WAYS} other choices of names are being compiled; ask again later.", 5)
        del self._asked[oldest]

    def expect_same_interface(self, other: Served) -> None:
        """Raise ``ArgumentError`` unless another model takes and answers what this one does."""
        for what, ours, theirs in (
            ("takes", self.plan.expected, other.plan.expected),
            ("answers", _types(self.plan), _types(other.plan)),
        ):
            if ours != theirs:
                raise ArgumentError(
                    f"The new model {what} {theirs}; the one that is served {what} {ours}. Clients would be "
                    "refused: serve the new one at a port of its own."
                )

    def _prepared(self, fetch: tuple[str, ...]) -> Ready:
        plan = self.plan if fetch == self.plan.fetch else RequestPlan.of(self.source.model, fetch)
        joining = probe(plan, self.most, self.join)
        return Ready(plan, joining, LengthTrials(plan, joining))


def _types(plan: RequestPlan) -> str:
    """The outputs, in words; the lengths that were traced and may be others are left out."""
    shown = ((v, ",".join(map(str, plan.shapes[v.name]))) for v in plan.outputs())
    return ", ".join(f"{v.name} {v.dtype}[{shape}]" for v, shape in shown)


def _failed(known: Future[Ready]) -> bool:
    return known.cancelled() or (known.done() and known.exception() is not None)


def _preparer() -> ThreadPoolExecutor:
    """Where plans are compiled, so that neither the event loop nor the computing thread waits.

    Each version of a model has its own: a reload does not wait for what was asked of the version before.
    """
    return ThreadPoolExecutor(1, "onward-prepare")
