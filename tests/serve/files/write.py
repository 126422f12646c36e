"""Writes the model files that every later release must load, into a folder named after this release.

Run once for each release, with the oldest supported JAX:  python tests/serve/files/write.py
What is there already is never written again.
"""

from pathlib import Path

import numpy as np

import onward as ow


def network():
    """Most of what a file can hold: convolution, statistics, an embedding, a recurrence, attention."""
    images = ow.data("images", (None, 4, 4, 1))
    tokens = ow.data("tokens", (None, 3), "int32")
    seen = ow.layer.batch_norm(ow.layer.conv(images, 2, 3, act="relu"))
    read, _ = ow.layer.lstm(ow.layer.attention(ow.layer.embedding(tokens, 5, 4), heads=2), 3)
    hidden = ow.layer.dropout(ow.layer.fc(seen.reshape(seen.shape[0], -1), 4), 0.1)
    output = ow.layer.fc(hidden, 2, name="output") + ow.layer.fc(read[:, -1], 2, name="read")
    return ow.layer.mse(output, ow.data("targets", (None, 2)))


def batch(n):
    """Data of a fixed seed."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(n, 4, 4, 1)).astype("float32")
    tokens = generator.integers(0, 5, (n, 3)).astype("int32")
    return images, tokens, generator.normal(size=(n, 2)).astype("float32")


def main():
    """Train a few steps, save model and step, and what they answer."""
    folder = Path(__file__).parent / ow.__version__
    folder.mkdir()
    model = ow.Model(network, seed=1, batch_size=4)
    trainer = ow.Trainer(model, ow.Adam(1e-2))
    for _ in range(3):
        trainer.update(*batch(4))
    ow.save(model, folder / "network.model", license="Apache-2.0", about={"made": "for the tests"})
    step = ow.compile(ow.Adam(1e-2).minimize(ow.trace(network, batch_size=4)))
    state = step.init(seed=2)
    ow.save(step, folder / "step.model", state)
    losses = []
    for _ in range(3):
        state, out = step(state, *batch(4))
        losses.append(float(out.loss))
    evaluator = ow.Evaluator(model, ["output"])
    answers = {f"output_{n}": evaluator.forward(*batch(n))["output"] for n in (1, 4, 7)}
    parameters = {f"parameter:{name}": model[name] for name in model.parameters}
    np.savez(folder / "answers.npz", losses=losses, **answers, **parameters)


if __name__ == "__main__":
    main()
