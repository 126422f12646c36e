"""Does a Ctrl-C at a random moment ever harm a Trainer or a Session?

    python -m tests.torture.training_interrupts

A child process trains; this process sends it SIGINT, each time after a random delay. Each step takes the
buffers of the state over and adds exactly 1 to a number, so that the state tells how many steps are in it.
After each interrupt the child reads every value, which must fit the number of steps that it has counted, and
loads the latest checkpoint, which must be of that step. Then it goes on with the same objects. It prints:

    60 SIGINT in Trainer.train: 60 states kept, 60 saved, 0 handlers left, 0 pressed again; 47867 steps

and so on for two threads and for ``Session.run``, and for SIGTERM in a Trainer. A Ctrl-C between two runs of
a Session is handled by nobody: nothing is saved then, and that is counted as saved. A KeyboardInterrupt that
arrives while Python calls a destructor or the callback of a weak reference is printed and thrown away by
Python itself ("Exception ignored in"); who presses Ctrl-C presses it again, as this process does, and says
how often.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO, Any

import jax.numpy as jnp
import numpy as np

import onward as ow

ROOT = Path(__file__).parents[2]
LONGEST = 0.1  # seconds of training before an interrupt
PATIENCE = 3.0  # seconds until Ctrl-C is pressed again
NAMES = {"train": "Trainer.train", "threads": "Trainer.train, 2 threads", "session": "Session.run"}
ONE = np.ones(1, "float32")


def network() -> Any:
    """A number that each step makes greater by 1, and ones that stay as they are."""
    count = ow.parameter("count", (64,), initializer=ow.initializer.constant(0.0))
    seen = ow.state("seen", (), "int32")
    ow.assign(seen, seen + 1)
    return -jnp.sum(count) * jnp.mean(ow.data("one", (None,)))


class Training:
    """A Trainer that is interrupted again and again."""

    def __init__(self, store: ow.Checkpoints, threads: int) -> None:
        self.store, self.threads = store, threads
        self.trainer = ow.Trainer(ow.Model(network), ow.SGD(1.0), share=threads > 1, checkpoints=store)

    def run(self) -> None:
        self.trainer.train([ONE] * 20, epochs=10**6, threads=self.threads, callbacks=[self.tell])

    def tell(self, event: ow.Event) -> None:
        if event.kind == "begin":
            say("running")

    def steps(self) -> int:
        return self.trainer.step

    def __getitem__(self, name: str) -> Any:
        return self.trainer[name]


class Running:
    """A Session that is interrupted again and again."""

    def __init__(self, store: ow.Checkpoints) -> None:
        self.program = ow.SGD(1.0).minimize(ow.trace(network))
        self.session = ow.Session(self.program, checkpoints=store)

    def run(self) -> None:
        self.session.run(self.program, {"one": ONE})
        say("running")
        while True:
            self.session.run(self.program, {"one": ONE})

    def steps(self) -> int:
        return self.session.runs

    def __getitem__(self, name: str) -> Any:
        return self.session[name]


def verdict(training: Training | Running, store: ow.Checkpoints, between: bool) -> str:
    """What an interrupt has left."""
    steps = training.steps()
    words = []
    try:
        values = {name: set(np.ravel(training[name]).tolist()) for name in ("count", "step")}
        kept = values == {"count": {float(steps)}, "step": {steps}}
        words.append("kept" if kept else f"lost({steps}, {values})")
    except ow.StateError as error:
        words.append(f"lost({error})")
    words.append("saved" if between or _is_saved(store, steps) else f"missing({steps})")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    if handlers != (signal.default_int_handler, signal.SIG_DFL):
        words.append("left")
    return " ".join([*words, str(steps)])


def _is_saved(store: ow.Checkpoints, steps: int) -> bool:
    found = store.load()
    return found.step == steps and set(found.arrays["count"].tolist()) == {float(steps)}


def say(word: str) -> None:
    print(word, flush=True)


def child(kind: str, rounds: int, folder: str) -> None:
    store = ow.Checkpoints(folder, keep=1)
    training = Running(store) if kind == "session" else Training(store, 2 if kind == "threads" else 1)
    for _ in range(rounds):
        try:
            training.run()
        except (KeyboardInterrupt, SystemExit) as interrupt:
            frames = {Path(frame.filename).stem for frame in traceback.extract_tb(interrupt.__traceback__)}
            say(verdict(training, store, between="interrupt" not in frames))


def speaks(stream: IO[str], seconds: float) -> bool:
    """Whether something comes in this time; a process with many files may wait so, too."""
    with DefaultSelector() as selector:
        selector.register(stream, EVENT_READ)
        return bool(selector.select(seconds))


def torture(kind: str, rounds: int, seed: int = 0, number: int = signal.SIGINT) -> list[str]:
    """What the child says after each signal."""
    delays = random.Random(seed)
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.torture.training_interrupts", kind, str(rounds), folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            for _ in range(rounds):
                assert process.stdout.readline() == "running\n"
                time.sleep(delays.uniform(0, LONGEST))
                presses = 1
                process.send_signal(number)
                while not speaks(process.stdout, PATIENCE):
                    process.send_signal(number)
                    presses += 1
                verdicts.append(process.stdout.readline().strip() + " again" * (presses > 1))
        assert process.returncode == 0
    return verdicts


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) == 2 else 60
    if len(sys.argv) == 4:
        return child(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    kinds = [(kind, signal.SIGINT) for kind in NAMES] + [
        (kind, signal.SIGTERM) for kind in ("train", "threads")
    ]
    for kind, number in kinds:
        name = NAMES[kind]
        verdicts = [v.split() for v in torture(kind, rounds, number=number)]
        kept, saved, left, again = (sum(w in v for v in verdicts) for w in ("kept", "saved", "left", "again"))
        print(
            f"{len(verdicts)} {number.name} in {name}: {kept} states kept, {saved} saved, "
            f"{left} handlers left, {again} pressed again; {verdicts[-1][2]} steps",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
