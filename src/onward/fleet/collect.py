"""The values of all servers, put together as one device has them: in rounds, all of one version."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic, sleep
from typing import Any

import numpy as np

from onward.core.errors import ClusterError
from onward.distribute.split.shards import Shard
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

    def read(self) -> dict[str, Any]:
        """Collect the values of all servers by name; in rounds, all of one version."""
        replies = self._all_pulled()
        if self.settings.durability.every is None:
            for i in range(len(replies)):
                self.supervisor.heard_of_server(i, self.call(i, "status"))
        pieces: dict[str, list[tuple[Shard, np.ndarray]]] = {}
        found: dict[str, Any] = {}
        for i, reply in enumerate(replies):
            part, values = self.cut.server_parts[i], reply.values
            assert values is not None
            by_name = {v.name: x for v, x in zip(part.given, values.arrays, strict=True)} | dict(values.rows)
            for shard in self.cut.shards[i]:
                pieces.setdefault(shard.parameter.name, []).append((shard, by_name[str(shard)]))
            found |= {v.name: by_name[v.name] for v in self.cut.carried} if i == 0 else {}
        for name, parts in pieces.items():
            ordered = [x for _, x in sorted(parts, key=lambda part: part[0].begin)]
            found[name] = ordered[0] if len(ordered) == 1 else np.concatenate(ordered)
        return {v.name: as_typed(found[v.name], v) for v in self.layout.variables if v.name in found}

    def _all_pulled(self) -> list[Reply]:
        """Pull the values of all servers; pull again if one of them went back meanwhile."""
        end = monotonic() + self.settings.patience
        while monotonic() < end:
            try:
                first: ServerStatus = self.call(0, "hold", _HOLD)
                replies = [self._pulled(0, first, end, Told())]
                others = range(1, self.settings.servers)
                replies += [self._pulled(i, first, end, replies[0].told) for i in others]
            finally:
                with suppress(ClusterError):
                    self.call(0, "hold", 0.0)
            versions = {r.version for r in replies} if in_rounds(self.settings.mode) else {first.version}
            if all(r.word is ServerWord.DONE for r in replies) and versions == {first.version}:
                return replies
            sleep(PAUSE)
        raise ClusterError(f"The servers did not come to one version within {self.settings.patience:g} s.")

    def _pulled(self, i: int, first: ServerStatus, end: float, told: Told) -> Reply:
        """Pull the values of one server, tables whole, at the version of the first."""
        wanted = {v.name: np.arange(v.shape[0]) for v in self.cut.server_parts[i].tables}
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
