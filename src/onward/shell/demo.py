"""``onward demo``: a convolutional network learns to read handwritten digits.

The whole use of the library on one page: a pure loss function, ``minimize``, ``compile``, a loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save
from tqdm import tqdm

from onward.core.extras import require
from onward.core.program import Program
from onward.core.show import headline, human_bytes
from onward.core.walk import prune
from onward.define.trace import trace
from onward.derive.optimizers import Adam
from onward.execute.compile import compile
from onward.execute.disk.durable import appearing
from onward.execute.state import State
from onward.execute.step import Step
from onward.explain.summary.summary import summary_by_pass

Parameters: TypeAlias = dict[str, Any]
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
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
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


def initial_parameters(key: jax.Array) -> Parameters:
    """He-normal weights and zero biases."""
    shapes = {"conv1": (3, 3, 1, 32), "conv2": (3, 3, 32, 64), "dense": (4 * 4 * 64, 10)}
    return {
        layer: {
            "w": jax.random.normal(k, shape) * np.sqrt(2 / np.prod(shape[:-1])),
            "b": jnp.zeros(shape[-1]),
        }
        for k, (layer, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True)
    }


def predict(params: Parameters, images: jax.Array) -> jax.Array:
    """The logits [n, 10] of images [n, 8, 8, 1]."""
    h = images
    for layer in ("conv1", "conv2"):
        with jax.named_scope(layer):
            dimensions = ("NHWC", "HWIO", "NHWC")
            h = jax.lax.conv_general_dilated(
                h, params[layer]["w"], (1, 1), "SAME", dimension_numbers=dimensions
            )
            h = jax.nn.relu(h + params[layer]["b"])
    with jax.named_scope("pool"):
        h = h.reshape(-1, 4, 2, 4, 2, 64).max((2, 4)).reshape(-1, 4 * 4 * 64)
    with jax.named_scope("dense"):
        logits: jax.Array = h @ params["dense"]["w"] + params["dense"]["b"]
    return logits


def loss(params: Parameters, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean cross entropy of a batch, and beside it the accuracy."""
    logits = predict(params, images)
    with jax.named_scope("cost"):
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -jnp.mean(log_p), jnp.mean(logits.argmax(1) == labels)


def demo(epochs: int, out: Path) -> float:
    """Train, report, and write the parameters to ``out``; returns the accuracy on held-out digits."""
    if not out.parent.is_dir():
        raise NotADirectoryError(f"{out.parent} is not a folder; no parameters were written to {out}")
    train, test = load_digits()
    params = initial_parameters(jax.random.key(0))
    total = epochs * (len(train.labels) // BATCH)

    def learning_rate(step: jax.Array) -> jax.Array:
        return PEAK_RATE * 0.5 * (1 + jnp.cos(jnp.pi * step / total))

    forward = trace(loss, params, train.images[:BATCH], train.labels[:BATCH], has_aux=True)
    program = Adam(learning_rate).minimize(forward)
    print(f"{headline(program)}\n\n{summary_by_pass(program)}\n")
    step = compile(program)
    state = fit(step, step.init(params), train, epochs)
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
