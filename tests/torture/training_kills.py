"""Does a training that is killed again and again end where an uninterrupted one ends, bit for bit?

    python -m tests.torture.training_kills [--count 20] [--signals "KILL TERM"]

A child process trains a network with dropout, batch normalization, a schedule and a shuffled reader, and
saves a checkpoint every few steps. It is killed (SIGKILL) at a random moment, which may be in the middle of a
save, and a new one continues from the latest checkpoint, which must be whole: a warning about a damaged one
is an error. One in five is killed before its first step. One that gets SIGTERM has to end with status 143,
and the next begins at the step that it says it saved. The last child is let finish; every value that it
saves is compared with those of a child that nobody disturbed. It prints:

    20 kills, resumed at steps 0 0 44 76 100 156 156 256 300 372 464 464 476 ... 804 920 1032 1164 of 2400
    26 values, 0 of them other than in the uninterrupted training
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow

ROOT = Path(__file__).parents[2]
EVERY = 4  # steps from checkpoint to checkpoint
LONGEST = 0.5  # seconds of training before a kill
# One that is killed would leave half a compiled program, which others would read.
ONLY_READ = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
PAUSE = 0.002  # seconds between two batches, so that a training is long enough to be killed


def network() -> Any:
    hidden = ow.layer.fc(ow.data("x", (None, 4)), 6, name="hidden")
    hidden = jax.nn.relu(ow.layer.batch_norm(hidden, name="norm"))
    hidden = ow.layer.dropout(hidden, 0.3, name="drop")
    return ow.layer.mse(ow.layer.fc(hidden, 1, name="last"), ow.data("y", (None, 1)))


def optimizer() -> ow.Optimizer:
    return ow.AdamW(lambda step: 1e-2 / (1 + jnp.sqrt(step)))


def data() -> Any:
    """Shuffled batches of numbers and their sums."""
    x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
    return ow.batches((x, x.sum(1, keepdims=True)), 8, shuffle=True, seed=5)


class Slow:
    """Batches with a pause before each; the position is theirs."""

    def __init__(self, batches: Any, pause: float) -> None:
        self.batches, self.pause = batches, pause
        self.set_epoch = batches.set_epoch
        self.state_dict = batches.state_dict
        self.load_state_dict = batches.load_state_dict

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            time.sleep(self.pause)
            yield batch


def child(folder: str, epochs: int, pause: float) -> None:
    """Train to the end, from the latest checkpoint if there is one."""

    said: list[str] = []

    def tell(event: ow.Event) -> None:
        if event.kind in ("begin", "step") and event.kind not in said:
            said.append(event.kind)
            print(event.step, flush=True)

    store = ow.Checkpoints(folder, every=EVERY, keep=2)
    ow.train(
        network,
        Slow(data(), pause),
        optimizer=optimizer(),
        epochs=epochs,
        seed=1,
        checkpoints=store,
        resume=True,
        callbacks=[tell],
    )


def start(folder: Path, epochs: int, pause: float, **environment: str) -> subprocess.Popen[str]:
    """A child, which says at which step it begins, and when it has made its first one."""
    command = [sys.executable, "-W", "error", "-m", "tests.torture.training_kills"]
    command += ["--child", str(folder), str(epochs), str(pause)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
    )


def finish(process: subprocess.Popen[str]) -> int:
    """Where a child began that is let finish."""
    begun, said = process.communicate()
    assert process.returncode == 0, f"the child ended with {process.returncode}: {said}"
    return int(begun.split()[0])


def torture(folder: Path, count: int, epochs: int, signals: str = "KILL", seed: int = 0) -> list[int]:
    """Kill ``count`` children and let one finish; returns the steps at which they began."""
    delays = random.Random(seed)
    begun, expected = [], None
    for number in range(count):
        with start(folder, epochs, PAUSE, **ONLY_READ) as process:
            assert process.stdout is not None
            begun.append(int(process.stdout.readline()))
            assert expected in (None, begun[-1]), f"step {expected} was saved, and {begun[-1]} resumed"
            if number % 5:
                process.stdout.readline()
            time.sleep(delays.uniform(0, LONGEST))
            assert process.poll() is None, "the training ended before it was killed: make it longer"
            sent = signal.Signals[f"SIG{signals.split()[number % len(signals.split())]}"]
            process.send_signal(sent)
            expected = saved_by(process) if sent is signal.SIGTERM else None
    return [*begun, finish(start(folder, epochs, PAUSE, **ONLY_READ))]


def saved_by(process: subprocess.Popen[str]) -> int:
    """The step that a child saved which was told to end."""
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, (process.returncode, said)
    found = re.search(r"SIGTERM: step (\d+) is saved", said)
    assert found, said
    return int(found[1])


def differing(one: Path, other: Path) -> tuple[list[str], int]:
    """The names of the values that differ in two folders' latest checkpoints, and how many there are."""
    a, b = (ow.Checkpoints(folder).load() for folder in (one, other))
    assert a.arrays.keys() == b.arrays.keys()
    assert (a.step, a.extra) == (b.step, b.extra)
    return [name for name in a.arrays if _bits(a.arrays[name]) != _bits(b.arrays[name])], len(a.arrays)


def compare(count: int, epochs: int, signals: str = "KILL") -> tuple[list[int], list[str], int]:
    """Torture one training and leave another alone, which fills the compilation cache, if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        killed, whole = Path(folder, "killed"), Path(folder, "whole")
        assert finish(start(whole, epochs, 0.0)) == 0
        begun = torture(killed, count, epochs, signals)
        return begun, *differing(killed, whole)


def _bits(value: Any) -> tuple[Any, ...]:
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(value) if is_key else value)
    return array.dtype, array.shape, array.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--signals", default="KILL")
    parser.add_argument("--child", nargs=3)
    chosen = parser.parse_args()
    if chosen.child:
        folder, epochs, pause = chosen.child
        return child(folder, int(epochs), float(pause))
    epochs = 20 + 9 * chosen.count
    begun, differ, values = compare(chosen.count, epochs, chosen.signals)
    steps = " ".join(map(str, begun))
    print(f"{chosen.count} kills, resumed at steps {steps} of {epochs * len(data())}")
    print(f"{values} values, {len(differ)} of them other than in the uninterrupted training", *differ)
    return None


if __name__ == "__main__":
    main()
