"""Does training stay exact for as long as one likes, whatever is killed, stopped or damaged meanwhile?

    python -m tests.torture.soak [--minutes 30] [--kind cluster --kind trainer] [--seed 0]

One training after the other, each to its end: with trainers and parameter servers, in every mode in turn, and
with a Trainer and checkpoints. Meanwhile a random fault every few seconds: SIGKILL of a server, a trainer or
the driver, SIGTERM of the driver, SIGSTOP of one of them for some seconds. And the driver is killed, one bit
of the newest file is flipped, and it is started again: it refuses the file by name (or takes an older
checkpoint, and says so), or the bit was one that says nothing. Then the bit is put back. The gradient of
each batch is 1 in a place of its own, so the parameters at the end count how often each was applied. It tells
each fault and each end, and then:

    cluster: 12 trainings, 36000 steps; 140 faults: 31 kill server, 29 kill trainer, 20 kill driver, ...
    cluster: 0 lost, 0 doubled; bits: 14 refused by name, 2 said nothing; 0 ended otherwise, 0 starts ...

Each child is ended when its time is up; nothing outlives the script.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tests.fleet.breaking import tally
from tests.torture.cluster_faults import MODES, counting
from tests.torture.training_kills import Slow

import onward as ow
from onward.fleet.engine import Engine

ROOT = Path(__file__).parents[2]
BATCHES = {"cluster": int(os.environ.get("SOAK_BATCHES", "4000")), "trainer": 64}
EPOCHS = {"cluster": 1, "trainer": 15}
PAUSE = 0.005  # seconds between two batches, so that a training is long enough to be hurt
SILENCE = 6.0  # seconds after which a server or trainer that is stopped is replaced
LONGEST = 400.0  # seconds that a child may take between two things that it says
ANYONE = ["kill server", "kill trainer", "stop server", "stop trainer"]
DRIVER = ["kill driver", "SIGTERM driver", "flip"]
FAULTS = {"cluster": [*ANYONE * 3, *DRIVER], "trainer": [*DRIVER, "stop driver"]}
SLOW = "Its processes were too slow"  # what Ray's start says on a machine with too much to do
NAMED = ("CheckpointError", "ClusterError", "is damaged")


# ---------------------------------------------------------------------------- the children


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def slowly(batches: int, trainer: int, trainers: int) -> Iterator[Any]:
    """The batches of one trainer."""
    for n in range(trainer, batches, trainers):
        time.sleep(PAUSE)
        yield np.eye(1, batches, n, dtype=np.float32)


def train_on_servers(folder: str, mode: str) -> None:
    """Train to the end, from the records if there are some; says who works for it."""
    batches = BATCHES["cluster"]
    with Engine(memory=200 * 2**20):
        run = counting(mode, batches, functools.partial(slowly, batches), deadline=SILENCE, folder=folder)
        while run.is_running:
            working = {"server": [s.pid for s in run.servers], "trainer": [t.pid for t in run.trainers]}
            say(pids=working, steps=sum(run.versions))
            time.sleep(0.3)
        lost, doubled = tally(run.wait().model)
        say(lost=lost, doubled=doubled, steps=batches)  # before Ray ends, with which SIGTERM is what it was


def network() -> Any:
    """A number for each batch, from which 1 is taken when the batch is applied."""
    count = ow.parameter("count", (BATCHES["trainer"],), initializer=ow.initializer.constant(0.0))
    return jnp.sum(ow.data("x", (None, BATCHES["trainer"])) @ count)


def train_here(folder: str) -> None:
    """Train to the end, from the latest checkpoint if there is one."""
    epochs = EPOCHS["trainer"]
    batches = ow.batches((np.eye(BATCHES["trainer"], dtype=np.float32),), 1, shuffle=True, seed=5)
    trainer = ow.train(
        network,
        Slow(batches, PAUSE),
        optimizer=ow.SGD(1.0),
        epochs=epochs,
        checkpoints=ow.Checkpoints(folder, every=20, keep=2),
        resume=True,
        progress=False,
        callbacks=[lambda event: say(pids={}, steps=event.step) if event.step % 10 == 0 else None],
    )
    times = -np.asarray(trainer.model["count"], np.float64)
    lost, doubled = (int(np.maximum(x, 0).sum()) for x in (epochs - times, times - epochs))
    say(lost=lost, doubled=doubled, steps=trainer.step)


# ---------------------------------------------------------------------------- the faults


class Child:
    """A training in a process, and what it said last."""

    def __init__(self, kind: str, folder: Path, mode: str) -> None:
        command = [sys.executable, "-m", "tests.torture.soak", "--child", kind, str(folder), mode]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the process has ended
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=ROOT
        )
        self.told: dict[str, Any] = {}
        self.counted = set[int]()
        self.heard, self.seen = time.monotonic(), set[int]()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(json.JSONDecodeError):
                self.told, self.heard = json.loads(line), time.monotonic()
                self.counted.add(self.told["steps"])
                self.seen |= {pid for pids in self.told.get("pids", {}).values() for pid in pids}

    @property
    def runs(self) -> bool:
        if time.monotonic() - self.heard > LONGEST:
            print(f"a child said nothing for {LONGEST:g} s: {self.told}; it is ended", flush=True)
            self.process.kill()
        return self.process.poll() is None

    def wait_for_steps(self, more_than: int) -> None:
        """Until it has made more steps than so many, or has ended."""
        end = time.monotonic() + LONGEST
        while self.runs and self.steps <= more_than:
            if time.monotonic() > end:
                print(f"a child made no step for {LONGEST:g} s: {self.told}", flush=True)
                return
            time.sleep(0.05)

    def wait_for_start(self) -> None:
        """Until it has said something, or has ended."""
        while self.runs and len(self.counted) < 2:
            time.sleep(0.05)

    @property
    def steps(self) -> int:
        """How many steps it has told of."""
        return int(self.told.get("steps", 0))

    def end(self, number: int | None = None) -> str:
        """Wait until it and all who worked for it have ended; what it said on the way."""
        if number is not None:
            self.process.send_signal(number)
        while self.runs:
            time.sleep(0.05)
        self._reading.join(5.0)
        until = time.monotonic() + 30.0
        while any(map(is_alive, self.seen)) and time.monotonic() < until:
            time.sleep(0.1)
        self.errors.seek(0)
        return self.errors.read()


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class Soak:
    """Trainings of one kind, and what was done to them."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.random = kind, random.Random(f"{kind} {seed}")
        self.faults, self.found, self.bits = Counter[str](), Counter[str](), Counter[str]()
        self.odd: list[str] = []

    def train(self, until: float) -> None:
        """One training to its end."""
        mode = list(MODES)[self.found["trainings"] % len(MODES)]
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place, "training")
            child, most, is_new = Child(self.kind, folder, mode), 0, True
            while True:
                if is_new or self.random.random() < 0.5:  # else more is done to it before it has recovered
                    child.wait_for_steps(most)
                most, is_new = max(most, child.steps), False
                pause = time.monotonic() + self.random.uniform(0.5, 3.0)
                while child.runs and time.monotonic() < pause:
                    time.sleep(0.05)
                if not child.runs:
                    errors = child.end()
                    if "lost" in child.told:
                        break
                    self.note_end(mode, child, errors)
                elif (time.monotonic() < until and self.hurt(child, folder, mode)) or child.runs:
                    continue
                child, is_new = Child(self.kind, folder, mode), True
        self.found.update(trainings=1, **{name: child.told[name] for name in ("lost", "doubled", "steps")})
        print(
            f"{time.strftime('%H:%M:%S')} {self.kind} {mode}: {child.told}, {self.faults.total()} faults",
            flush=True,
        )

    def note_end(self, mode: str, child: Child, errors: str) -> None:
        """A training that ended by itself, otherwise than at its end."""
        if SLOW in errors:
            self.found["slow"] += 1
            return
        self.odd.append(errors[-2000:])
        print(
            f"{mode} ended with {child.process.returncode}, otherwise than told:\n{errors[-2000:]}",
            flush=True,
        )
        if len(self.odd) > 20:
            raise SystemExit("too many trainings end by themselves")

    def hurt(self, child: Child, folder: Path, mode: str) -> bool:
        """Do something to a training; whether it goes on by itself."""
        fault = self.random.choice(FAULTS[self.kind])
        how, _, who = fault.partition(" ")
        pids = [child.process.pid] if who in ("driver", "") else child.told.get("pids", {}).get(who, [])
        if not (pids := [pid for pid in pids if is_alive(pid)]):
            return True
        self.faults[fault] += 1
        print(
            f"{time.strftime('%H:%M:%S')} {self.kind} {mode}: {fault}, {child.steps} steps",
            flush=True,
        )
        pid = self.random.choice(pids)
        if how == "stop":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.random.uniform(0.5, 1.5 * SILENCE))
            with suppress(ProcessLookupError):  # it was ended meanwhile
                os.kill(pid, signal.SIGCONT)
            return True
        if who != "driver" and how == "kill":
            os.kill(pid, signal.SIGKILL)
            return True
        errors = child.end(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
        if how == "SIGTERM" and child.process.returncode != 143 and "lost" not in child.told:
            self.note_end(f"{mode}, after SIGTERM", child, errors)
        if how == "flip":
            self.flip(folder, mode)
        return False

    def flip(self, folder: Path, mode: str) -> None:
        """Start it with one bit of its newest file flipped, and put the bit back."""
        files = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size and _is_data(p)]
        if not files:
            return
        path = max(files, key=lambda p: p.stat().st_mtime_ns)
        at, bit = self.random.randrange(path.stat().st_size), 1 << self.random.randrange(8)
        _flip(path, at, bit)
        child = Child(self.kind, folder, mode)
        child.wait_for_start()
        was_running = child.runs
        errors = child.end(signal.SIGKILL if was_running else None)
        named = path.name in errors or path.parent.name in errors
        if named and any(word in errors for word in NAMED):
            self.bits["refused by name"] += 1
        elif was_running or "lost" in child.told:
            self.bits["said nothing"] += 1
        else:
            self.note_end(f"{mode}, after a flipped bit of {path}", child, errors)
        if not was_running and path.exists():
            _flip(path, at, bit)

    def told(self) -> str:
        counts = ", ".join(f"{count} {fault}" for fault, count in self.faults.most_common())
        bits = ", ".join(f"{count} {what}" for what, count in sorted(self.bits.items())) or "none"
        found = self.found
        return (
            f"{self.kind}: {found['trainings']} trainings, {found['steps']} steps; "
            f"{self.faults.total()} faults: {counts}\n"
            f"{self.kind}: {found['lost']} lost, {found['doubled']} doubled; bits: {bits}; "
            f"{len(self.odd)} ended otherwise, {found['slow']} starts of Ray given up by name"
        )


def _is_data(path: Path) -> bool:
    return (
        path.suffix in (".log", ".npz", ".bin", ".data")
        or path.name.startswith("record-")
        or "step" in str(path)
    )


def _flip(path: Path, at: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kind", action="append", choices=[*FAULTS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=3)
    chosen = parser.parse_args()
    if chosen.child:
        kind, folder, mode = chosen.child
        return train_on_servers(folder, mode) if kind == "cluster" else train_here(folder)
    until = time.monotonic() + 60.0 * chosen.minutes
    soaks = [Soak(kind, chosen.seed) for kind in chosen.kind or FAULTS]
    while time.monotonic() < until:
        for soak in soaks:
            soak.train(until)
    for soak in soaks:
        print(soak.told())
    raise SystemExit(any(soak.found["lost"] or soak.found["doubled"] or soak.odd for soak in soaks))


if __name__ == "__main__":
    main()
