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
# # Trainers and parameter servers
#
# One Program, cut into a trainer and servers that run in processes of their own, on this machine or on many; and
# the numbers are those of one device, whichever process dies on the way.
#
# A trainer reads batches and computes gradients. A server keeps a part of the parameters and updates it. The picture
# at the end shows a training in which a server is killed, laid over one in which nothing happens.

# %%
import os
import signal
import time
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onward as ow

rng = np.random.default_rng(0)
digits = load_digits()
order = rng.permutation(len(digits.data))
images = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)
train, test = slice(0, 1536), slice(1536, None)

# %% [markdown]
# ## The cut
#
# A pure loss and an optimizer, as always.


# %%
def network(params, images):
    with jax.named_scope("hidden"):
        hidden = jax.nn.relu(images @ params["hidden"])
    with jax.named_scope("head"):
        return hidden @ params["head"]


def loss(params, images, labels):
    logits = network(params, images)
    with jax.named_scope("surprise"):
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


def accuracy(params):
    return float(jnp.mean(network(params, images[test]).argmax(1) == labels[test]))


params = {
    "hidden": rng.normal(0, 0.1, (64, 32)).astype(np.float32),
    "head": rng.normal(0, 0.1, (32, 10)).astype(np.float32),
}
program = ow.Momentum(0.05).minimize(loss, params, images[:32], labels[:32])
cut = ow.split(program, servers=2, trainers=2)
ow.show(cut.trainer, depth=1)

# %% [markdown]
# The trainer has the forward and the backward pass, between a `recv` from each server and a `send` to it. What it
# does not have is an update. That is all a server has: this one owns 37 of the rows of `hidden`, and takes the
# mean of two trainers' gradients.

# %%
print(cut.servers[1])

# %% [markdown]
# The learning rate and the step have one owner, the first server; the trainers bring the second one what it reads
# of them. What travels and who keeps what is known before anything runs:

# %%
print(ow.plan(cut))

# %% [markdown]
# ## In step
#
# `cluster.train` starts Ray here, a process for each trainer and each server, and ends all of them. The trainers
# take turns with the batches. In the mode `sync`, the default, an update is the mean of both gradients, which
# both computed at the same parameters. So two trainers with batches of 32 are one device with batches of 64.
#
# (Ray takes seconds to start. To train more than once, keep it open with an `Engine`.)


# %%
def batches_of(size):
    return ow.batches({"images": images[train], "labels": labels[train]}, size)


stack = ExitStack()
stack.enter_context(ow.cluster.Engine())
settings: dict[str, Any] = {"parameters": params, "trainers": 2, "servers": 2, "epochs": 3, "progress": False}
sync = ow.cluster.train(program, batches_of(32), **settings)

step = ow.compile(program)
state = step.init(params)
for _ in range(3):
    for batch in batches_of(64):
        state, out = step(state, **batch)

for name in params:
    np.testing.assert_allclose(sync.model[name], state[name], rtol=1e-4, atol=1e-6)
print(f"{sync.versions} updates, accuracy {accuracy(sync.model.parameters):.3f}")
print(f"sent at each step: {sync.history['sent'].max():.0f} bytes; planned: {ow.plan(cut).pushed}")

# %% [markdown]
# ## At their own pace
#
# If one trainer is slower, the others wait for it. In the mode `async` none does: each gradient is an update at
# once, at parameters that have moved on meanwhile, by `staleness` updates. `Bounded(4)` lets nobody get more than
# four steps ahead of the slowest: it bounds the `lag`, in steps, and so the staleness, in updates. A reader that
# takes two arguments reads for one trainer; that of trainer 1 is slow.


# %%
def uneven(trainer, trainers):
    for n, batch in enumerate(batches_of(32)):
        if n % trainers == trainer:
            time.sleep(0.04 * trainer)
            yield batch


runs = {}
for mode in ("async", ow.cluster.Bounded(4)):
    run = runs[str(mode)] = ow.cluster.train(program, uneven, mode=mode, **{**settings, "servers": 1})
    print(
        f"{mode!s:24} staleness at most {run.history['staleness'].max():2.0f}   "
        f"lag at most {run.history['lag'].max():2.0f}   accuracy {accuracy(run.model.parameters):.3f}"
    )

# %% [markdown]
# ## A server is killed
#
# `start` returns at once. A `snapshot` is a Model of its own, with the parameters as they are now. When a third of
# the updates are made, server 1 is killed with a signal that nobody can catch.


# %%
def slowly():
    for batch in batches_of(32):
        time.sleep(0.02)
        yield batch


run = ow.cluster.start(program, slowly, **settings)
accuracies = {}
while run.is_running and (version := run.versions[0]) < 24:
    if version >= 8 * len(accuracies):
        accuracies[version] = accuracy(run.snapshot().parameters)
    time.sleep(0.05)

killed_at = run.versions[1]
os.kill(run.servers[1].pid, signal.SIGKILL)
run.wait()
stack.close()
for version, value in accuracies.items():
    print(f"after {version:2} updates  accuracy {value:.3f}")
print(*run.events, sep="\n")

# %% [markdown]
# A server writes its record, with the gradients that are in it, before it tells anybody. The one that took its
# place read that record; the trainers sent again what was not in it, and nothing that was. So the parameters are
# those of the training that nothing happened to: not nearly, but bit for bit.

# %%
for name in params:
    np.testing.assert_array_equal(run.model[name], sync.model[name])
print(f"{run.versions} updates, all parameters equal, accuracy {accuracy(run.model.parameters):.3f}")

# %% [markdown]
# ## Tables travel by rows
#
# Of an embedding table a batch reads some rows. These alone are asked for, and only their gradients are sent: the plan
# tells how many bytes for each of them. The table itself never travels.
# `lazy=` leaves the slots of all other rows alone too, which is cheaper, and not the same as momentum on all rows.


# %%
def scores(params, words):
    return jnp.mean((params["table"][words] @ params["out"]) ** 2)


table = {
    "table": rng.normal(size=(100_000, 16)).astype(np.float32),
    "out": np.ones((16, 1), np.float32),
}
words = rng.integers(0, 100_000, 64).astype(np.int32)
embedding = ow.Momentum(0.1).minimize(scores, table, words)
print(ow.plan(ow.split(embedding, servers=2, lazy=["table"])))

# %% [markdown]
# ## On many machines
#
# `address="host:6379"` joins a Ray cluster; everything else stays. Onward must be installed on all of its machines,
# and `folder=` be a place that all of them reach, so that a server can come back on another one.


# %%
def by_update(run):
    """The mean loss of the trainers at each update."""
    steps, losses = run.history["step"], run.history["loss"]
    return [losses[steps == n].mean() for n in np.unique(steps)]


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
left.plot(by_update(sync), color="0.75", linewidth=5, label="nothing happens")
left.plot(by_update(run), label="server 1 is killed")
left.axvline(killed_at, color="tab:red", linestyle=":")
left.annotate("kill -9", (killed_at + 1, 2.0), color="tab:red")
left.set(xlabel="update", ylabel="loss of both trainers")
left.legend()
for name, other in runs.items():
    fast = other.history["trainer"] == 0
    right.plot(other.history["step"][fast], other.history["lag"][fast], label=name)
right.set(xlabel="step of the fast trainer", ylabel="steps ahead of the slow one")
right.legend()
plt.show()
