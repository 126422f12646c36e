"""A parameter server: the object that trainers call, whatever carries the calls.

Each method runs alone between two ``await``. Every answer comes within a few seconds: who has to wait longer
is told to ask again.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

from onward.distribute.split.joined import Seen
from onward.fleet.desk import Desk, ServerSpec, Wanted
from onward.fleet.faults import BETWEEN
from onward.fleet.messages import Push, Reply, Sender, ServerStatus, ServerWord, Told, Welcome
from onward.fleet.modes import Bounded, in_rounds

NOTHING = Told()


class RoundServer:
    """A server of ``Sync`` and ``Local``: one update merges one gradient of each trainer.

    A trainer stages its gradient on all other servers before it gives it to the first one. When that one has
    all, all servers have all, and the round is decided: the first makes it at once, the others when they are
    asked for the version after it. So a round is made by all or by none, whichever process dies.

    Where a rule needs sums over the gradients of all servers, the first one makes a decided round once a
    trainer has told it what the others add to these sums; it keeps them with what it made, and tells them to
    all trainers, for the others. What a server adds follows from what is staged there, which stays as it is
    once the round is decided, so it may be asked, and told, any number of times.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self.desk = Desk(spec)
        self.spec = spec
        self.staged: dict[int, Push] = {}
        self.told = Told()
        self.over = False
        self.held_until = 0.0

    async def hello(self, sender: Sender, fingerprint: str) -> Welcome:
        """Take a trainer in; tells whether its gradient of this round is here already."""
        self.desk.greet(sender, fingerprint)
        keeper = self.desk.keeper
        _, sequence = keeper.last(sender.trainer)
        return Welcome(
            keeper.version, keeper.generation, sequence, sender.trainer in self.staged, self.desk.epoch
        )

    async def push(self, push: Push) -> Reply:
        """Stage a gradient; what was staged or applied before is recognised."""
        if objection := self.desk.objection(push.sender):
            return objection
        version = self.desk.keeper.version
        if push.sequence > version:
            return self.desk.say(ServerWord.BEHIND)
        if push.sequence < version or (push.sender.trainer in self.staged and not self._is_newer(push)):
            self.desk.duplicates += 1
            return self.desk.say(ServerWord.DONE)
        self.desk.taken(push)
        self.staged[push.sender.trainer], self.told = push, Told()
        if self.spec.index == 0:
            await self._decide()
        return self.desk.say(ServerWord.DONE)

    async def pull(self, sender: Sender, version: int, wanted: Wanted, told: Told = NOTHING) -> Reply:
        """Give the values of this version, once the first server has decided it or another has made it."""
        if objection := self.desk.objection(sender):
            return objection
        keeper = self.desk.keeper
        if version > keeper.version + 1:
            return self.desk.say(ServerWord.BEHIND)
        if version == keeper.version + 1 and not self.over:
            if sender.trainer not in self.staged and sender.trainer >= 0:
                return self.desk.say(ServerWord.MISSING)
            await self._hear(told)
        generation = keeper.generation
        await self.desk.until(
            lambda: (
                keeper.version >= version or self.over or keeper.generation != generation or self._lacks_parts
            )
        )
        if objection := self.desk.objection(sender):
            return objection
        if keeper.version >= version:
            return self.desk.say(ServerWord.DONE, wanted)
        if self._lacks_parts:
            return self.desk.say(ServerWord.PARTS)
        return self.desk.say(ServerWord.OVER if self.over else ServerWord.WAIT)

    async def exchange(self, push: Push, wanted: Wanted, told: Told = NOTHING) -> Reply:
        """Stage a gradient, and get the version that follows."""
        reply = await self.push(push)
        if reply.word is not ServerWord.DONE:
            return reply
        return await self.pull(push.sender, push.sequence + 1, wanted, told)

    async def measure(self, sender: Sender, version: int) -> Reply:
        """Give this server's part of the sums that this version's update needs; nothing if that is made."""
        if objection := self.desk.objection(sender):
            return objection
        keeper = self.desk.keeper
        if version > keeper.version:
            return self.desk.say(ServerWord.BEHIND)
        if version == keeper.version and sender.trainer not in self.staged:
            return self.desk.say(ServerWord.MISSING)
        generation = keeper.generation
        await self.desk.until(
            lambda: self._is_complete or keeper.version > version or keeper.generation != generation
        )
        if objection := self.desk.objection(sender):
            return objection
        if keeper.version > version:
            return self.desk.say(ServerWord.DONE)
        if not self._is_complete:
            return self.desk.say(ServerWord.WAIT)
        return self.desk.say(ServerWord.DONE, told=self._part())

    async def end(self, sender: Sender, version: int) -> Reply:
        """Write what it has, before a trainer ends that could not send it again."""
        if objection := self.desk.objection(sender):
            return objection
        if self.desk.keeper.version != version:
            return self.desk.say(ServerWord.BEHIND)
        self.desk.keeper.flush()
        return self.desk.say(ServerWord.DONE)

    async def finish(self, trainers: list[int]) -> None:
        """These trainers were told that all is over, perhaps by a process whose place this one has taken."""
        self.over = True
        await self.desk.tell()

    async def hold(self, seconds: float) -> ServerStatus:
        """Decide no further round for so long (0: no longer), and tell where it stands."""
        self.held_until = monotonic() + seconds if seconds else 0.0
        return await self.status()

    async def versions(self) -> tuple[int, ...]:
        """The versions that the server could go back to."""
        return self.desk.keeper.versions

    async def go_back(self, version: int, generation: int) -> None:
        """Forget everything after this version."""
        if generation <= self.desk.keeper.generation:  # an old message
            return
        self.desk.keeper.go_back(version, generation)
        self.staged, self.told, self.over = {}, Told(), False
        await self.desk.tell()

    async def status(self, seen: int = 0, birth: str = "") -> ServerStatus:
        """How it is doing, and with ``birth`` the steps from ``seen`` on."""
        await self._decide()
        return self.desk.status(len(self.staged), seen, birth)

    async def check(self, fingerprint: str) -> tuple[int, int, str]:
        """Raise ``ClusterError`` for another graph; tell generation, newest incarnation and birth."""
        return self.desk.checked(fingerprint)

    def ending(self) -> str | None:
        """Why its process has to end; None while it may stay."""
        return self.desk.ending()

    @property
    def _is_complete(self) -> bool:
        return len(self.staged) == self.spec.trainers

    @property
    def _starts(self) -> tuple[int, ...]:
        """Which start of each trainer sent what is staged."""
        return tuple(p.sender.incarnation for _, p in sorted(self.staged.items()))

    @property
    def _lacks_parts(self) -> bool:
        """Whether the round is decided, and only what the others add to sums is missing."""
        if self.spec.index or self.desk.keeper.holding.knows(self.told.arrays):
            return False
        has_batch = any(p.gradients is not None for p in self.staged.values())
        return self._is_complete and has_batch and not self.over and monotonic() >= self.held_until

    def _is_newer(self, push: Push) -> bool:
        """Whether it comes from a later start of the trainer than what is staged."""
        return push.sender.incarnation > self.staged[push.sender.trainer].sender.incarnation

    async def _decide(self) -> None:
        """On the first server: make the round, if all is there."""
        if self.spec.index == 0 and self._is_complete and monotonic() >= self.held_until and not self.over:
            if all(p.gradients is None for p in self.staged.values()):
                self.desk.keeper.flush()
                self.over = True
                await self.desk.tell()
            elif self._lacks_parts:
                await self.desk.tell()
            else:
                await self._make()

    async def _hear(self, told: Told) -> None:
        """On the first server, take what the others add to sums; on these make the decided round."""
        holding = self.desk.keeper.holding
        if not self._is_complete:
            return
        if self.spec.index:
            self.told = told if holding.part.told else NOTHING
            if holding.knows(self.told.arrays):
                await self._make()
        elif told.of and set(told.of.values()) == {self._starts} and holding.knows(told.arrays):
            self.told = told
            await self._decide()

    def _present(self) -> tuple[list[Push], list[Push | None], list[float]]:
        """The staged pushes, the same with None for those without a gradient, and the share of each."""
        pushes = [self.staged[t] for t in range(self.spec.trainers)]
        return pushes, [p if p.gradients is not None else None for p in pushes], self._shares(pushes)

    def _part(self) -> Told:
        """Compute this server's part of the sums of the round that is decided."""
        _, present, shares = self._present()
        found = self.desk.keeper.measured(present, shares)
        self.spec.faults.reach(f"server {self.spec.index}", BETWEEN)
        return Told({self.spec.index: self._starts}, {self.spec.index: found})

    def _knowing(self, push: Push | None) -> Push | None:
        """A gradient with the sums that this server was told, so that they are logged with it."""
        if push is None or push.gradients is None or not self.told.arrays:
            return push
        known = self.desk.keeper.holding.known(self.told.arrays)
        return replace(push, gradients=replace(push.gradients, shared={**push.gradients.shared, **known}))

    async def _make(self) -> None:
        pushes, present, shares = self._present()
        self.desk.keeper.apply(list(map(self._knowing, present)), shares)
        self.desk.pushes += sum(p is not None for p in present)
        for push in pushes:
            self.desk.note(push)
        self.staged, self.told = {}, Told()
        await self.desk.tell()

    def _shares(self, pushes: list[Push]) -> list[float]:
        weights = [p.weight if p.gradients is not None else 0.0 for p in pushes]
        if self.spec.sums:
            return [float(w > 0) for w in weights]
        total = sum(weights)
        return [w / total if total else 1 / len(weights) for w in weights]


class FreeServer:
    """A server of ``Async`` and ``Bounded``: every gradient is an update at once."""

    def __init__(self, spec: ServerSpec) -> None:
        self.desk = Desk(spec)
        self.spec = spec
        self.bound = spec.mode.staleness if isinstance(spec.mode, Bounded) else None
        self.finished: set[int] = set()

    async def hello(self, sender: Sender, fingerprint: str) -> Welcome:
        """Take a trainer in; tells which of its gradients is the last that was applied."""
        self.desk.greet(sender, fingerprint)
        keeper = self.desk.keeper
        last = keeper.last(sender.trainer)[1]
        return Welcome(keeper.version, keeper.generation, last, False, self.desk.epoch)

    async def exchange(self, push: Push, wanted: Wanted) -> Reply:
        """Apply a gradient, unless it was before; answer when the trainer may begin its next step."""
        if objection := self.desk.objection(push.sender):
            return objection
        keeper, trainer = self.desk.keeper, push.sender.trainer
        lag, staleness = self.lag(trainer, push.sequence), max(0, keeper.version - push.basis)
        seen: Seen = ()
        if push.sequence > keeper.last(trainer)[1]:
            self.desk.taken(push)
            keeper.apply([push], [1.0])
            self.desk.pushes += 1
            self.desk.note(push, staleness, lag)
            seen = keeper.holding.seen()
            await self.desk.tell()
        else:
            self.desk.duplicates += 1
        reply = await self.pull(push.sender, 0, wanted)
        return replace(reply, staleness=staleness, lag=lag, seen=seen)

    async def pull(self, sender: Sender, version: int, wanted: Wanted) -> Reply:
        """Give the values, once the trainer may begin its next step."""
        if objection := self.desk.objection(sender):
            return objection
        if not await self.desk.until(lambda: self.may_begin(sender.trainer)):
            return self.desk.say(ServerWord.WAIT)
        return self.desk.say(ServerWord.DONE, wanted)

    def may_begin(self, trainer: int) -> bool:
        """Whether a trainer is near enough to the slowest."""
        return self.bound is None or self.spec.index != 0 or trainer < 0 or self.lag(trainer) <= self.bound

    def lag(self, trainer: int, made: int | None = None) -> int:
        """How many steps a trainer is ahead of the slowest that has not finished, or was after so many."""
        running = [t for t in range(self.spec.trainers) if t not in self.finished]
        clocks = {t: self.desk.keeper.last(t)[1] + 1 for t in {*running, trainer}}
        if made is not None:
            clocks[trainer] = made
        return clocks[trainer] - min(clocks.values()) if trainer >= 0 else 0

    async def finish(self, trainers: list[int]) -> None:
        """Wait for these trainers no longer, which have no batch any more."""
        self.finished |= set(trainers)
        await self.desk.tell()

    async def end(self, sender: Sender, version: int) -> Reply:
        """Write what it has; wait for this trainer no longer, which has no batch any more."""
        if objection := self.desk.objection(sender):
            return objection
        self.desk.keeper.flush()
        await self.finish([sender.trainer])
        return self.desk.say(ServerWord.DONE)

    async def hold(self, seconds: float) -> ServerStatus:
        """Tell where it stands; nothing is held."""
        return await self.status()

    async def status(self, seen: int = 0, birth: str = "") -> ServerStatus:
        """How it is doing, and with ``birth`` the steps from ``seen`` on."""
        return self.desk.status(0, seen, birth)

    async def check(self, fingerprint: str) -> tuple[int, int, str]:
        """Raise ``ClusterError`` for another graph; tell generation, newest incarnation and birth."""
        return self.desk.checked(fingerprint)

    def ending(self) -> str | None:
        """Why its process has to end; None while it may stay."""
        return self.desk.ending()


Server = RoundServer | FreeServer


def serve(spec: ServerSpec) -> Server:
    """The server of this kind of mode."""
    return RoundServer(spec) if in_rounds(spec.mode) else FreeServer(spec)
