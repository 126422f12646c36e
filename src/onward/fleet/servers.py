"""The servers as one trainer sees them: calls that are repeated until somebody answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import numpy as np

from onward.core.errors import ClusterError
from onward.fleet.blueprint import Blueprint
from onward.fleet.faults import Faults
from onward.fleet.fence import Epoch
from onward.fleet.link import Link, Pending, Unreachable
from onward.fleet.messages import Reply, Sender, ServerWord, Welcome
from onward.fleet.modes import Mode

PAUSE = 0.1  # seconds between two calls of someone who does not answer


@dataclass(frozen=True)
class TrainerSpec:
    """The specification from which a trainer is started.

    Attributes:
        blueprint: the graph.
        trainer: its number.
        incarnation: how often it was started, this time included.
        trainers: how many there are.
        mode: how they work together.
        servers: the ways to the servers.
        reader: what it reads.
        epochs: how often.
        given: values of the state that it keeps, by name.
        deadline: seconds after which a server that does not answer is given up.
        check: whether data and losses that are not finite end the training.
        batch: the data whose length is the number of examples; None: the first.
        faults: what happens at the edges of the protocol.
        driver: the number of its driver.
    """

    blueprint: Blueprint
    trainer: int
    incarnation: int
    trainers: int
    mode: Mode
    servers: tuple[Link, ...]
    reader: Any
    epochs: int
    given: Mapping[str, np.ndarray] = field(default_factory=dict)
    deadline: float = 60.0
    check: bool = True
    batch: str | None = None
    faults: Faults = field(default_factory=Faults)
    driver: int = 0


class WentBack(Exception):  # noqa: N818
    """The servers went back to an older version: begin again where they stand."""

    def __init__(self, stuck: int | None) -> None:
        super().__init__()
        self.stuck = stuck


class Servers:
    """The servers as one trainer sees them: calls that are repeated until they are answered."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        self.name = f"trainer {spec.trainer}"
        self.links = [spec.faults.link(self.name, link) for link in spec.servers]
        self.sender = Sender(spec.trainer, spec.incarnation, driver=spec.driver)
        self.epochs = [Epoch()] * len(self.links)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.links)

    def hello(self, fingerprint: str) -> list[Welcome]:
        """Say hello to all."""
        return self.all("hello", [(self.sender, fingerprint)] * self.count)

    def all(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> list[Any]:
        """Call all servers from the first given on at once, each with its arguments."""
        links = list(enumerate(self.links))[first:]
        begun = [self._begin(i, method, given) for (i, _), given in zip(links, arguments, strict=True)]
        return [
            self._answer(i, method, given, pending)
            for (i, _), given, pending in zip(links, arguments, begun, strict=True)
        ]

    def one(self, i: int, method: str, *arguments: Any) -> Any:
        """Call one server."""
        return self._answer(i, method, arguments, self._begin(i, method, arguments))

    def _begin(self, i: int, method: str, arguments: tuple[Any, ...]) -> Pending | None:
        sends = method in ("push", "exchange")
        if sends:
            self.spec.faults.reach(self.name, "before send")
        try:
            return self.links[i].call(method, *arguments)
        except Unreachable:
            return None
        finally:
            if sends:
                self.spec.faults.reach(self.name, "after send")

    def _answer(self, i: int, method: str, arguments: tuple[Any, ...], pending: Pending | None) -> Any:
        """The answer; the call is repeated as long as nobody answers it."""
        end = monotonic() + self.spec.deadline
        while True:
            try:
                if pending is not None:
                    reply = pending.result(max(0.1, end - monotonic()))
                    return self._accepted(i, reply)
            except (Unreachable, TimeoutError) as error:
                if monotonic() > end:
                    raise ClusterError(
                        f"Server {i} did not answer trainer {self.spec.trainer} for {self.spec.deadline:g} s "
                        f"({method}): {error}"
                    ) from error
            sleep(PAUSE)
            pending = self._begin(i, method, arguments)

    def _accepted(self, i: int, reply: Any) -> Any:
        if isinstance(reply, Reply | Welcome):
            if reply.epoch < self.epochs[i]:
                raise Unreachable(
                    f"server {i} of epoch {reply.epoch} answered, and {self.epochs[i]} is there"
                )
            self.epochs[i] = reply.epoch
        if isinstance(reply, Reply):
            if reply.word is ServerWord.SUPERSEDED:
                raise ClusterError(f"Another process has taken the place of trainer {self.spec.trainer}.")
            if reply.word is ServerWord.STALE:
                raise WentBack(None)
        return reply
