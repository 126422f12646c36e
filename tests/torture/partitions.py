"""Is each gradient applied exactly once if a machine is cut off in the middle of a step, and comes back?

    python -m tests.torture.partitions [--partitions 24] [--seed 0]

Two machines of a Ray cluster, with servers and trainers on both: network namespaces of this one, which a
cable joins. In each training somebody of the second machine stops at an edge of the protocol, and at once the
machine is cut off: no packet arrives, or none of its own do, or all of its processes stand still. When others
have taken the places of its server and its trainer, those wake up, before the cable is mended or after it:
they finish what they had begun, and find who they are no more. It prints:

    both ways  sync     after write   1 servers ended by name, 0 answers refused; 0 lost, 0 doubled, 24 rows
    ...
    24 partitions: 0 lost, 0 doubled; 24 servers and 24 trainers replaced, 24 servers ended by name, 9 ...

All processes are in namespaces that end with this one. It needs ``unshare``, ``nsenter`` and ``ip``. The rows
are those of the history: of what the first server's machine did last, some are lost with it. With local
steps there are two batches in each.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray import available_resources
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tests.fleet.breaking import Breaking, counted, tally
from tests.fleet.two_machines import ADDRESS, CUTS, Machines, alone, until
from tests.torture.cluster_faults import MODES

import onward as ow
from onward.fleet.engine import Engine
from onward.fleet.faults import EDGES
from onward.fleet.link import Unreachable
from onward.fleet.messages import Reply, ServerWord

BATCHES = 24
PAUSE = 0.05  # seconds before each batch
WAIT = 120.0  # seconds that anything may take
TAKEN = re.compile(r"Server \d+ of epoch [\d.]+ \(pid (\d+)\) ends: its place was taken")
REFUSED = {ServerWord.SUPERSEDED, ServerWord.STALE}


class Cut(Breaking):
    """Stops the process of the other machine that reaches an edge for the n-th time; counts what is refused.

    Args:
        folder: where it counts, which both machines see.
        edge: where; "" stops nobody.
        n: at which time.
    """

    def __init__(self, folder: Path, edge: str, n: int) -> None:
        super().__init__(folder)
        self.edge, self.n = edge, n

    def reach(self, who: str, edge: str) -> None:
        if edge == self.edge and socket.gethostname() == "there" and self.count("reached") == self.n:
            self.note(f"{who} stops")
            os.kill(os.getpid(), signal.SIGSTOP)

    def link(self, who: str, link: Any) -> Noting:
        return Noting(self, link)


@dataclass
class Noting:
    """A link that notes which answers are refused."""

    faults: Cut
    link: Any

    def call(self, method: str, *arguments: Any) -> Noted:
        return Noted(self.faults, self.link.call(method, *arguments))


@dataclass
class Noted:
    """A call of such a link."""

    faults: Cut
    pending: Any

    def result(self, timeout: float | None = None) -> Any:
        try:
            reply = self.pending.result(timeout)
        except Unreachable as error:
            if "its place was taken" in str(error):
                self.faults.note("refused")
            raise
        if isinstance(reply, Reply) and reply.word in REFUSED:
            self.faults.note("refused")
        return reply

    def done(self) -> bool:
        return bool(self.pending.done())


class Placed(Engine):
    """Hosts whoever has number 0 on one machine and number 1 on the other, as long as there are two."""

    group: Any = None

    def spread(self) -> None:
        """Have a place on each machine; where one dies, Ray moves its place to the other."""
        if self.group is not None:
            remove_placement_group(self.group)
        until(lambda: available_resources().get("CPU") == 4, WAIT, "the places of before are not free")
        self.group = placement_group([{"CPU": 1}] * 2, strategy="SPREAD")
        assert self.group.wait(WAIT)

    def spawn(self, factory: Any, *arguments: Any, name: str, **how: Any) -> Any:
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=int(name[-1]))
        how["options"] = {**(how.get("options") or {}), "scheduling_strategy": place}
        return super().spawn(factory, *arguments, name=name, **how)


def slowly(trainer: int, trainers: int) -> Iterator[Any]:
    """The batches of one trainer."""
    for n in range(trainer, BATCHES, trainers):
        time.sleep(PAUSE)
        yield np.eye(1, BATCHES, n, dtype=np.float32)


@dataclass(frozen=True)
class Outcome:
    """What became of one training."""

    lost: int
    doubled: int
    servers: int
    trainers: int
    named: int
    refused: int
    rows: int


def partition(
    machines: Machines, engine: Placed, how: str, mode: str, edge: str, chance: random.Random, folder: Path
) -> Outcome:
    """One training, in which the other machine is cut off and comes back."""
    machines.join()
    until(lambda: machines.rejoin() or engine.machines == 2, WAIT, "the other machine is not in the cluster")
    engine.spread()
    faults = Cut(folder / "faults", edge, chance.randint(4, 7))
    run = started(engine, mode, faults, folder / "records", chance.choice([10.0, 60.0]))
    try:
        servers, trainers = on_the_other(run)
        reached = (lambda: faults.injected) if edge else (lambda: max(run.versions) > 3)
        until(reached, WAIT, f"nobody reached {edge!r} there")
        machines.cut(how)
        until(lambda: are_replaced(run, servers, trainers), WAIT, f"nobody took the places: {run.events}")
        for step in chance.sample([machines.wake, functools.partial(machines.mend, how)], 2):
            step()
            time.sleep(chance.uniform(0, 1))
        run.wait(WAIT)
        named = {int(found[1]) for line in machines.said() if (found := TAKEN.search(line))}
        named &= set(servers.values())
        until(lambda: all(map(is_gone, servers.values())), WAIT, "a server outlives its place")
    finally:
        run.stop()
    rows = len(run.history["loss"])
    refused = faults.injected["refused"]
    return Outcome(*tally(run.model), len(servers), len(trainers), len(named), refused, rows)


def started(engine: Engine, mode: str, faults: Cut, folder: Path, deadline: float) -> Any:
    """The training, with a server and a trainer on each machine."""
    program, parameters, _ = counted(BATCHES)
    return ow.cluster.start(
        program,
        slowly,
        parameters=parameters,
        mode=MODES[mode],
        merge=ow.Sum(),
        trainers=2,
        servers=2,
        restarts=20,
        deadline=deadline,
        folder=folder,
        engine=engine,
        settings={"faults": faults},
    )


def on_the_other(run: Any) -> tuple[dict[int, int], dict[int, int]]:
    """The servers and the trainers of the other machine, each with its process."""
    everyone = 2 + 2
    until(lambda: len(run.servers) + len(run.trainers) == everyone, WAIT, f"not all work: {run.events}")
    servers = {s.index: s.pid for s in run.servers if s.host == "there"}
    trainers = {t.trainer: t.pid for t in run.trainers if t.host == "there"}
    assert len(servers) == len(trainers) == 1, f"there are {servers}, {trainers}: {run.events}"
    return servers, trainers


def are_replaced(run: Any, servers: dict[int, int], trainers: dict[int, int]) -> bool:
    """Whether all of the other machine have a successor."""
    lost = [rf"Server {i} was lost; pid \d+ took its place" for i in servers]
    lost += [rf"Trainer {t} .*; another process takes its place" for t in trainers]
    return not run.is_running or all(any(re.match(one, event) for event in run.events) for one in lost)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def partitions(count: int, seed: int, first: tuple[str, ...]) -> Iterator[Outcome]:
    """So many trainings, each printed; ``first`` is how, mode and edge of the first one."""
    chance = random.Random(seed)
    edges = [*EDGES, ""] * count
    chance.shuffle(edges)
    with tempfile.TemporaryDirectory(prefix="onward-", dir="/tmp") as folder, Machines(folder) as machines:
        until(lambda: listens(ADDRESS), WAIT, "Ray does not start")
        with Placed(ADDRESS, prints=False) as engine:
            for n in range(count):
                chosen = CUTS[n % len(CUTS)], list(MODES)[n % len(MODES)], edges[n]
                how, mode, edge = first if first and n == 0 else chosen
                found = partition(machines, engine, how, mode, edge, chance, Path(folder, str(n)))
                told = f"{found.named} servers ended by name, {found.refused} answers refused"
                print(f"{how:<10} {mode:<8} {edge or 'anywhere':<13} {told}; {tallied(found)}", flush=True)
                yield found


def tallied(found: Outcome) -> str:
    return f"{found.lost} lost, {found.doubled} doubled, {found.rows} rows"


def listens(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except OSError:
        return False
    return True


def run_here(count: int, seed: int, first: tuple[str, ...]) -> int:
    """All of it, and the status to end with."""
    begun = time.monotonic()
    found = list(partitions(count, seed, first))
    lost, doubled, servers, trainers, named, refused = (
        sum(getattr(one, name) for one in found)
        for name in ("lost", "doubled", "servers", "trainers", "named", "refused")
    )
    print(
        f"{count} partitions: {lost} lost, {doubled} doubled; {servers} servers and {trainers} trainers "
        f"replaced, {named} servers ended by name, {refused} answers refused "
        f"({time.monotonic() - begun:.0f} s)"
    )
    return int(bool(lost or doubled))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--partitions", type=int, default=24, help="how many trainings")
    parser.add_argument("--seed", type=int, default=0, help="of edges and pauses")
    parser.add_argument("--first", nargs=3, default=(), help="how, mode and edge of the first one")
    parser.add_argument("--inside", action="store_true", help="it has its own namespaces already")
    chosen = parser.parse_args()
    if chosen.inside:
        raise SystemExit(run_here(chosen.partitions, chosen.seed, tuple(chosen.first)))
    command = [*alone(), sys.executable, "-m", "tests.torture.partitions", "--inside", *sys.argv[1:]]
    os.execvp(command[0], command)  # so that all end when this process is ended


if __name__ == "__main__":
    main()
