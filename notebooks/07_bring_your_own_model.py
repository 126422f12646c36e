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
# # Bring your own model
#
# A model of flax or equinox is a pure function and a pytree. That is what `minimize` takes, so it takes the model as it
# is, batch statistics included. Here two of them are trained, and both give the losses of the loop that you would write
# with optax. Then the loop itself is looked into, without a change. The picture at the end lays the losses over each
# other, and shows what one layer of the flax model sees.

# %%
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import onward as ow

digits = load_digits()
images = (digits.images / 16).astype(np.float32)[..., None]
labels = digits.target.astype(np.int32)
order = np.random.default_rng(0).permutation(1600)
batches = [(images[i], labels[i]) for i in order.reshape(-1, 64)]


def cross_entropy(logits, labels):
    with jax.named_scope("cost"):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# %% [markdown]
# ## A flax model with batch statistics


# %%
class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(8, (3, 3), use_bias=False, name="strokes")(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10, name="digit")(x.reshape(len(x), -1))


net = ConvNet()
variables = net.init(jax.random.key(0), images[:1], train=False)
params, stats = variables["params"], variables["batch_stats"]


def loss(params, stats, images, labels):
    model = {"params": params, "batch_stats": stats}
    logits, updated = net.apply(model, images, train=True, mutable="batch_stats")
    return cross_entropy(logits, labels), updated["batch_stats"]


# %% [markdown]
# What the model carries from step to step goes in as `state=`; the loss returns its next value. In the drawing the
# modules of flax are boxes with their names. Click the plus on one to open it.

# %%
program = ow.Adam(1e-2).minimize(loss, params, *batches[0], state=stats)
ow.draw(program)

# %% [markdown]
# Any value in the graph can be fetched. Here it is what the convolution gives; flax need not know.

# %%
strokes = next(op.outputs[0] for op in program.ops if op.type == "conv_general_dilated")
step = ow.compile(program, fetch=[strokes])
state, flax_losses = step.init(params, stats), []
for batch in batches:
    state, out = step(state, *batch)
    flax_losses.append(float(out.loss))
fetched = np.asarray(out[strokes])
print(f"{strokes.name} {fetched.shape}")

# %% [markdown]
# Parameters and statistics come back in flax's own containers, and go into flax's own `apply`.

# %%
logits = net.apply({"params": state.parameters, "batch_stats": state.model_state}, images[1600:], train=False)
print(f"accuracy on held-out digits: {jnp.mean(logits.argmax(1) == labels[1600:]):.3f}")

# %% [markdown]
# ## The same with optax, by hand
#
# The loop that you have now. It computes the same numbers.

# %%
optimizer = optax.adam(1e-2)


@jax.jit
def training_step(params, stats, opt_state, images, labels):
    (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params, stats, images, labels)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return optax.apply_updates(params, updates), stats, opt_state, value


theirs, optax_losses = (params, stats, optimizer.init(params)), []
for batch in batches:
    *theirs, value = training_step(*theirs, *batch)
    optax_losses.append(float(value))

np.testing.assert_allclose(flax_losses, optax_losses, rtol=1e-3)
difference = np.abs(np.subtract(flax_losses, optax_losses)).max()
print(f"{len(batches)} losses, largest difference {difference:.1e}")

# %% [markdown]
# ## The loop itself, looked into
#
# You need not change the loop to look into it. `inspect` traces the step above, and finds forward, backward and update
# by the marks that JAX leaves.

# %%
inspected = ow.inspect(training_step, params, stats, optimizer.init(params), *batches[0])
ow.summary(inspected, depth=2)

# %% [markdown]
# The result is a Program like those of `minimize`, so it can be asked which line made a NaN. Somebody divides each
# pixel by its deviation over the batch. Some pixels are white in every digit.


# %%
def standardized(images):
    return (images - images.mean(0)) / images.std(0)


@jax.jit
def fragile_step(params, images, labels):
    def fragile(params):
        hidden = standardized(images).reshape(len(images), -1) @ params
        return cross_entropy(hidden, labels)

    value, gradient = jax.value_and_grad(fragile)(params)
    return params - 0.1 * gradient, value


weights = np.zeros((64, 10), np.float32)
fragile = ow.inspect(fragile_step, weights, *batches[0])
print(ow.find_nonfinite(fragile, [weights], batches[0]))

# %% [markdown]
# ## An equinox model
#
# The module is the parameter tree. Leaves that are not arrays stay what they are, and `state.parameters` is a module
# again.

# %%
mlp = eqx.nn.MLP(64, 10, 32, depth=1, key=jax.random.key(1))


def mlp_loss(model, images, labels):
    return cross_entropy(jax.vmap(model)(images.reshape(-1, 64)), labels)


step = ow.compile(ow.Adam(1e-2).minimize(mlp_loss, mlp, *batches[0]))
mlp_state, eqx_losses = step.init(mlp), []
for batch in batches:
    mlp_state, out = step(mlp_state, *batch)
    eqx_losses.append(float(out.loss))
mlp_state.parameters


# %%
@eqx.filter_jit
def eqx_step(model, opt_state, images, labels):
    value, gradients = eqx.filter_value_and_grad(mlp_loss)(model, images, labels)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return eqx.apply_updates(model, updates), opt_state, value


theirs, by_hand = (mlp, optimizer.init(eqx.filter(mlp, eqx.is_array))), []
for batch in batches:
    *theirs, value = eqx_step(*theirs, *batch)
    by_hand.append(float(value))

np.testing.assert_allclose(eqx_losses, by_hand, rtol=1e-3)
difference = np.abs(np.subtract(eqx_losses, by_hand)).max()
print(f"{len(batches)} losses, largest difference {difference:.1e}")

# %% [markdown]
# ## Over each other
#
# Left, the losses by hand in grey and those of Onward on top. Right, four digits and what was fetched from the middle
# of the flax model in its last step.

# %%
figure = plt.figure(figsize=(11, 3.6), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1.4, 1])
pairs = {"flax, batch norm": (flax_losses, optax_losses), "equinox": (eqx_losses, by_hand)}
for axis, (name, (ours, others)) in zip(left.subplots(1, 2, sharey=True), pairs.items(), strict=True):
    axis.plot(others, color="0.75", lw=6, label="optax by hand")
    axis.plot(ours, color="C0", label="Onward")
    axis.set(title=name, xlabel="step")
    axis.legend()
grid = right.subplots(4, 5)
for row, image, channels in zip(grid, batches[-1][0], fetched, strict=False):
    row[0].imshow(image[..., 0], cmap="gray_r")
    for axis, channel in zip(row[1:], np.moveaxis(channels, -1, 0), strict=False):
        axis.imshow(channel, cmap="coolwarm", vmin=-2, vmax=2)
for axis in grid.flat:
    axis.axis("off")
right.suptitle("digits, and four channels of strokes")
plt.show()
