"""The values of all servers, put together as one device has them: in rounds, all of one version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import numpy as np

from onward.core.errors import ClusterError
from onward.core.program import Variable
from onward.distribute.split.trainer import as_typed
from onward.execute.layout import Layout
from onward.fleet.job import ClusterJob
from onward.fleet.link import Unreachable
from onward.fleet.messages import Reply, Sender, ServerStatus, ServerWord, Told
from onward.fleet.modes import in_rounds
from onward.fleet.supervisor import Supervisor

PAUSE = 0.1  # seconds between two questions to a server that is away, or not at one version with others
_HOLD = 30.0  # seconds that a snapshot may hold up the next round


class Collector:
    """Asks servers for what they have; again, while one is away.

    Args:
        job: what is trained.
        layout: of the State that is read.
        supervisor: knows the servers.
        driver: the number of the driver of their folder.
    """

    def __init__(self, job: ClusterJob, layout: Layout, supervisor: Supervisor, driver: int) -> None:
        self.settings, self.cut = job.settings, job.cut
        self.layout, self.supervisor, self.driver = layout, supervisor, driver

    def read(self, slots: Sequence[Variable] = ()) -> dict[str, Any]:
        """Collect the values of all servers by name; in rounds, all of one version.

        Args:
            slots: further state to read, such as averages of parameters, as one device has it.
        """
        held = [self._held(i, slots) for i in range(self.settings.servers)]
        replies = self._all_pulled(held)
        if self.settings.durability.every is None:
            for i in range(len(replies)):
                self.supervisor.heard_of_server(i, self.call(i, "status"))
        pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
        found: dict[str, Any] = {}
        for i, reply in enumerate(replies):
            part, values = self.cut.server_parts[i], reply.values
            assert values is not None
            by_name = {v.name: x for v, x in zip(part.given, values.arrays, strict=True)} | dict(values.rows)
            parameters = {str(shard): (shard.parameter.name, shard.begin) for shard in self.cut.shards[i]}
            for name, (whole, begin) in {**parameters, **held[i]}.items():
                pieces.setdefault(whole, []).append((begin, by_name[name]))
            found |= {v.name: by_name[v.name] for v in self.cut.carried} if i == 0 else {}
        for name, parts in pieces.items():
            ordered = [x for _, x in sorted(parts, key=lambda part: part[0])]
            is_whole = len(ordered) == 1 or not ordered[0].ndim  # a count that each piece has
            found[name] = ordered[0] if is_whole else np.concatenate(ordered)
        wanted = (*self.layout.variables, *slots)
        return {v.name: as_typed(found[v.name], v) for v in wanted if v.name in found}

    def _held(self, i: int, slots: Iterable[Variable]) -> dict[str, tuple[str, int]]:
        """The state of a server that these are made of, with their names and where it begins in them."""
        names = {p.name for p in self.cut.source.parameters}
        found: dict[str, tuple[str, int]] = {}
        for v in slots:
            of = max((name for name in names if v.name.startswith(f"{name}/")), key=len, default="")
            shards = [s for s in self.cut.shards[i] if s.parameter.name == of]
            found |= {f"{s}{v.name.removeprefix(of)}": (v.name, s.begin) for s in shards}
            found |= {v.name: (v.name, 0)} if not of and i == 0 else {}
        return {name: whole for name, whole in found.items() if name in self.cut.server_parts[i].program}

    def _all_pulled(self, held: Sequence[Iterable[str]]) -> list[Reply]:
        """Pull the values of all servers, and this state; again if one of them went back meanwhile."""
        end = monotonic() + self.settings.patience
        while monotonic() < end:
            try:
                first: ServerStatus = self.call(0, "hold", _HOLD)
                replies = [self._pulled(0, held[0], first, end, Told())]
                others = range(1, self.settings.servers)
                replies += [self._pulled(i, held[i], first, end, replies[0].told) for i in others]
            finally:
                with suppress(ClusterError):
                    self.call(0, "hold", 0.0)
            versions = {r.version for r in replies} if in_rounds(self.settings.mode) else {first.version}
            if all(r.word is ServerWord.DONE for r in replies) and versions == {first.version}:
                return replies
            sleep(PAUSE)
        raise ClusterError(f"The servers did not come to one version within {self.settings.patience:g} s.")

    def _pulled(self, i: int, held: Iterable[str], first: ServerStatus, end: float, told: Told) -> Reply:
        """Pull the values of one server, tables and this state whole, at the version of the first."""
        part = self.cut.server_parts[i]
        whole = {v.name: v.shape for v in (*part.tables, *map(part.program.__getitem__, held))}
        wanted: dict[str, Any] = {n: np.arange(shape[0]) if shape else () for n, shape in whole.items()}
        while True:
            asker = Sender(-1, 0, first.generation, self.driver)
            given = (told,) if self.cut.exchanges else ()
            reply: Reply = self.call(i, "pull", asker, first.version, wanted, *given)
            if reply.word is not ServerWord.WAIT or monotonic() > end:
                return reply

    def call(self, i: int, method: str, *arguments: Any) -> Any:
        """Call a server; again, while it is away."""
        end = monotonic() + self.settings.patience
        link = self.supervisor.servers[i].link
        while True:
            try:
                return link.call(method, *arguments).result(max(0.1, end - monotonic()))
            except (Unreachable, TimeoutError) as error:
                if monotonic() > end:
                    raise ClusterError(f"Server {i} did not answer ({method}): {error}") from error
                sleep(PAUSE)
