# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Layers and training
#
# Describe a network by layers, train it, look at it, save it: without a loop of your own, and with the same
# graph underneath. The picture at the end shows how it learned, and what one of its layers sees.

# %%
import tempfile

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onward as ow
from onward import layer

digits = load_digits()
images = (digits.images / 16).astype(np.float32)[..., None]
labels = digits.target.astype(np.int32)
order = np.random.default_rng(0).permutation(len(labels))
test, train = np.split(order, [len(order) - 22 * 64])
print(f"{len(train)} digits of 8 x 8 pixels to train on, {len(test)} held out")

# %% [markdown]
# ## A network
#
# An ordinary function. `data` says what will be fed; a layer makes the parameters that it is not given. What
# a layer returns is an array, so `reshape`, `len` and all of `jnp` work between the layers.


# %%
def network():
    images = layer.data("images", (None, 8, 8, 1))
    labels = layer.data("labels", (None,), "int32")
    h = layer.conv(images, 16, 3, act="relu", name="strokes")
    h = layer.conv(layer.pool(h, 2), 32, 3, act="relu", name="parts")
    h = layer.dropout(h.reshape(len(h), -1), 0.3)
    logits = layer.fc(h, 10, name="digit")
    cost = layer.cross_entropy(logits, labels, name="cost")
    return cost, {"accuracy": layer.accuracy(logits, labels, name="accuracy")}


# %% [markdown]
# A `Model` is the network and its parameters, here begun from a seed. Its topology is a Program like any other;
# `depth=1` folds each layer into a line.

# %%
model = ow.Model(network, seed=0, has_aux=True, batch_size=64)
ow.show(model.topology, depth=1)

# %% [markdown]
# ## Training
#
# After each epoch the held-out digits are read, in a batch of another size; that just works.

# %%
reader = ow.batches((images[train], labels[train]), 64, shuffle=True)
held_out = ow.batches((images[test], labels[test]), len(test))
trainer = ow.Trainer(model, ow.Adam(5e-3))
history = trainer.train(reader, epochs=6, test=held_out)
history

# %%
accuracy = trainer.test(held_out)["accuracy"]
print(f"accuracy on {len(test)} held-out digits: {accuracy:.1%}")
assert accuracy > 0.96

# %% [markdown]
# The Trainer derived the backward and the update operators. The held-out digits went through another Program
# over the same Variables, in which nothing is dropped: `dropout_0` was five operators and is now a name,
# and the random key is gone.

# %%
print(ow.summary_by_pass(trainer.program), end="\n\n")
ow.show(ow.for_test(trainer.program), depth=1)

# %% [markdown]
# ## Looking inside
#
# An `Evaluator` remembers what went through the layers. It copies no parameters, so there can be one for every
# request and every thread. Without labels it computes what can be computed without them.

# %%
evaluator = ow.Evaluator(model)
evaluator.forward(images=images[test])
strokes = np.asarray(evaluator.activation("strokes"))
guesses = np.asarray(evaluator.activation("digit")).argmax(1)
print(f"strokes {strokes.shape}; first guesses {guesses[:10]}, labels {labels[test][:10]}")

# %% [markdown]
# ## Saving, and going on
#
# Training is cut off in the middle of an epoch, as by a failing machine. Another Trainer, begun from another
# seed, takes up the latest checkpoint: parameters, slots, random key, place in the data. In the end every
# parameter equals that of the training above, which nothing interrupted, bit for bit.


# %%
def another(seed, **options):
    return ow.Trainer(ow.Model(network, seed=seed, has_aux=True), ow.Adam(5e-3), **options)


def power_cut(event):
    if event.step == 75:
        raise OSError("the lights went out")


with tempfile.TemporaryDirectory() as folder:
    with ow.Checkpoints(folder, every=50) as checkpoints:
        first = another(seed=0, checkpoints=checkpoints)
        try:
            first.train(reader, epochs=6, callbacks=[power_cut], progress=False)
        except OSError as error:
            print(f"step {first.step}: {error}")

    second = another(seed=1)
    restored = second.restore(folder)
    print(f"step {second.step}: {restored}")
    second.train(reader, epochs=6, progress=False)

for v in model.topology.parameters:
    np.testing.assert_array_equal(second[v], trainer[v])
print(f"step {second.step}: all {len(model.topology.parameters)} parameters equal, bit for bit")

# %% [markdown]
# ## What it learned, and what it sees
#
# Left, the history: a record for each step and for each test. Right, five held-out digits, and what the
# first layer makes of them.

# %%
steps, losses, accuracies = history["step"], history["loss"], history["test_accuracy"]
trained, tested = ~np.isnan(losses), ~np.isnan(accuracies)  # a record is of a step, or of a test

figure = plt.figure(figsize=(11, 4.8), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1, 1.25])
top, bottom = left.subplots(2, 1, sharex=True)
top.plot(steps[trained], losses[trained], color="0.8", lw=0.8)
top.plot(steps[trained][19:], np.convolve(losses[trained], np.ones(20) / 20, "valid"), color="C0")
top.set(yscale="log", ylabel="loss of a batch")
bottom.plot(steps[tested], 100 * (1 - accuracies[tested]), "o-", color="C1", ms=3)
bottom.set(xlabel="step", ylabel="% of held-out digits wrong", ylim=0)
channels = np.argsort(-strokes.std((0, 1, 2)))[:6]
chosen = [int(np.flatnonzero(labels[test] == digit)[0]) for digit in (0, 3, 4, 7, 8)]
grid = right.subplots(len(chosen), 1 + len(channels))
for row, i in zip(grid, chosen, strict=True):
    row[0].imshow(images[test[i], ..., 0], cmap="gray_r")
    for axis, channel in zip(row[1:], channels, strict=True):
        axis.imshow(strokes[i, ..., channel], cmap="magma", vmin=0, vmax=strokes[..., channel].max())
for axis in grid.flat:
    axis.axis("off")
right.suptitle("digits, and six of the sixteen channels of layer strokes")
