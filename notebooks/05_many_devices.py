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
# # Many devices
#
# The same Program on all devices of a machine: what is sent is in the graph, how gradients are merged is a
# choice, and the result is that of one device.
#
# Where there are no GPUs, JAX shows parts of the processor as devices. They are good for trying, not for speed. The
# picture at the end shows what each way of merging sends, and how it learns.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onward as ow

digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int32)
print(f"{jax.device_count()} devices, {len(images)} digits")

# %% [markdown]
# ## One device, then eight
#
# A pure loss, as always. It takes `example_weight`, how much each example counts, so that any batch can be
# spread over any number of devices: what is missing is filled up with examples of weight 0.


# %%
def loss(params, images, labels, example_weight):
    hidden = jax.nn.relu(images @ params["hidden"])
    log_p = jax.nn.log_softmax(hidden @ params["head"])
    surprise = -jnp.take_along_axis(log_p, labels[:, None], 1)[:, 0]
    return jnp.sum(example_weight * surprise) / jnp.sum(example_weight)


rng = np.random.default_rng(0)
params = {
    "hidden": rng.normal(0, 0.1, (64, 128)).astype(np.float32),
    "head": rng.normal(0, 0.1, (128, 10)).astype(np.float32),
}
batch = images[:128], labels[:128], np.ones(128, np.float32)
alone = ow.Momentum(0.1).minimize(loss, params, *batch)
program = ow.replicate(alone, devices=8)
print(program)

# %% [markdown]
# The shapes are those on one device: 16 of the 128 rows. Three lines are new, and say `collective`: the mean of
# each gradient over all devices, as soon as it is made, and of the loss. The plan says what that costs.

# %%
print(ow.plan(program))

# %% [markdown]
# `compile` and `step` are used as before. You feed the whole batch and get whole parameters back.

# %%
data = {"images": images, "labels": labels, "example_weight": np.ones(len(images), np.float32)}


def trained(program, batches):
    step = ow.compile(program)
    state, losses = step.init(params), []
    for batch in batches:
        state, out = step(state, **batch)
        losses.append(float(out.loss))
    return losses


epoch = list(ow.batches(data, 128, shuffle=True))
one, many = trained(alone, epoch), trained(program, epoch)
print("largest difference of a loss:", max(abs(a - b) for a, b in zip(one, many, strict=True)))
print("the last batch has", len(epoch[-1]["labels"]), "rows, which eight devices do not divide")

# %% [markdown]
# ## What each device keeps
#
# Every device has all parameters and, with Momentum, a slot as large. With `Sharded()` each device keeps one
# eighth of the slots, updates that part of the parameters, and gets the rest from the others; no more is sent.

# %%
print(ow.plan(ow.replicate(alone, 8, ow.Sharded())))

# %% [markdown]
# ## Other ways to merge
#
# A strategy is a small class of `ow.merge`. Some send less and are not exact; what they leave out is kept and
# sent later (`TopK`, `LowPrecision`, `PowerSGD`), or the devices train for themselves and meet now and then
# (`LocalSGD`, `DiLoCo`).

# %%
strategies = {
    "Average()": ow.Average(),
    "Sharded()": ow.Sharded(),
    "LowPrecision()": ow.merge.LowPrecision(),
    "TopK(0.05)": ow.merge.TopK(0.05),
    "PowerSGD(2)": ow.merge.PowerSGD(2),
    "LocalSGD(8)": ow.merge.LocalSGD(8),
    "DiLoCo(8)": ow.merge.DiLoCo(8, outer=ow.Momentum(0.7, 0.5, nesterov=True)),
}
sent, losses = {}, {}
for name, merge in strategies.items():
    replicated = ow.replicate(alone, 8, merge)
    sent[name] = ow.plan(replicated).sent
    losses[name] = trained(replicated, epoch[:-1] * 2)
    print(f"{name:15}  {sent[name] / 1024:6.1f} KiB a step   loss {np.mean(losses[name][-5:]):.3f}")

# %% [markdown]
# ## One of your own
#
# `merge` takes the gradient of this device and returns the one that all share. Here the sign of each device's
# gradient votes (Bernstein et al., signSGD with majority vote, 2018).


# %%
class MajorityVote(ow.Merge):
    exact = False

    def merge(self, gradient, kept, devices):
        return jnp.sign(devices.sum(jnp.sign(gradient))), kept


voted = ow.replicate(ow.SGD(1e-3).minimize(loss, params, *batch), 8, MajorityVote())
print(next(op for op in voted.ops if op.type == "majority_vote"))

# %% [markdown]
# A merge that is forgotten, or that leaves the devices with different results, is found before anything runs:


# %%
class Forgotten(ow.Merge):
    def merge(self, gradient, kept, devices):
        return gradient, kept


try:
    ow.replicate(alone, 8, Forgotten())
except ow.GraphError as error:
    print(error)

# %% [markdown]
# ## In a training loop
#
# `Trainer` and `train` take `devices=` and `merge=`. A checkpoint belongs to the parameters, not to the devices:
# what eight devices saved, two can resume. On several machines, or to try several processes on this one, start
# the same script with `onward launch -n 2 script.py`.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
left.barh(list(sent), [size / 1024 for size in sent.values()])
left.invert_yaxis()
left.set(xlabel="KiB that each device sends at a step")
for name, values in losses.items():
    right.plot(np.convolve(values, np.ones(5) / 5, "valid"), label=name)
right.set(xlabel="step", ylabel="loss", ylim=0)
right.legend(fontsize="small")
plt.show()
