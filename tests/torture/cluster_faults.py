"""Is each gradient applied exactly once, whatever dies and whatever message is lost, with real processes?

    python -m tests.torture.cluster_faults [--kills 2] [--rate 0.1]
    python -m tests.torture.cluster_faults --recovery 5
    python -m tests.torture.cluster_faults --machine

Trainers and servers run on Ray. At every edge of the protocol, in every mode, two of them are killed
``--kills`` times each (SIGKILL, by themselves, in the middle of what they do), and the messages of trainers
are lost before and after they were carried out, doubled, delayed, and delivered again later. Every batch
counts itself on every server, so a gradient that was lost or doubled shows in the parameters. It prints:

    edge x mode: faults injected, lost, doubled
                          sync       async     bounded       local
    before send        4  0  0     4  0  0     4  0  0     4  0  0
    ...
    364 faults injected, 0 gradients lost, 0 doubled (562 s)

``--recovery`` measures the seconds from the death of a server to its next update, ``--machine`` those from
the death of its machine in a Ray cluster of two, both of which are here.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.fleet.breaking import MESSAGES, Breaking, counted, tally

import onward as ow
from onward.fleet.engine import Engine
from onward.fleet.faults import EDGES
from onward.fleet.link import Unreachable

MODES: dict[str, Any] = {
    "sync": ow.cluster.Sync(),
    "async": ow.cluster.Async(),
    "bounded": ow.cluster.Bounded(2),
    "local": ow.cluster.Local(2, ow.SGD(1.0)),
}
WAIT = 240.0  # seconds; a process takes some to start, and there is one start after each kill
BATCHES = 24
LONG = 400


def counting(mode: str, batches: int, reader: Any = None, **options: Any) -> Any:
    """A training that counts how often each batch is applied, with two servers and two trainers."""
    program, parameters, read = counted(batches)
    counts = {"parameters": parameters, "mode": MODES[mode], "merge": ow.Sum()}
    sizes = {"trainers": 2, "servers": 2, "restarts": 1000}
    return ow.cluster.start(program, reader or read, **counts, **{**sizes, **options})


def run(mode: str, faults: Breaking, batches: int) -> Any:
    """A training to its end, whatever happens in it."""
    started = counting(mode, batches, settings={"faults": faults})
    try:
        return started.wait(WAIT)
    finally:
        started.stop()


def cell(mode: str, edge: str, kills: int, folder: Path) -> tuple[int, int, int]:
    """How many faults were injected at an edge in a mode, and what was lost and doubled."""
    who = "trainer" if edge.endswith("send") else "server"
    times = [2 + 2 * n for n in range(kills)]
    faults = Breaking(folder / f"{mode} {edge}", [(f"{who} {i}", edge, n) for i in (0, 1) for n in times])
    ended = run(mode, faults, BATCHES)
    return faults.injected.total(), *tally(ended.model)


def messages(mode: str, rate: float, folder: Path) -> tuple[int, int, int]:
    """The same for messages of all kinds."""
    faults = Breaking(folder / f"{mode} messages", rates=dict.fromkeys(MESSAGES, rate))
    ended = run(mode, faults, 2 * BATCHES)
    return faults.injected.total(), *tally(ended.model)


def table(kills: int, rate: float, folder: Path) -> Iterator[tuple[int, int, int]]:
    """Every cell, printed row by row."""
    print("edge x mode: faults injected, lost, doubled")
    print(" " * 14 + "".join(f"{mode:>12}" for mode in MODES))
    for edge in (*EDGES, "messages"):
        print(f"{edge:<14}", end="", flush=True)
        for mode in MODES:
            found = messages(mode, rate, folder) if edge == "messages" else cell(mode, edge, kills, folder)
            print(f"{found[0]:>6}{found[1]:>3}{found[2]:>3}", end="", flush=True)
            yield found
        print(flush=True)


# ---------------------------------------------------------------------------- how long it takes


def slowly(trainer: int, trainers: int) -> Iterator[Any]:
    for n in range(trainer, LONG, trainers):
        time.sleep(0.05)
        yield np.eye(LONG, dtype=np.float32)[[n]]


def begun(**options: Any) -> Any:
    started = counting("sync", LONG, slowly, **options)
    while started.is_running and min(started.versions) < 3:
        time.sleep(0.05)
    if not started.is_running:
        started.wait()
    return started


def next_update(started: Any, before: Any) -> float:
    """When a server that was killed has made an update again."""
    link = started.supervisor.servers[0].link
    while True:
        try:
            status = link.call("status").result(60.0)
            if status.birth != before.birth and status.version > before.version:
                return time.monotonic()
        except Unreachable:
            pass
        time.sleep(0.01)


def after_a_process(count: int) -> list[float]:
    """Seconds from the death of a server to its next update."""
    with Engine(memory=300 * 2**20):
        started = begun(servers=1)
        found = []
        for _ in range(count):
            before = started.supervisor.servers[0].link.call("status").result(60.0)
            killed = time.monotonic()
            os.kill(before.pid, signal.SIGKILL)
            found.append(next_update(started, before) - killed)
            time.sleep(1.0)
        started.stop()
    return found


def after_a_node() -> float:
    """Seconds from the death of a machine to the next update of its server on another."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - it starts processes of its own
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    alone = {"object_store_memory": 200 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **alone})
    try:
        node = cluster.add_node(num_cpus=1, **alone)
        cluster.wait_for_nodes()
        there = NodeAffinitySchedulingStrategy(node.node_id, soft=True)
        with tempfile.TemporaryDirectory() as folder:
            options = {"scheduling_strategy": there}
            started = begun(servers=1, address=cluster.address, folder=folder, server_options=options)
            before = started.supervisor.servers[0].link.call("status").result(60.0)
            killed = time.monotonic()
            cluster.remove_node(node, allow_graceful=False)
            found = next_update(started, before) - killed
            started.stop()
        return found
    finally:
        cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=2, help="of each of two processes, per edge and mode")
    parser.add_argument("--rate", type=float, default=0.1, help="how likely each kind of broken message is")
    parser.add_argument("--recovery", type=int, default=0, help="measure this many kills instead")
    parser.add_argument("--machine", action="store_true", help="measure the death of a machine instead")
    chosen = parser.parse_args()
    if chosen.recovery:
        found = after_a_process(chosen.recovery)
        told = " ".join(f"{x:.1f}" for x in found)
        print(f"a server is killed: next update after {told} s, median {statistics.median(found):.1f} s")
        return
    if chosen.machine:
        print(f"a server's machine is killed: next update after {after_a_node():.1f} s")
        return
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Engine(memory=300 * 2**20):
        cells = list(table(chosen.kills, chosen.rate, Path(folder)))
    injected, lost, doubled = map(sum, zip(*cells, strict=True))
    print(f"{injected} faults injected, {lost} gradients lost, {doubled} doubled", end=" ")
    print(f"({time.monotonic() - begin:.0f} s)")
    raise SystemExit(bool(lost or doubled))


if __name__ == "__main__":
    main()
