"""Does a Ctrl-C at a random moment ever lose the state of a training?

    python -m tests.torture.interrupts

A child process trains with a jitted step that takes the buffers of its state over; this process sends it
SIGINT, each time after a random delay. After each the child tries to read its state, which must hold as many
as the steps it has counted. To show that the test can fail, the same without ``uninterrupted`` comes second.
It prints:

    60 interrupts, uninterrupted steps: 0 states lost, 0 handlers left behind
    60 interrupts, bare steps: 34 states lost, 0 handlers left behind
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from onward.execute.loop.interrupt import Interruptible

ROOT = Path(__file__).parents[2]
LONGEST = 0.02  # seconds of training before an interrupt


class Training:
    """A loop over a donated counter that is interrupted again and again."""

    def __init__(self, protected: bool) -> None:
        self.protected = protected
        self.step = partial(jax.jit, donate_argnums=0)(lambda state: state + 1)
        self.begin()

    def begin(self) -> None:
        self.state, self.count = jnp.zeros(1000, jnp.int32), 0

    def part(self, interrupts: Interruptible) -> AbstractContextManager[None]:
        return interrupts.uninterrupted if self.protected else nullcontext()

    def advance(self, interrupts: Interruptible) -> None:
        with self.part(interrupts):
            self.state = self.step(self.state)
            self.count += 1

    def run(self) -> None:
        """Train until interrupted, in an Interruptible that is entered again and again."""
        say("running")
        while True:
            with Interruptible() as interrupts:
                for _ in range(3):
                    with Interruptible() as inner:  # as of a function that the loop calls
                        self.advance(inner)
                    self.advance(interrupts)

    def verdict(self) -> str:
        left = "" if signal.getsignal(signal.SIGINT) is signal.default_int_handler else " left"
        if self.state.is_deleted() or set(self.state.tolist()) != {self.count}:
            self.begin()
            return "lost" + left
        return "kept" + left


def say(word: str) -> None:
    print(word, flush=True)


def child(rounds: int, protected: bool) -> None:
    training = Training(protected)
    training.step(jnp.zeros(1000, jnp.int32))
    for _ in range(rounds):
        try:
            training.run()
        except KeyboardInterrupt:
            say(training.verdict())


def torture(rounds: int, protected: bool = True, seed: int = 0) -> list[str]:
    """What the child says after each interrupt."""
    command = [sys.executable, "-m", "tests.torture.interrupts", str(rounds), str(int(protected))]
    delays = random.Random(seed)
    verdicts = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        for _ in range(rounds):
            assert process.stdout.readline() == "running\n"
            time.sleep(delays.uniform(0, LONGEST))
            process.send_signal(signal.SIGINT)
            verdicts.append(process.stdout.readline().strip())
    assert process.returncode == 0
    return verdicts


def main() -> None:
    if len(sys.argv) == 3:
        return child(int(sys.argv[1]), bool(int(sys.argv[2])))
    for protected, name in ((True, "uninterrupted steps"), (False, "bare steps")):
        verdicts = torture(60, protected)
        lost, left = (sum(word in v for v in verdicts) for word in ("lost", "left"))
        print(f"60 interrupts, {name}: {lost} states lost, {left} handlers left behind")
    return None


if __name__ == "__main__":
    main()
