"""``onward demo``: a convolutional network learns to read handwritten digits.

The whole use of the library on one page: a network, ``minimize``, ``compile``, a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save
from tqdm import tqdm

from onward.core.extras import require
from onward.core.program import Program
from onward.core.show import headline, human_bytes
from onward.core.walk import prune
from onward.define import layer
from onward.define.declare import data
from onward.define.trace import trace
from onward.derive.optimizers import Adam
from onward.execute.compile import compile
from onward.execute.disk.durable import appearing
from onward.execute.state import State
from onward.execute.step import Step
from onward.explain.summary.summary import summary_by_pass

BATCH = 64
PEAK_RATE = 3e-3


@dataclass(frozen=True)
class Digits:
    """Images, float32 [n, 8, 8, 1] between 0 and 1, and their labels, int32 [n]."""

    images: np.ndarray
    labels: np.ndarray

    def batches(self, generator: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Full batches in random order, every image shifted by up to one pixel."""
        order = generator.permutation(len(self.labels))
        for chosen in order[: len(order) // BATCH * BATCH].reshape(-1, BATCH):
            shift = generator.integers(-1, 2, size=2)
            yield np.roll(self.images[chosen], shift, axis=(1, 2)), self.labels[chosen]


def load_digits() -> tuple[Digits, Digits]:
    """scikit-learn's handwritten digits: four fifths to train on, one fifth held out."""
    found = require("sklearn.datasets", "demo").load_digits()
    images = (found.images / 16).astype(np.float32)[..., None]
    labels = found.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, rest = np.split(order, [len(order) // 5])
    return Digits(images[rest], labels[rest]), Digits(images[held_out], labels[held_out])


def network() -> tuple[Any, Any]:
    """The cross entropy of a small convolutional network, and the fraction of digits that it reads right."""
    images, labels = data("images", (None, 8, 8, 1)), data("labels", (None,), "int32")
    h = layer.conv(images, 32, 3, act="relu", name="conv1")
    h = layer.pool(layer.conv(h, 64, 3, act="relu", name="conv2"), 2, name="pool")
    logits = layer.fc(h.reshape(h.shape[0], -1), 10, name="dense")
    return layer.cross_entropy(logits, labels, name="cost"), layer.accuracy(logits, labels)


def demo(epochs: int, out: Path) -> float:
    """Train, report, and write the parameters to ``out``; returns the accuracy on held-out digits."""
    if not out.parent.is_dir():
        raise NotADirectoryError(f"{out.parent} is not a folder; no parameters were written to {out}")
    if out.is_dir():
        raise IsADirectoryError(
            f"{out} is a folder; expected the name of a file, such as {out / 'digits.safetensors'}. Nothing "
            "was trained."
        )
    train, test = load_digits()
    total = epochs * (len(train.labels) // BATCH)

    def learning_rate(step: jax.Array) -> jax.Array:
        return PEAK_RATE * 0.5 * (1 + jnp.cos(jnp.pi * step / total))

    examples = {"images": train.images[:BATCH], "labels": train.labels[:BATCH]}
    forward = trace(network, feed=examples, has_aux=True)
    program = Adam(learning_rate).minimize(forward)
    print(f"{headline(program)}\n\n{summary_by_pass(program)}\n")
    step = compile(program)
    state = fit(step, step.init(), train, epochs)
    accuracy = evaluate(program, state, test)
    print(f"\nAccuracy on {len(test.labels)} held-out digits: {accuracy:.1%}")
    write(state, program, out)
    return accuracy


def fit(step: Step, state: State, data: Digits, epochs: int) -> State:
    """The training loop, with a progress bar."""
    generator = np.random.default_rng(0)
    with tqdm(range(epochs), desc="epochs") as bar:
        for _ in bar:
            for images, labels in data.batches(generator):
                state, result = step(state, images, labels)
            bar.set_postfix(loss=f"{float(result.loss):.4f}", accuracy=f"{float(result.aux):.1%}")
    return state


def evaluate(program: Program, state: State, data: Digits) -> float:
    """The accuracy of the forward part of a training Program, on the parameters of its State."""
    accuracy = program.outputs[1]
    test = compile(prune(program, [accuracy]))
    _, result = test(state, data.images, data.labels)
    return float(result[accuracy])


def write(state: State, program: Program, path: Path) -> None:
    """Write the parameters by name, whole or not at all."""
    arrays = {v.name: np.asarray(state[v]) for v in program.parameters}
    with appearing(path) as part:
        part.write_bytes(save(arrays))
    print(f"Learned parameters: {path.resolve()} ({human_bytes(path.stat().st_size)})")
