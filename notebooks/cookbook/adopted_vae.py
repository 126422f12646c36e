"""Adopt a step of flax and optax: a variational autoencoder.

Trained:  an encoder and a decoder of flax (nnx) by a training step with optax, as one has it. Onward adopts it as it
          is: it shows its passes, cuts the batch in four, and leaves updates out that are not finite.
Data:     1,797 digits of 8 x 8 pixels, inside scikit-learn; a fifth is held out.
You see:  the passes of the step; that the adopted step gives the losses of the step of optax; the bound on held-out
          digits before and after, in nats; and new digits.
Source:   Kingma and Welling, Auto-Encoding Variational Bayes, 2014.
Time:     15 CPU seconds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import onward as ow

LATENT = 8


class Autoencoder(nnx.Module):
    """Two networks: a Gaussian of the code for each image, and the probability of each pixel for each code."""

    def __init__(self, rngs):
        self.encoder = nnx.Sequential(
            nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 2 * LATENT, rngs=rngs)
        )
        self.decoder = nnx.Sequential(
            nnx.Linear(LATENT, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 64, rngs=rngs)
        )

    def __call__(self, images, noise):
        mean, log_scale = jnp.split(self.encoder(images), 2, axis=-1)
        return mean, log_scale, self.decoder(mean + jnp.exp(log_scale) * noise)


graph, first_params = nnx.split(Autoencoder(nnx.Rngs(0)))
optimizer = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(2e-3))


def bound(params, images, noise):
    """The negative evidence lower bound of a batch, in nats for each image."""
    mean, log_scale, logits = nnx.merge(graph, params)(images, noise)
    with jax.named_scope("reconstruction"):
        missed = optax.sigmoid_binary_cross_entropy(logits, images).sum(-1)
    with jax.named_scope("divergence"):
        divergence = 0.5 * (mean**2 + jnp.exp(2 * log_scale) - 1 - 2 * log_scale).sum(-1)
    return jnp.mean(missed + divergence)


@jax.jit
def training_step(params, opt_state, images, noise):
    """The step as it was, written without Onward."""
    value, gradients = jax.value_and_grad(bound)(params, images, noise)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def read_data(seed=0):
    """Images between 0 and 1 as rows, for training and held out."""
    images = (load_digits().data / 16).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    held_out, train = np.split(order, [len(images) // 5])
    return images[train], images[held_out]


def batches_of(images, epochs, size=64):
    """Batches in random order, with noise that is drawn for each image."""
    rng, reader = np.random.default_rng(1), ow.batches([images], size, shuffle=True, drop_last=True)
    for _ in range(epochs):
        for (batch,) in reader:
            yield batch, rng.normal(size=(size, LATENT)).astype(np.float32)


def by_hand(params, batches):
    """The losses of the step as it was."""
    opt_state, losses = optimizer.init(params), []
    for batch in batches:
        params, opt_state, value = training_step(params, opt_state, *batch)
        losses.append(float(value))
    return losses


def adopted(params, batches, example):
    """The same with Onward: four parts of each batch, one update, none that is not finite."""
    program = ow.adopt(training_step, params, optimizer.init(params), *example)
    print(ow.summary_by_pass(program), end="\n\n")
    step = ow.compile(ow.guard(ow.accumulate(program, 4)))
    state, losses = step.init((params, optimizer.init(params))), []
    for batch in batches:
        state, out = step(state, *batch)
        losses.append(float(out.loss))
    return state.parameters[0], losses


def main(epochs=60, compared=2):
    """Train, compare with the step as it was, decode codes that were drawn."""
    train, held_out = read_data()
    noise = np.random.default_rng(2).normal(size=(len(held_out), LATENT)).astype(np.float32)
    tested = jax.jit(bound)
    before = float(tested(first_params, held_out, noise))
    example = next(batches_of(train, 1))
    params, losses = adopted(first_params, batches_of(train, epochs), example)
    theirs = by_hand(first_params, batches_of(train, compared))
    difference = float(np.abs(np.subtract(losses[: len(theirs)], theirs)).max())
    after = float(tested(params, held_out, noise))
    print(f"{len(theirs)} losses of both steps, largest difference {difference:.1e}")
    print(f"bound on {len(held_out)} held-out digits: {before:.2f} -> {after:.2f} nats\n")

    codes = np.random.default_rng(3).normal(size=(8, LATENT)).astype(np.float32)
    digits = np.asarray(jax.nn.sigmoid(nnx.merge(graph, params).decoder(codes))).reshape(8, 8, 8)
    for row in np.moveaxis(digits, 0, 1):
        print("   ".join("".join(" .:-=+*#%@"[int(9.99 * v)] * 2 for v in line) for line in row))
    return {"losses": losses, "difference": difference, "before": before, "after": after}


if __name__ == "__main__":
    main()
