"""A trainer: reads batches, gets parameters, computes gradients, sends them, whatever carries the calls."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from time import perf_counter, sleep, time
from typing import Any

from onward.distribute.split.cut import Split
from onward.distribute.split.joined import Seen, is_now
from onward.fleet.compute import BatchResult, Compute, Gradient, LocalSteps, Prepared
from onward.fleet.holding import Values
from onward.fleet.messages import HistoryRow, Push, Reply, ServerWord, Told, TrainerStatus, Welcome
from onward.fleet.modes import Local, in_rounds
from onward.fleet.servers import PAUSE, Servers, TrainerSpec, WentBack
from onward.fleet.stream import Stream


class TrainerActor:
    """One trainer; ``run`` works until there are no batches left, ``status`` answers meanwhile."""

    def __init__(self, spec: TrainerSpec) -> None:
        self.spec = spec
        cut = spec.blueprint.split()
        self.fingerprint, self.joined = cut.fingerprint, cut.joined
        self.compute = _computing(spec, cut)
        self.stream = Stream(spec.reader, spec.trainer, spec.trainers, spec.epochs)
        self.servers = Servers(spec)
        self.rows: list[HistoryRow] = []
        self.where = "starts"
        self.stuck: int | None = None
        self.finished = False

    def run(self) -> None:
        """Train on all batches.

        Raises:
            ClusterError: the reader or a batch is wrong, a server is gone, or another process took its place.
        """
        while True:
            try:
                (_Rounds if in_rounds(self.spec.mode) else _Pace)(self).run()
                self.finished = True
                return
            except WentBack as again:
                self.stuck = again.stuck
                sleep(PAUSE)

    async def status(self, seen: int) -> TrainerStatus:
        """How it is doing, and the steps that it made after so many."""
        rows = self.rows[seen:]  # a thread appends meanwhile: each of the two is atomic
        return TrainerStatus(
            self.spec.trainer,
            self.spec.incarnation,
            os.getpid(),
            socket.gethostname(),
            rows,
            self.finished,
            self.stuck,
            self.where,
        )

    def batches(self, number: int) -> Iterator[Prepared]:
        """The batches from this one on, as the graph takes them; for local steps, those of a round."""
        mode = self.spec.mode
        if not isinstance(mode, Local):
            for n, batch in enumerate(self.stream.at(number), number):
                yield self.compute.prepare(batch, n)
            return
        one_by_one = self.stream.at(number * mode.every)
        while group := list(islice(one_by_one, mode.every)):
            yield self.compute.prepare(group, number * mode.every)
            number += 1

    def computed(self, prepared: Prepared, values: Sequence[Values]) -> BatchResult:
        """Compute the result of a batch."""
        self.where = "computes"
        result = self.compute.run(prepared, values)
        self.where = "waits for servers"
        return result

    def note(self, row: HistoryRow) -> None:
        """Keep a row for the history."""
        self.rows.append(row)


def _computing(spec: TrainerSpec, cut: Split) -> Compute:
    """The computation of a trainer, on the devices of its process."""
    devices = spec.blueprint.own_devices()
    if not isinstance(spec.mode, Local):
        return Gradient(cut.over(devices), spec.trainer, spec.given, spec.check, spec.batch)
    program = spec.blueprint.program()
    program = program if devices is None else devices.over(program)
    return LocalSteps(program, cut, spec.trainer, spec.given, spec.check)


@dataclass
class _MadeStep:
    """A step as it was made, for the history."""

    result: BatchResult
    begun: float
    received: int
    ended: float = field(default_factory=perf_counter)

    def row(
        self, trainer: int, sequence: int, staleness: int = 0, lag: int = 0, served: Seen = ()
    ) -> HistoryRow:
        """The row of the history, with what servers saw where that is known."""
        sent = sum(g.nbytes for g in self.result.gradients)
        now = perf_counter()
        return HistoryRow(
            trainer=trainer,
            sequence=sequence,
            metrics=self.result.metrics,
            staleness=staleness,
            lag=lag,
            examples=self.result.examples,
            sent=sent,
            received=self.received,
            seconds=now - self.begun,
            waited=now - self.ended,
            ended=time(),
            seen=tuple(seen for own in self.result.seen if is_now(seen := own + served)),
        )


class _Way:
    """The part that both ways of working share: a step, and the gradients to send."""

    def __init__(self, trainer: TrainerActor) -> None:
        self.trainer, self.servers = trainer, trainer.servers

    def step(self, prepared: Prepared, replies: Sequence[Reply]) -> _MadeStep:
        """One step with what the servers answered."""
        begun = perf_counter()
        values = [r.values for r in replies if r.values is not None]
        return _MadeStep(self.trainer.computed(prepared, values), begun, sum(v.nbytes for v in values))

    def pushes(self, sequence: int, replies: Sequence[Reply], step: _MadeStep | None) -> list[Push]:
        """The Push for each server; the first one carries the row for the history."""
        weight = 0.0 if step is None else float(step.result.examples)
        gradients = [None] * len(replies) if step is None else step.result.gradients
        row = None if step is None else step.row(self.trainer.spec.trainer, sequence)
        rows = [row] + [None] * (len(replies) - 1)
        return [
            Push(self.servers.sender, sequence, r.version, weight, g, row)
            for r, g, row in zip(replies, gradients, rows, strict=True)
        ]

    def note(self, step: _MadeStep, sequence: int, replies: Sequence[Reply]) -> None:
        """Keep the row of a step, with what servers said of the update that they made of it."""
        served = tuple(whole([r.seen for r in replies]) for whole in self.trainer.joined if replies)
        staleness, lag = max((r.staleness for r in replies), default=0), replies[0].lag if replies else 0
        self.trainer.note(step.row(self.trainer.spec.trainer, sequence, staleness, lag, served))

    def wanted(self, prepared: Prepared | None) -> list[Any]:
        """For each server, the rows that a batch reads; None where nothing is needed any more."""
        return [None if prepared is None else prepared.wanted(i) for i in range(self.servers.count)]


class _Rounds(_Way):
    """A trainer of ``Sync`` and ``Local``: stage on all servers, the first one last; get what follows."""

    def run(self) -> None:
        """Take part in rounds until no trainer has a batch."""
        version = self.join()
        batches = self.trainer.batches(version)
        prepared = next(batches, None)
        replies = self.values(version, prepared)
        while replies is not None:
            step = None if prepared is None else self.step(prepared, replies)
            following = None if prepared is None else next(batches, None)
            found = self.values(version + 1, following, self.pushes(version, replies, step))
            if step is not None:
                self.note(step, version, found or ())
            version, prepared, replies = version + 1, following, found

    def join(self) -> int:
        """The version to begin with, once all servers stand at the same point."""
        for attempt in count():
            found = self.servers.hello(self.trainer.fingerprint)
            first, *others = found
            at_one = {w.generation for w in found} == {first.generation}
            if first.generation != self.servers.sender.generation:
                self.trainer.stuck = None
            behind = 0 if first.staged else 1  # it staged here what it computed of this version of all
            if at_one and all(first.version - behind <= w.version <= first.version for w in others):
                self.servers.sender = replace(self.servers.sender, generation=first.generation)
                return first.version + first.staged
            if attempt:
                self.trainer.stuck = min(w.version for w in found)
            sleep(PAUSE)
        raise AssertionError

    def values(
        self, version: int, prepared: Prepared | None, pushes: Sequence[Push] = ()
    ) -> list[Reply] | None:
        """The replies of all servers at this version, after the gradients before it; None: it is over."""
        wanted = self.wanted(prepared)
        staged = self.servers.all("push", [(p,) for p in pushes[1:]], first=1) if pushes else []
        if any(r.word is not ServerWord.DONE for r in staged):
            raise WentBack(None)
        first = self.ask(0, version, wanted[0], pushes, Told())
        while not _is_settled(first, version):
            first = self.asked_again(0, version, wanted[0], pushes, Told(), first)
        if first.word is ServerWord.OVER:
            self.end(first.version)
            return None
        asked = [(self.servers.sender, version, w, first.told) for w in wanted[1:]]
        replies = [first, *self.servers.all("pull", asked, first=1)]
        while left := [i for i, reply in enumerate(replies) if not _is_settled(reply, version)]:
            for i in left:  # in turn: each of two trainers may have what another server has lost
                replies[i] = self.asked_again(i, version, wanted[i], pushes, first.told, replies[i])
        self.trainer.stuck = None
        return replies

    def end(self, version: int) -> None:
        """Have all other servers write this last version, which nobody could make again."""
        ended = self.servers.all("end", [(self.servers.sender, version)] * (self.servers.count - 1), first=1)
        if any(r.word is not ServerWord.DONE for r in ended):
            raise WentBack(None)

    def asked_again(
        self, i: int, version: int, wanted: Any, pushes: Sequence[Push], told: Told, reply: Reply
    ) -> Reply:
        """The next answer of one server that has not come to this version yet."""
        match reply.word:
            case ServerWord.PARTS:
                return self.ask(i, version, wanted, (), self.parts(version - 1, pushes))
            case ServerWord.WAIT:
                return self.ask(i, version, wanted, (), told)
            case ServerWord.MISSING if pushes:
                return self.ask(i, version, wanted, pushes, told)
            case ServerWord.MISSING:
                raise WentBack(version - 1)
            case _:
                raise WentBack(None)

    def ask(self, i: int, version: int, wanted: Any, pushes: Sequence[Push], told: Told) -> Reply:
        """Ask one server for a version, and send it the gradient of the one before, if there is one."""
        answer: Reply
        if pushes:
            answer = self.servers.one(i, "exchange", pushes[i], wanted, told)
        else:
            answer = self.servers.one(i, "pull", self.servers.sender, version, wanted, told)
        return answer

    def parts(self, version: int, pushes: Sequence[Push]) -> Told:
        """Collect the parts that all servers but the first add to the sums of the next round.

        A server that has yet to get gradients of that round is left out.
        """
        others = range(1, self.servers.count)
        replies = self.servers.all("measure", [(self.servers.sender, version)] * len(others), first=1)
        found = Told()
        for i, reply in zip(others, replies, strict=True):
            match reply.word:
                case ServerWord.DONE:
                    found = found.and_also(reply.told)
                case ServerWord.WAIT:
                    pass
                case ServerWord.MISSING if pushes:
                    self.servers.one(i, "push", pushes[i])
                case ServerWord.MISSING:
                    raise WentBack(version)
                case _:
                    raise WentBack(None)
        return found


def _is_settled(reply: Reply, version: int) -> bool:
    """Whether a server has come to this version, or says that the training is over."""
    return reply.word is ServerWord.OVER or (reply.word is ServerWord.DONE and reply.version == version)


class _Pace(_Way):
    """A trainer of ``Async`` and ``Bounded``: each gradient is sent to all servers at once."""

    def run(self) -> None:
        """Make a step of each batch that no server has a gradient of yet."""
        found: list[Welcome] = self.servers.hello(self.trainer.fingerprint)
        self.servers.sender = replace(self.servers.sender, generation=found[0].generation)
        number = min(w.sequence for w in found) + 1
        batches = self.trainer.batches(number)
        prepared = next(batches, None)
        if prepared is not None:
            self.steps(number, prepared, batches)
        self.servers.all("end", [(self.servers.sender, 0)] * self.servers.count)

    def steps(self, number: int, prepared: Prepared | None, batches: Iterator[Prepared]) -> None:
        """Steps from this one on."""
        replies = self.answered([None] * self.servers.count, self.wanted(prepared))
        while prepared is not None:
            step = self.step(prepared, replies)
            following = next(batches, None)
            wanted = self.wanted(following)
            pushes = self.pushes(number, replies, step)
            applied = self.servers.all("exchange", list(zip(pushes, wanted, strict=True)))
            replies = self.answered(applied, wanted) if following is not None else applied
            self.note(step, number, applied)
            number, prepared = number + 1, following

    def answered(self, replies: Sequence[Reply | None], wanted: Sequence[Any]) -> list[Reply]:
        """The values of all servers, however long the slowest trainer takes."""
        found = []
        for i, (reply, rows) in enumerate(zip(replies, wanted, strict=True)):
            while reply is None or reply.word is ServerWord.WAIT:
                reply = self.servers.one(i, "pull", self.servers.sender, 0, rows)
            found.append(reply)
        return found
