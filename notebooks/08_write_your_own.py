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
# # Write your own
#
# An optimizer, a transform of the graph and a way to merge gradients are each about ten lines. Each is checked here
# against something that is known: an optimizer that exists, the same model changed by hand, one device in place of
# eight. The picture at the end lays each pair over each other.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from dataclasses import replace
from fnmatch import fnmatch

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onward as ow

digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
order = np.random.default_rng(0).permutation(1728)
batches = [(images[i], labels[i]) for i in order.reshape(-1, 64)]


def network(params, images, hidden=jax.nn.relu):
    for i, w in enumerate(params[:-1]):
        with jax.named_scope(f"hidden_{i}"):
            images = hidden(images @ w)
    return images @ params[-1]


def loss(params, images, labels, hidden=jax.nn.relu):
    log_p = jax.nn.log_softmax(network(params, images, hidden))
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


rng = np.random.default_rng(0)
params = [rng.normal(0, 0.15, shape).astype(np.float32) for shape in ((64, 48), (48, 48), (48, 10))]


def trained(program):
    step = ow.compile(program)
    state, losses = step.init(params), []
    for batch in batches:
        state, out = step(state, *batch)
        losses.append(float(out.loss))
    return losses


def largest_difference(ours, others):
    return np.abs(np.subtract(ours, others)).max()


# %% [markdown]
# ## An optimizer
#
# `init` makes the slots of one parameter, `update` computes its next value. Fields annotated `Hyperparameter` are
# Variables, which a schedule may drive. This is Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023).


# %%
class Sign(ow.Optimizer):
    """Moves every number by the same length, in the direction on which the past and the present agree."""

    learning_rate: ow.Hyperparameter = 1e-3
    now: ow.Hyperparameter = 0.9
    later: ow.Hyperparameter = 0.99

    def init(self, parameter):
        return {"mean": jnp.zeros_like(parameter)}

    def update(self, parameter, gradient, slots):
        direction = jnp.sign(self.now * slots["mean"] + (1 - self.now) * gradient)
        mean = self.later * slots["mean"] + (1 - self.later) * gradient
        return parameter - self.learning_rate * direction, {"mean": mean}


mine = Sign(3e-3).minimize(loss, params, *batches[0])
print(*(target.op for target in mine.updates), sep="\n")

# %% [markdown]
# Everything that stands around optimizers works with it: schedules, groups, rules, the plan. Lion is also among those
# that come along, so the two can be compared.

# %%
sign, lion = trained(mine), trained(ow.Lion(3e-3).minimize(loss, params, *batches[0]))
print(f"largest difference of {len(lion)} losses: {largest_difference(sign, lion)}")
np.testing.assert_allclose(sign, lion, rtol=1e-5)

# %% [markdown]
# ## A transform
#
# A Program is data: ops in order, each with the Variables that it reads and makes. A transform is a function that
# returns another Program. This one puts a function behind every activation of a name, and lets later ops read what it
# returns. Where do the new ops come from? From a trace of that function.


# %%
@ow.transform
def behind(program, pattern, function):
    """Adds ops behind some activations, and re-wires what reads these. Changes no op."""
    instead, ops = {}, []
    for op in program.ops:
        ops.append(replace(op, inputs=tuple(instead.get(v, v) for v in op.inputs)))
        for v in (v for v in op.outputs if fnmatch(v.name, pattern)):
            part = ow.trace(function, jax.ShapeDtypeStruct(v.shape, v.dtype))
            new = {part.parameters[0]: v}
            for added in part.ops:
                new |= {x: replace(x, name=f"{v.name}/{function.__name__}/{x.name}") for x in added.outputs}
                inputs, outputs = (tuple(new[x] for x in ends) for ends in (added.inputs, added.outputs))
                ops.append(replace(added, inputs=inputs, outputs=outputs, scope=op.scope))
            instead[v] = new[part.outputs[0]]
    return replace(program, ops=tuple(ops))


# %% [markdown]
# `ow.transform` checks the result, and remembers what was done for batches of another shape.
#
# With it a network learns to live with activations of few bits, and its code does not know. Gradients pass as if
# nothing was rounded (Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons, 2013).


# %%
def four_levels(x):
    rounded = jnp.round(jnp.clip(x, 0, 1.5) * 2) / 2
    return x + jax.lax.stop_gradient(rounded - x)


forward = ow.trace(loss, params, *batches[0])
coarse = behind(forward, "hidden_*/relu", four_levels)
ow.diff(forward, coarse)

# %% [markdown]
# The backward pass is derived afterwards, of the changed graph. The check: the same change, made in the model by hand.

# %%
optimizer = Sign(3e-3)
by_transform = trained(optimizer.minimize(coarse))


def changed_by_hand(params, images, labels):
    return loss(params, images, labels, lambda x: four_levels(jax.nn.relu(x)))


by_hand = trained(optimizer.minimize(changed_by_hand, params, *batches[0]))
print(f"largest difference of {len(by_hand)} losses: {largest_difference(by_transform, by_hand)}")
np.testing.assert_allclose(by_transform, by_hand, rtol=1e-4)

# %% [markdown]
# ## A merge
#
# On many devices `merge` takes the gradient of this device and returns the one that all of them share. `devices` has
# the collectives. This one is a ring in two halves: each device sums up one part of the gradient, then collects the
# parts of the others. What is sent is in the plan before anything runs.


# %%
class ByParts(ow.Merge):
    def merge(self, gradient, kept, devices):
        part = devices.scatter_mean(devices.padded(gradient))
        return devices.join(part, gradient.shape), kept


eight = ow.replicate(optimizer.minimize(coarse), 8, ByParts())
print(ow.plan(eight))

# %% [markdown]
# All three at once: your optimizer, your transform and your merge, on eight devices, beside one.

# %%
on_eight = trained(eight)
print(f"largest difference of {len(on_eight)} losses: {largest_difference(on_eight, by_transform)}")
np.testing.assert_allclose(on_eight[:5], by_transform[:5], rtol=1e-4)

# %% [markdown]
# ## Laid over each other

# %%
pairs = {
    "optimizer": (("Lion", lion), ("Sign", sign)),
    "transform": (("changed by hand", by_hand), ("behind(...)", by_transform)),
    "merge": (("1 device", by_transform), ("8 devices, ByParts()", on_eight)),
}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
for axis, (title, ((known, expected), (own, found))) in zip(axes, pairs.items(), strict=True):
    axis.plot(expected, color="0.75", lw=6, label=known)
    axis.plot(found, color="C0", label=own)
    axis.set(title=f"your own {title}", xlabel="step")
    axis.legend()
axes[0].set_ylabel("loss")
plt.show()
