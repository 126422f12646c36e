"""The specification of a parameter server, and the work that all share: greet, refuse, give, count."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from time import monotonic

import numpy as np

from onward.core.errors import ClusterError
from onward.fleet.blueprint import Blueprint
from onward.fleet.faults import Faults
from onward.fleet.fence import Epoch
from onward.fleet.keeper import Durability, Keeper
from onward.fleet.link import Unreachable
from onward.fleet.messages import HistoryRow, Push, Reply, Sender, ServerStatus, ServerWord, Told
from onward.fleet.modes import Mode

PATIENCE = 5.0
"""Seconds after which who waits is told to ask again."""

OLDER = (
    "Server {index} is of driver {own} of its folder, and was asked by one of driver {driver}, which is "
    "newer: this server's place is another's. Nothing was applied."
)

Wanted = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ServerSpec:
    """The specification from which a server is started, and restarted.

    Attributes:
        blueprint: the graph.
        index: which server.
        trainers: how many trainers there are.
        mode: how they work together.
        sums: whether gradients are added, and not averaged.
        given: first values by name.
        folder: where its record is kept.
        durability: when it is written.
        faults: what happens at the edges of the protocol.
        driver: the number of the driver of the folder; it only grows.
    """

    blueprint: Blueprint
    index: int
    trainers: int
    mode: Mode
    sums: bool = False
    given: Mapping[str, np.ndarray] = field(default_factory=dict)
    folder: str | None = None
    durability: Durability = field(default_factory=Durability)
    faults: Faults = field(default_factory=Faults)
    driver: int = 0


class Desk:
    """The work that both kinds of server share: greet, tell trainers apart, give values, count.

    Args:
        spec: what to serve.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self.spec, self.index = spec, spec.index
        self.cut = spec.blueprint.split()
        folder = None if spec.folder is None else Path(spec.folder)
        self.keeper = Keeper(
            self.cut, spec.index, spec.given, folder, spec.durability, spec.faults, spec.driver
        )
        self.birth = token_hex(8)
        self.incarnations = {t: line[0] for t, line in self.keeper.ledger.items()}
        self.news = asyncio.Condition()
        self.pushes = self.duplicates = self.received = self.sent = 0
        self.rows: list[HistoryRow] = []
        self.first_row = 0

    @property
    def epoch(self) -> Epoch:
        """The driver, and the process of this server; every answer contains them."""
        return Epoch(self.spec.driver, self.keeper.epoch.start)

    def ending(self) -> str | None:
        """Why this process has to end: another one has its place. None while it may stay."""
        try:
            self.keeper.expect()
        except (Unreachable, ClusterError) as error:
            return str(error)
        return None

    def greet(self, sender: Sender, fingerprint: str) -> None:
        """Refuse a trainer of another graph; remember which of its incarnations is the newest.

        Raises:
            ClusterError: another graph.
        """
        self.keeper.expect()
        if fingerprint != self.cut.fingerprint:
            raise ClusterError(
                f"Trainer {sender.trainer} runs the graph {fingerprint}, server {self.index} the graph "
                f"{self.cut.fingerprint}. All must run the same code, with the same Onward and JAX."
            )
        known = self.incarnations.get(sender.trainer, 0)
        self.incarnations[sender.trainer] = max(known, sender.incarnation)

    def checked(self, fingerprint: str) -> tuple[int, int, str]:
        """The generation, the newest incarnation of any trainer (of an earlier training), and its birth."""
        self.keeper.expect()
        if fingerprint != self.cut.fingerprint:
            raise ClusterError(
                f"Server {self.index} makes the graph {self.cut.fingerprint} of what it was sent, and "
                f"here it makes {fingerprint}. It must be the same in every process: no random numbers, "
                "clocks or counters while it is traced, and everywhere the same versions of Onward and JAX."
            )
        return self.keeper.generation, max(self.incarnations.values(), default=0), self.birth

    def objection(self, sender: Sender) -> Reply | None:
        """The answer to someone who is not to be served; None to others."""
        if sender.driver > self.spec.driver:
            raise ClusterError(OLDER.format(index=self.index, own=self.spec.driver, driver=sender.driver))
        if (sender.driver, sender.incarnation) < (self.spec.driver, self.incarnations.get(sender.trainer, 0)):
            return self.say(ServerWord.SUPERSEDED)
        if sender.generation != self.keeper.generation:
            return self.say(ServerWord.STALE)
        return None

    def taken(self, push: Push) -> None:
        """Count a gradient, and refuse one that is none of this graph.

        Raises:
            ClusterError: nothing was applied.
        """
        if not 0 <= push.sender.trainer < self.spec.trainers:
            raise ClusterError(
                f"Server {self.index} was sent a gradient by trainer {push.sender.trainer}; it has "
                f"{self.spec.trainers}, counted from 0. Nothing was applied."
            )
        if push.gradients is not None:
            self.keeper.holding.check(push.gradients)
            self.received += push.nbytes

    def say(
        self,
        word: ServerWord,
        wanted: Wanted | None = None,
        told: Told | None = None,
    ) -> Reply:
        """An answer, with values where some are wanted."""
        self.spec.faults.reach(f"server {self.index}", "before reply")
        values = None if wanted is None else self.keeper.give(wanted)
        self.sent += 0 if values is None else values.nbytes
        self.keeper.expect()
        holding, is_done = self.keeper.holding, word is ServerWord.DONE
        whole = holding.whole() if is_done and told is None else ()
        told = Told(arrays={0: whole}) if whole else told or Told()
        seen = holding.seen() if is_done else ()
        return Reply(word, self.keeper.version, values, epoch=self.epoch, told=told, seen=seen)

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Wait for news until the condition holds; False if it does not in time."""
        end = monotonic() + seconds
        async with self.news:
            while not condition():
                left = end - monotonic()
                if left <= 0:
                    return False
                try:
                    await asyncio.wait_for(self.news.wait(), left)
                except TimeoutError:
                    return bool(condition())
        return True

    async def tell(self) -> None:
        """Wake all who wait."""
        async with self.news:
            self.news.notify_all()

    def note(self, push: Push, staleness: int = 0, lag: int = 0) -> None:
        """Remember a step that was applied, until the driver has it; its trainer may die before it tells."""
        if push.row is not None:
            self.rows.append(replace(push.row, staleness=staleness, lag=lag))

    def told_rows(self, seen: int, birth: str) -> list[HistoryRow]:
        """The rows from this one on, if this process was asked before; those before are let go."""
        if birth == self.birth:
            del self.rows[: max(0, seen - self.first_row)]
            self.first_row = max(seen, self.first_row)
        return list(self.rows)

    def status(self, queue: int, seen: int = 0, birth: str = "") -> ServerStatus:
        """How it is doing, and with ``birth`` the steps from ``seen`` on."""
        keeper = self.keeper
        keeper.expect()
        return ServerStatus(
            index=self.index,
            pid=os.getpid(),
            host=socket.gethostname(),
            birth=self.birth,
            rows=self.told_rows(seen, birth) if birth else [],
            epoch=self.epoch,
            version=keeper.version,
            generation=keeper.generation,
            pushes=self.pushes,
            duplicates=self.duplicates,
            queue=queue,
            busy=keeper.busy,
            received=self.received,
            sent=self.sent,
            written=keeper.store.bytes_written if keeper.store is not None else 0,
            skipped=keeper.holding.skipped,
        )
