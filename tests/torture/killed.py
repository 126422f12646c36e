"""The trainings that ``kills`` kills: one on trainers and servers, one that writes checkpoints.

The gradient of each batch is 1 in a place of its own, so the parameters count how often each was applied.
Each training is a process, forked from one that has imported everything; it tells what it did through a pipe.
"""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tests.fleet.breaking import tally
from tests.torture.cluster_faults import counting
from tests.torture.soak import network
from tests.torture.training_kills import Slow

import onward as ow
from onward.fleet.engine import Engine
from onward.fleet.faults import Faults

BATCHES = 1200
PLACES = 64  # batches of an epoch of the training that writes checkpoints
EVERY = 4  # steps from checkpoint to checkpoint
LOOK = 0.05  # seconds between two things that a driver says
PAUSE = 0.1  # seconds before each message, so that a training is long enough to be killed
SHORT = 0.002  # seconds before each batch, for the same
FREE = "free"  # the file that ends the pauses
DEADLINE = 60.0  # seconds


class Ordered(Faults):
    """Kills whoever reaches the edge that a file of the folder orders; no trainer is fast before it is free.

    Args:
        folder: of the orders, each named after who and where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def reach(self, who: str, edge: str) -> None:
        if edge == "before send" and not os.path.exists(f"{self.folder}/{FREE}"):
            time.sleep(PAUSE)
        try:
            os.rename(f"{self.folder}/{who} {edge}", f"{self.folder}/{who} {edge} done")
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def errors_into(path: Path) -> None:
    """Have this process write what it says on stderr there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def drive(told: Connection, folder: Path, mode: str, address: str, token: Path) -> None:
    """Train on servers to the end, from the records if there are some."""
    errors_into(folder / "errors")
    with Engine(address, token, prints=False):
        faults = {"faults": Ordered(folder)}
        run = counting(mode, BATCHES, deadline=DEADLINE, folder=folder / "records", settings=faults)
        while run.is_running:
            told.send(sum(run.versions))
            time.sleep(LOOK)
        told.send(tally(run.wait().model))


def write(told: Connection, folder: Path, epochs: int) -> None:
    """Train with checkpoints to the end, from the latest if there is one."""
    errors_into(folder / "errors")
    batches = ow.batches((np.eye(PLACES, dtype=np.float32),), 1, shuffle=True, seed=5)
    ow.train(
        network,
        Slow(batches, SHORT),
        optimizer=ow.SGD(1.0),
        epochs=epochs,
        checkpoints=ow.Checkpoints(folder / "checkpoints", every=EVERY, keep=2),
        resume=True,
        progress=False,
        callbacks=[lambda event: told.send(event.step)],
    )


def tally_of_checkpoint(folder: Path) -> tuple[int, int, int]:
    """The step of the latest checkpoint (0: there is none), and how many batches were lost, and doubled."""
    checkpoints = ow.Checkpoints(folder / "checkpoints")
    if not checkpoints.entries():
        return 0, 0, 0
    found = checkpoints.load()
    times = -np.asarray(found.arrays["count"], np.float64)
    whole, more = divmod(found.step, PLACES)
    lost = max(float(np.maximum(whole - times, 0).sum()), found.step - float(times.sum()))
    doubled = max(float(np.maximum(times - whole - bool(more), 0).sum()), float(times.sum()) - found.step)
    return found.step, int(lost), int(doubled)


def edges_of(who: str) -> list[Any]:
    """Where a process can be told to die."""
    where = {"trainer": ["before send", "after send"]}
    apply = ["before apply", "after apply", "during write", "after write", "before reply"]
    return where.get(who, apply)
