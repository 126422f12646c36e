"""The supervisor of servers and trainers while they work: asks how they are, replaces them, ends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic, sleep
from typing import Any

from onward.core.errors import ClusterError
from onward.fleet.desk import ServerSpec
from onward.fleet.link import Link, Pending, Unreachable
from onward.fleet.messages import HistoryRow, ServerStatus, TrainerStatus
from onward.fleet.server import serve
from onward.fleet.servers import TrainerSpec
from onward.fleet.steps import Steps
from onward.fleet.worker import TrainerActor

_SOON = 5.0  # seconds that a server may take to answer at once
_PAUSE = 0.2  # seconds until one that is away is asked again
REBORN = 30.0
"""Seconds in which a server that dies while it starts is tried again."""

START = 180.0
"""Seconds that a process may take until it first answers: it imports JAX and traces the graph."""

PATIENCE = 10.0
"""Seconds after which a start that is not done says what it waits for; then twice as many, and so on."""


@dataclass
class _Asked:
    """A process that is asked how it is: the question that is open, since when, and the last answer.

    ``starting``: it has yet to answer for the first time; ``lost``: it died, as far as is known.
    """

    name: str
    link: Link
    pending: Pending | None = None
    since: float = field(default_factory=monotonic)
    answer: Any = None
    starting: bool = True
    lost: bool = False
    patience: float = field(default_factory=lambda: PATIENCE)

    def miss(self) -> None:
        """Note that it died."""
        if not self.lost:
            self.restarted()
            self.lost = True

    def restarted(self) -> None:
        """Note that it begins to start."""
        self.since, self.starting, self.patience = monotonic(), True, PATIENCE

    @property
    def where(self) -> str:
        """Its name, and its process where that is known."""
        known = self.answer
        return self.name if known is None else f"{self.name} (pid {known.pid} on {known.host})"


class Supervisor:
    """Starts servers and trainers, and keeps them working.

    Args:
        engine: what hosts them.
        servers: what it takes to start each server.
        trainers: the same for each trainer, but for the links to the servers.
        fingerprint: that of the graph here.
        restarts: how often a trainer may be replaced.
        deadline: seconds after which a process that does not answer is taken for stopped.
        start_limit: seconds that it may take longer until it first answers.
        options: of the engine, for servers and for trainers.
        say: where news go.
    """

    def __init__(
        self,
        engine: Any,
        servers: Sequence[ServerSpec],
        trainers: Sequence[TrainerSpec],
        fingerprint: str,
        *,
        restarts: int,
        deadline: float,
        start_limit: float = START,
        options: Mapping[str, Mapping[str, Any]],
        say: Callable[[str], None],
        row: Callable[[HistoryRow], None],
    ) -> None:
        self.engine, self.restarts, self.deadline, self.say = engine, restarts, deadline, say
        self.options, self.start_limit = options, start_limit
        self.fingerprint = fingerprint
        self.servers = [
            _Asked(
                f"Server {s.index}",
                engine.spawn(
                    partial(serve), s, name=f"server {s.index}", restart=True, options=options.get("servers")
                ),
            )
            for s in servers
        ]
        self.server_specs = list(servers)
        links = tuple(a.link for a in self.servers)
        self.trainer_specs = [replace(t, servers=links) for t in trainers]
        self.trainers: list[_Asked] = []
        self.runs: list[Pending] = []
        self.seen = [0] * len(trainers)
        self.steps = Steps(row)
        self.rows_seen = 0
        self.births: dict[int, str] = {}
        self.generation = self.earlier = 0
        self._stuck: int | None = None

    def begin(self) -> None:
        """Compare the graphs of all servers with the one here, and let the trainers run.

        Raises:
            ClusterError: a server has another graph, or could not be started.
        """
        found = [self._checked(asked) for asked in self.servers]
        generations, incarnations, births = zip(*found, strict=True)
        self.generation, self.earlier = max(generations), max(incarnations)
        self.births = dict(enumerate(births))
        self.trainer_specs = [
            replace(t, incarnation=self.earlier + t.incarnation) for t in self.trainer_specs
        ]
        for spec in self.trainer_specs:
            asked, run = self._started(spec)
            self.trainers.append(asked)
            self.runs.append(run)

    def _checked(self, asked: _Asked) -> tuple[int, int, str]:
        """Wait for a server's answer to ``check``; one that dies while it starts is waited for again."""
        end, limit = monotonic() + REBORN, monotonic() + self.start_limit
        pending: Pending | None = None
        while True:
            try:
                pending = pending or asked.link.call("check", self.fingerprint)
                found: tuple[int, int, str] = pending.result(min(_SOON, max(0.1, limit - monotonic())))
                return found
            except TimeoutError:
                self._tell_slow(asked)
                if monotonic() > limit:
                    raise ClusterError(self._late(asked)) from None
            except Unreachable as error:
                pending = None
                if monotonic() > end:
                    raise ClusterError(f"{asked.name} could not be started: {error}") from error
                sleep(_PAUSE)

    def _tell_slow(self, asked: _Asked) -> None:
        """Say what a start that takes long waits for."""
        seconds = monotonic() - asked.since
        if asked.starting and seconds > asked.patience:
            asked.patience *= 2
            self.say(f"{asked.name} has been starting for {seconds:.0f} s: {self._awaited(asked)}.")

    def _late(self, asked: _Asked) -> str:
        return (
            f"{asked.name} did not start within {self.start_limit:g} s: {self._awaited(asked)}. Give it more "
            "time (start_limit=), or the machine less to do."
        )

    def _awaited(self, asked: _Asked) -> str:
        awaited = getattr(self.engine, "awaited", lambda link: "it has yet to make its graph")
        return str(awaited(asked.link))

    def look(self) -> bool:
        """Look after all of them once; True when all trainers have finished.

        Raises:
            ClusterError: the training cannot go on.
        """
        for i, asked in enumerate(self.servers):
            status = self._answer(asked)
            if status is not None:
                self.heard_of_server(i, status)
            self._ask(asked, *self._rows_wanted(i))
            if status is None and self._is_silent(asked):
                self._end_silent(asked, restart=True)
        finished = [self._look_at_trainer(t) for t in range(len(self.trainers))]
        self._tell_finished([t for t, done in enumerate(finished) if done])
        self._go_back_if_stuck()
        if all(finished):
            self._tell_rest()
        return all(finished)

    def close(self) -> None:
        """End all of them."""
        for asked in (*self.trainers, *self.servers):
            with suppress(Exception):
                self.engine.kill(asked.link)

    def _started(self, spec: TrainerSpec) -> tuple[_Asked, Pending]:
        name = f"trainer {spec.trainer}"
        link = self.engine.spawn(partial(TrainerActor), spec, name=name, options=self.options.get("trainers"))
        return _Asked(name.capitalize(), link), link.call("run")

    def _answer(self, asked: _Asked) -> Any:
        """The answer to the question that is open, if it is there."""
        status = None
        if asked.pending is not None and asked.pending.done():
            try:
                status = asked.pending.result(1.0)
            except (Unreachable, TimeoutError):
                asked.miss()
            asked.pending = None
            if status is not None:
                asked.answer, asked.since, asked.starting, asked.lost = status, monotonic(), False, False
        return status

    def _ask(self, asked: _Asked, *arguments: Any) -> None:
        """The next question, if none is open."""
        if asked.pending is None:
            try:
                asked.pending = asked.link.call("status", *arguments)
            except Unreachable:
                asked.miss()

    def _is_silent(self, asked: _Asked) -> bool:
        if asked.starting:
            self._tell_slow(asked)
        longer = self.start_limit if asked.starting else 0.0
        return monotonic() - asked.since > self.deadline + longer

    def _end_silent(self, asked: _Asked, restart: bool) -> None:
        hangs = f"{asked.where} said nothing for {self.deadline:g} s: it is stopped or hangs."
        self.say(f"{self._late(asked) if asked.starting else hangs} It is ended.")
        with suppress(Exception):
            self.engine.kill(asked.link, restart=restart)
        asked.pending = None
        asked.restarted()

    def heard_of_server(self, i: int, status: ServerStatus) -> None:
        """Notice that another process has taken a server's place.

        Raises:
            ClusterError: without a record.
        """
        asked, before = self.servers[i], self.births.get(i)
        if i == 0:
            self._heard_rows(status)
        if before is not None and before != status.birth:
            self.say(f"{asked.name} was lost; pid {status.pid} took its place at version {status.version}.")
            if self.server_specs[i].durability.every is None:
                raise ClusterError(
                    f"{asked.name} died, and with durability=None no record is written: its parameters and "
                    "slots are lost. Start again, or give durability=1 (or k: every k updates)."
                )
        self.births[i] = status.birth

    def _rows_wanted(self, i: int) -> tuple[int, str] | tuple[()]:
        """Extra arguments of a status request: they ask the first server for the steps that it applied."""
        return (self.rows_seen, self.births[0]) if i == 0 else ()

    def _heard_rows(self, status: ServerStatus) -> None:
        """Take the steps that the first server applied; another process of it counts them again."""
        if status.birth != self.births[0]:
            self.rows_seen = 0
        self.rows_seen += len(status.rows)
        for row in status.rows:
            self.steps.expect(row)

    def _tell_rest(self) -> None:
        """At the end, note the steps of which the first server knows alone."""
        with suppress(Unreachable, TimeoutError):
            asked = self.servers[0].link.call("status", *self._rows_wanted(0))
            self.heard_of_server(0, asked.result(_SOON))
        for t in range(len(self.trainers)):
            self.steps.give_up(t)

    def _look_at_trainer(self, t: int) -> bool:
        """Take note of what a trainer did; replace it if it died. True when it has finished."""
        asked, run = self.trainers[t], self.runs[t]
        status: TrainerStatus | None = self._answer(asked)
        if status is not None:
            self.seen[t] += len(status.rows)
            for row in status.rows:
                self.steps.note(row)
        self._ask(asked, self.seen[t])
        if run.done():
            try:
                run.result(1.0)
                return self._has_told_all(asked) or asked.lost or self._is_silent(asked)
            except (Unreachable, TimeoutError) as error:
                self._replace(t, f"{asked.where} died ({str(error).split(':')[0]})")
        elif self._is_silent(asked):
            self._end_silent(asked, restart=False)
            self._replace(t, f"{asked.name} was ended")
        return False

    def _has_told_all(self, asked: _Asked) -> bool:
        """Whether every step of a trainer that has finished is noted."""
        return asked.answer is not None and asked.answer.finished and not asked.answer.rows

    def _replace(self, t: int, what: str) -> None:
        spec = self.trainer_specs[t]
        if spec.incarnation - self.earlier > self.restarts:
            raise ClusterError(
                f"{what}, and was replaced {self.restarts} times already (restarts={self.restarts})."
            )
        self.say(f"{what}; another process takes its place.")
        self.trainer_specs[t] = replace(spec, incarnation=spec.incarnation + 1)
        self.seen[t] = 0
        self.steps.give_up(t)
        self.trainers[t], self.runs[t] = self._started(self.trainer_specs[t])

    def _tell_finished(self, finished: list[int]) -> None:
        if finished:
            with suppress(Unreachable):
                self.servers[0].link.call("finish", finished)

    def _go_back_if_stuck(self) -> None:
        """If a round cannot be made, because gradients of it are lost, take all servers to where all were."""
        stuck = [a.answer.stuck for a in self.trainers if a.answer is not None and a.answer.stuck is not None]
        before, self._stuck = self._stuck, min(stuck, default=None)
        if self._stuck is None or self._stuck != before:
            return
        statuses: list[ServerStatus] = self._of_all("status")
        versions: list[tuple[int, ...]] = self._of_all("versions")
        if None in (*statuses, *versions):
            return
        common = set[int].intersection(*map(set, versions))
        if not common:
            raise ClusterError(
                f"Server records have no version in common: {list(map(list, versions))}. A round was lost "
                "half way. With durability=1 each server keeps its last two versions."
            )
        self.generation = max(s.generation for s in statuses) + 1
        version = max(common)
        self.say(f"All servers go back to version {version}, the newest that all have.")
        self._of_all("go_back", version, self.generation)
        self._stuck = None
        for a in (*self.trainers, *self.servers):
            a.pending = a.answer = None

    def _of_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all servers and list their answers; None for one that is away."""
        calls: list[Pending | None] = [None] * len(self.servers)
        answers: list[Any] = [None] * len(self.servers)
        for i, asked in enumerate(self.servers):
            with suppress(Unreachable):
                calls[i] = asked.link.call(method, *arguments)
        for i, pending in enumerate(calls):
            with suppress(Unreachable, TimeoutError):
                answers[i] = None if pending is None else pending.result(_SOON)
        return answers
