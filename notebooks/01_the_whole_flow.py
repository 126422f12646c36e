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
# # The whole flow
#
# You write the forward pass as a pure function. Onward traces it into a graph, derives the backward and the
# update operators, and runs the whole as one compiled computation. Here it learns to read handwritten
# digits, and you see the graph grow by one pass at a time. The picture at the end shows the training, and what the loss
# wants of single pixels.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from sklearn.datasets import load_digits

import onward as ow

# %% [markdown]
# ## Real images
#
# 1,797 digits of 8 x 8 pixels come inside scikit-learn. A fifth is held out.

# %%
digits = load_digits()
images = (digits.images / 16).astype(np.float32)[..., None]
labels = digits.target.astype(np.int32)
order = np.random.default_rng(0).permutation(len(labels))
test, train = np.split(order, [len(order) // 5])

figure, axes = plt.subplots(1, 10, figsize=(10, 1.2))
for axis, i in zip(axes, train, strict=False):
    axis.imshow(images[i, ..., 0], cmap="gray_r")
    axis.set_title(labels[i])
    axis.axis("off")

# %% [markdown]
# ## The forward pass
#
# A pure function of parameters and data. `jax.named_scope` and `checkpoint_name` name parts of it, as in any
# JAX code; nothing in it knows of Onward.


# %%
def loss(params, images, labels):
    with jax.named_scope("conv"):
        strides, padding, layout = (1, 1), "SAME", ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(
            images, params["conv"]["w"], strides, padding, dimension_numbers=layout
        )
        h = checkpoint_name(jax.nn.relu(h + params["conv"]["b"]), "features")
    with jax.named_scope("dense"):
        logits = h.reshape(len(h), -1) @ params["dense"]["w"]
    with jax.named_scope("cost"):
        right = jax.nn.one_hot(labels, 10)
        cost = jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.sum(logits * right, axis=1))
    with jax.named_scope("accuracy"):
        accuracy = jnp.mean(logits.argmax(1) == labels)
    return cost, accuracy


keys = jax.random.split(jax.random.key(0))
params = {
    "conv": {"w": 0.3 * jax.random.normal(keys[0], (3, 3, 1, 16)), "b": jnp.zeros(16)},
    "dense": {"w": 0.03 * jax.random.normal(keys[1], (8 * 8 * 16, 10))},
}

# %% [markdown]
# `trace` gives the forward Program. Only shapes and dtypes are read.

# %%
batch = 64
forward = ow.trace(loss, params, images[:batch], labels[:batch], has_aux=True)
print(forward)

# %% [markdown]
# ## The backward pass
#
# One gradient operator for each forward operator on the path. Where it needs more than inputs and outputs,
# the forward operator saves it: `saved(...)`.

# %%
backward = ow.append_backward(forward)
print(backward)

# %% [markdown]
# ## The update
#
# One update operator for each parameter. The hyperparameters are Variables of the state; the learning rate
# follows a schedule, an operator that reads the step counter. (`optimizer.minimize(loss, params, ...)` does
# all three steps in one call.)

# %%
epochs = 15
steps = epochs * (len(train) // batch)
cosine = lambda step: 3e-3 * 0.5 * (1 + jnp.cos(jnp.pi * step / steps))  # noqa: E731
program = ow.Adam(cosine).create_optimization_pass(backward)
ow.show(program, depth=1)

# %% [markdown]
# ## One compiled step
#
# Any Variable can be fetched: here an activation, its gradient, and the learning rate of the step.

# %%
step = ow.compile(program, fetch=["features", "grad(features)", "learning_rate"])
state = step.init(params)
generator = np.random.default_rng(1)
history = []
for _ in range(epochs):
    shuffled = generator.permutation(train)
    for start in range(0, len(train) - batch + 1, batch):
        chosen = shuffled[start : start + batch]
        state, out = step(state, images[chosen], labels[chosen])
        history.append((out.loss, out.aux, out["learning_rate"]))
state

# %% [markdown]
# The forward part of the same Program, on the same state, measures the held-out digits. Their number differs
# from the batch: the Program is traced once more, as `jax.jit` would.

# %%
accuracy = program.outputs[1]
evaluate = ow.compile(ow.prune(program, [accuracy]))
_, out = evaluate(state, images[test], labels[test])
print(f"accuracy on {len(test)} held-out digits: {float(out[accuracy]):.1%}")
assert out[accuracy] > 0.96

# %% [markdown]
# ## What the loss asks of the features
#
# The gradient of the activation `features`, of a network that has just begun to learn, tells for every pixel
# and channel in which direction the loss wants it to move. Nobody tagged it beforehand.

# %%
chosen = train[:batch]
_, early = step(step.init(params), images[chosen], labels[chosen])
wanted = -early["grad(features)"].sum(-1)

costs, accuracies, rates = (np.array(column) for column in zip(*history, strict=True))
figure = plt.figure(figsize=(11, 5.5), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1.2, 1])
top, bottom = left.subplots(2, 1, sharex=True, height_ratios=[2, 1])
top.plot(costs, color="0.8", lw=0.8)
top.plot(np.arange(10, len(costs) - 9), np.convolve(costs, np.ones(20) / 20, "valid"), color="C0")
top.set(yscale="log", ylabel="loss", title="training")
bottom.plot(rates, color="C1")
bottom.set(xlabel="step", ylabel="learning rate")
grid = right.subplots(4, 4)
scale = float(np.abs(wanted[:8]).max())
for i in range(8):
    row, column = divmod(i, 2)
    grid[row, 2 * column].imshow(images[chosen[i], ..., 0], cmap="gray_r")
    grid[row, 2 * column + 1].imshow(wanted[i], cmap="coolwarm", vmin=-scale, vmax=scale)
for axis in grid.flat:
    axis.axis("off")
right.suptitle("digits, and where the loss wants more (red) or less (blue)")
