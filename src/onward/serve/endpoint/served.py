"""One version of a model, and the ways in which it has been asked so far."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from threading import Lock

from onward.core.errors import ArgumentError
from onward.serve.endpoint.plan import Plan
from onward.serve.endpoint.probe import Joining, probe
from onward.serve.endpoint.refusal import Refusal
from onward.serve.endpoint.source import Opened

_MOST_WAYS = 64  # each is compiled for every batch size, and what is compiled stays in memory


@dataclass(frozen=True)
class Ready:
    """A plan that is compiled, and how requests for it may be joined."""

    plan: Plan
    joining: Joining


class Served:
    """A model that answers; a reload makes another one beside it.

    Args:
        source: the model and its version.
        outputs: what is answered unless a request names something; none for what the network returns.
        most: examples in a batch at most.
        preparer: where plans are compiled, so that neither the event loop nor the computing thread waits.
    """

    def __init__(self, source: Opened, outputs: Iterable[str], most: int, preparer: Executor) -> None:
        self.source, self.most, self._preparer = source, most, preparer
        self.plan = Plan.of(source.model, outputs)
        self._lock = Lock()
        self._asked: dict[tuple[str, ...], Future[Ready]] = {}

    def ask(self, names: Iterable[str] = ()) -> Future[Ready]:
        """What computes these names, once it is compiled; for none, the outputs.

        Raises:
            UnknownNameError: no Variable bears such a name.
            Refusal: too many different choices were made already.
        """
        program = self.source.model.test_program
        fetch = tuple(program[name].name for name in dict.fromkeys(names)) or self.plan.fetch
        with self._lock:
            if fetch not in self._asked:
                if len(self._asked) >= _MOST_WAYS:
                    raise Refusal(429, _too_many(self._asked))
                self._asked[fetch] = self._preparer.submit(self._prepared, fetch)
            return self._asked[fetch]

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
        plan = self.plan if fetch == self.plan.fetch else Plan.of(self.source.model, fetch)
        return Ready(plan, probe(plan, self.most))


def _types(plan: Plan) -> str:
    """What comes out, in words; the length of the batch that was traced is left out."""
    rows = {x.variable.shape[0] for x in plan.inputs if x.batched}

    def lengths(shape: tuple[int, ...]) -> str:
        return ",".join("n" if not i and n in rows else str(n) for i, n in enumerate(shape))

    return ", ".join(f"{v.name} {v.dtype}[{lengths(v.shape)}]" for v in plan.outputs())


def _too_many(asked: Iterable[tuple[str, ...]]) -> str:
    known = " or ".join("?fetch=" + ",".join(names) for names in list(asked)[:4])
    return f"{_MOST_WAYS} different choices of names were asked for; ask for one of those, such as {known}."
