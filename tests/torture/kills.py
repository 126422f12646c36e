"""Is anything lost or doubled if servers, trainers, drivers and writers of checkpoints are killed 500 times?

    python -m tests.torture.kills [--kills 500] [--seed 0]

A quarter of the kills (SIGKILL) each. Trainings run on one Ray, in every mode in turn, two at a time, on two
servers and two trainers: these die in the middle of what they do, at each edge of the protocol in turn. After
four of them the driver is killed, and the next one as well, while it starts; the one after it goes on from
the records. Beside that a training with checkpoints is killed, every other time in the middle of a save; each
time the latest checkpoint must be whole, and as new as the last one that was certainly on the disk. The
gradient of each batch is 1 in a place of its own, so the parameters count how often each was applied. It
tells what it did on the way, and then:

    kills                        sync  async  bounded  local
    servers                        31     32       31     31
    ...
    writers of checkpoints        125 (62 in the middle of a save)
    500 kills, 10 trainings on servers: 0 lost, 0 doubled, 0 ended otherwise (4800 s)
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, product
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import ray
from tests.torture import killed
from tests.torture.cluster_faults import MODES

from onward.fleet.engine import Engine

KINDS = ("servers", "trainers", "drivers")
LONGEST = 240.0  # seconds that anything may take
LANES = 2  # trainings on servers at a time
LIVES = 6  # of drivers that are killed at work in one training
MOST = 10  # trainings that end otherwise, after which it gives up
FORKED = multiprocessing.get_context("forkserver")


class EndedError(Exception):
    """A training that ended by itself, before it was killed."""


class Child:
    """A process with a training, and what it told last."""

    def __init__(self, run: Callable[..., None], folder: Path, *arguments: Any) -> None:
        self.folder, self.begun = folder, time.monotonic()
        self.heard, own = FORKED.Pipe(duplex=False)
        self.process: BaseProcess = FORKED.Process(target=run, args=(own, folder, *arguments), daemon=True)
        self.process.start()
        own.close()
        self.told: Any = None

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something; raises ``EndedError`` if it ended before that."""
        end = time.monotonic() + LONGEST
        while not condition():
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"nothing for {LONGEST:g} s, {self.told} told: {self.errors()}")
            self.listen(0.05)

    @property
    def steps(self) -> int:
        """How many steps it has told of."""
        return self.told if isinstance(self.told, int) else 0

    def work(self, steps: int) -> None:
        """Wait until it has made more steps than so many."""
        self.until(lambda: self.steps > steps)

    def pause(self, seconds: float) -> None:
        """Let it go on for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.listen(left)

    def listen(self, seconds: float) -> None:
        """Take what it tells in so many seconds, or until it tells something."""
        try:
            if self.heard.poll(seconds):
                self.told = self.heard.recv()
                while self.heard.poll():
                    self.told = self.heard.recv()
        except (EOFError, OSError):
            self.process.join(LONGEST)
            raise EndedError from None

    def kill(self) -> None:
        """Kill it, and take what it told before."""
        self.process.kill()
        self.process.join()
        with suppress(EndedError):
            while self.heard.poll():
                self.listen(0)

    def end(self) -> None:
        """Let it finish."""
        with suppress(EndedError):
            self.until(lambda: False)

    def errors(self) -> str:
        """What it said on stderr, in the end."""
        with suppress(OSError):
            return (self.folder / "errors").read_text(errors="replace")[-3000:]
        return ""


@dataclass
class Count:
    """What was killed, and what became of it; for several threads."""

    goal: int
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def killed(self, kind: str, mode: str) -> None:
        with self.lock:
            self.kills[kind, mode] += 1

    def of(self, kind: str) -> int:
        with self.lock:
            return sum(count for (of, _), count in self.kills.items() if of == kind)

    def wants(self, kind: str) -> bool:
        return self.of(kind) < self.goal

    def note(self, what: str, lost: int, doubled: int) -> None:
        """Note the end of a training."""
        with self.lock:
            self.found.update(lost=lost, doubled=doubled)
        say(f"{what}: {lost} lost, {doubled} doubled; {sum(self.kills.values())} kills so far")

    def note_odd(self, what: str, errors: str) -> None:
        """Note a training that ended otherwise."""
        with self.lock:
            self.odd.append(what)
        say(f"{what} ended otherwise: {errors}")

    def told(self, seconds: float) -> str:
        rows = [f"{'kills':<24}" + "".join(f"{mode:>9}" for mode in MODES)]
        rows += [f"{kind:<24}" + "".join(f"{self.kills[kind, mode]:>9}" for mode in MODES) for kind in KINDS]
        saves = self.kills["writers", "save"]
        rows += [f"{'writers of checkpoints':<24}{self.of('writers'):>9} ({saves} in the middle of a save)"]
        found = self.found
        rows += [
            f"{sum(self.kills.values())} kills, {found['trainings']} trainings on servers: {found['lost']} "
            f"lost, {found['doubled']} doubled, {len(self.odd)} ended otherwise ({seconds:.0f} s)"
        ]
        return "\n".join(rows)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# ---------------------------------------------------------------------------- servers, trainers, drivers


@dataclass
class Lane:
    """Trainings on servers, one after the other."""

    count: Count
    chance: random.Random
    address: str
    token: Path
    start: float = 10.0  # seconds that a driver took until it worked

    def __post_init__(self) -> None:
        self.orders = {who: self._orders(who) for who in ("server", "trainer")}

    def _orders(self, who: str) -> Iterator[str]:
        """Who is to die where: all of them in turn."""
        orders = [f"{who} {i} {edge}" for i, edge in product((0, 1), killed.edges_of(who))]
        self.chance.shuffle(orders)
        return cycle(orders)

    def run(self, modes: Iterator[str]) -> None:
        """Trainings until enough of all are killed."""
        while self.goes_on:
            mode = next(modes)
            folder = Path(tempfile.mkdtemp(prefix="onward-kills-"))
            try:
                self.train(folder, mode)
            except TimeoutError as error:
                self.count.note_odd(f"a training in {mode}", str(error))
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def goes_on(self) -> bool:
        """Whether somebody else is to be killed."""
        return any(map(self.count.wants, KINDS)) and len(self.count.odd) < MOST

    def train(self, folder: Path, mode: str) -> None:
        """One training to its end."""
        best = lives = 0
        while self.goes_on and (lives := lives + 1) <= LIVES:
            child = self.begin(folder, mode)
            try:
                best = self.live(child, mode, best)
            except EndedError:
                if not isinstance(child.told, tuple):
                    self.count.note_odd(f"a training in {mode}", child.errors())
                break
            self.kill_at_start(folder, mode)
        (folder / killed.FREE).touch()
        for order in folder.glob("* * *"):
            order.unlink()
        self.finish(folder, mode)

    def finish(self, folder: Path, mode: str) -> None:
        """Let a training go on to its end."""
        while len(self.count.odd) < MOST:
            child = self.begin(folder, mode)
            child.end()
            if isinstance(child.told, tuple):
                self.count.found["trainings"] += 1
                self.count.note(f"a training in {mode}", *child.told)
                return
            self.count.note_odd(f"a training in {mode}", child.errors())

    def begin(self, folder: Path, mode: str) -> Child:
        return Child(killed.drive, folder, mode, self.address, self.token)

    def live(self, child: Child, mode: str, best: int) -> int:
        """Kill two servers and two trainers, and then the driver; how far they had come."""
        child.work(best + 1)
        self.start = time.monotonic() - child.begun
        for _ in range(2):
            self.kill_some(child, mode)
        child.pause(self.chance.uniform(0.0, 0.5))
        child.kill()
        self.count.killed("drivers", mode)
        return max(best, child.steps)

    def kill_some(self, child: Child, mode: str) -> None:
        """A server and a trainer die, and the others go on with those who take their places."""
        ordered = {
            kind: child.folder / next(self.orders[kind[:-1]]) for kind in KINDS[:2] if self.count.wants(kind)
        }
        for order in ordered.values():
            order.touch()
        for kind, order in ordered.items():
            child.until(lambda order=order: not order.exists())
            self.count.killed(kind, mode)
        child.work(child.steps + 3)

    def kill_at_start(self, folder: Path, mode: str) -> None:
        """Kill a driver that has yet to work, if there are some left."""
        if self.count.wants("drivers"):
            child = self.begin(folder, mode)
            time.sleep(self.chance.uniform(0.1, 1.0) * min(self.start, 30.0))
            child.kill()
            self.count.killed("drivers", mode)


# ---------------------------------------------------------------------------- writers of checkpoints


def kill_writers(count: Count, chance: random.Random) -> None:
    """Kill a training with checkpoints again and again, and let it finish."""
    folder = Path(tempfile.mkdtemp(prefix="onward-kills-"))
    step = 0
    while count.wants("writers"):
        child = Child(killed.write, folder, 10**6)
        try:
            child.work(step)
            child.pause(chance.uniform(0.0, 0.3))
            inside = count.of("writers") % 2 and waited_for_save(child)
            child.kill()
        except EndedError:
            count.note_odd("a training with checkpoints", child.errors())
            break
        count.killed("writers", "save" if inside else "step")
        step = checked(folder, child.steps, count)
    last = Child(killed.write, folder, step // killed.PLACES + 2)
    last.end()
    step, lost, doubled = killed.tally_of_checkpoint(folder)
    count.note(f"a training with checkpoints, step {step}", lost, doubled)
    shutil.rmtree(folder, ignore_errors=True)


def waited_for_save(child: Child) -> bool:
    """Wait for a save; whether one is under way."""
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        if any((child.folder / "checkpoints").glob(".part*")):
            return True
        child.listen(0)
    return False


def checked(folder: Path, told: int, count: Count) -> int:
    """The step of the latest checkpoint; it counts as lost if it is older than it may be."""
    step, lost, doubled = killed.tally_of_checkpoint(folder)
    late = max(0, told - 3 * killed.EVERY - step)  # one may be waiting, and one be written
    if lost or doubled or late:
        count.note(f"a checkpoint of step {step}, step {told} was made", lost + late, doubled)
    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=500, help="of all four kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of moments, and of the order of edges")
    chosen = parser.parse_args()
    FORKED.set_forkserver_preload(["tests.torture.killed"])
    begun, count = time.monotonic(), Count(chosen.kills // 4)
    chances = [random.Random(f"{chosen.seed} {lane}") for lane in range(LANES + 1)]
    with Engine(memory=300 * 2**20, prints=False) as engine, ThreadPoolExecutor(LANES + 1) as threads:
        where = ray.get_runtime_context().gcs_address, engine.folder / "token"
        modes = cycle(MODES)
        running = [threads.submit(kill_writers, count, chances.pop())]
        running += [threads.submit(Lane(count, chance, *where).run, modes) for chance in chances]
        for one in running:
            one.result()
    print(count.told(time.monotonic() - begun))
    raise SystemExit(bool(count.found["lost"] or count.found["doubled"] or count.odd))


if __name__ == "__main__":
    main()
