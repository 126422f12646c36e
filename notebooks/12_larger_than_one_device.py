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
# # Larger than one device
#
# `replicate` copies all parameters to every device. A model whose state does not fit on one is split: `partition`
# says over which axes of a mesh, and JAX's own partitioner makes of that what each device computes. Here a small GPT
# is trained on eight devices, none of which may hold more than 512 KiB of a state of 1.6 MiB. The picture at the end
# shows what each device keeps, and that the losses are those of one device.
#
# The devices are parts of the processor, as in *Many devices*: good for trying, not for speed.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P

import onward as ow

BUDGET = 512 * 1024  # bytes of state on one device
LAYERS, WIDTH, CONTEXT = 4, 64, 32
text = "\n".join(topics.values()).encode("ascii", "replace")
letters = np.frombuffer(text, np.uint8)[: 16 * 16 * (CONTEXT + 1)].astype(np.int32) % 128
batches = letters.reshape(16, 16, CONTEXT + 1)

# %% [markdown]
# ## The model
#
# Plain JAX, for one device. Nothing in it knows of a mesh.


# %%
def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block(layer, x):
    q, k, v = jnp.split(norm(x) @ layer["attend"], 3, -1)
    seen = jnp.where(jnp.tri(CONTEXT, dtype=bool), q @ k.swapaxes(1, 2) / 8, -1e9)
    x = x + jax.nn.softmax(seen) @ v @ layer["mix"]
    return x + jax.nn.relu(norm(x) @ layer["up"]) @ layer["down"]


def loss(params, text):
    x = params["embed"][text[:, :-1]] + params["place"]
    for layer in params["layers"]:
        x = block(layer, x)
    return ow.layer.cross_entropy(norm(x) @ params["embed"].T, text[:, 1:])


rng = np.random.default_rng(0)


def weight(*shape):
    return rng.normal(0, 0.5 * shape[-2] ** -0.5, shape).astype(np.float32)


SHAPES = {
    "attend": (WIDTH, 3 * WIDTH),
    "mix": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
params = {
    "embed": weight(128, WIDTH),
    "place": weight(CONTEXT, WIDTH),
    "layers": [{name: weight(*shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)],
}
program = ow.roll(ow.Momentum(0.1).minimize(loss, params, batches[0]))
needed = sum(v.size * v.dtype.itemsize for v in program.state)
print(f"{needed / 1024:.0f} KiB of parameters and slots, {BUDGET / 1024:.0f} KiB for each device")

# %% [markdown]
# ## Split over the axis of the batch
#
# Every parameter by its longest dimension, over the axis that splits the batch too: that is known as FSDP, or ZeRO-3.
# What the optimizer keeps of a parameter follows it. The plan tells what each device keeps, before anything compiles.

# %%
split = ow.partition(program, {"data": 8}, {"*": "data"})
print(ow.plan(split))
assert needed > BUDGET

# %% [markdown]
# Parameters are needed whole where they are used, so devices send them to each other. The compiled step is read back:
# what stands in the loop over the layers runs once a layer, so that only one layer is whole at a time, in the forward
# pass and again in the backward pass.

# %%
found = ow.collectives(split)
in_loop = [c for c in found if c.times == LAYERS]
for c in in_loop:
    print(f"{c.kind:14} {c.bytes / 1024:6.1f} KiB, {c.times} times, for {c.values[0].op}")
print(f"{len(found)} collectives, {found.bytes / 2**20:.1f} MiB a step")

# %% [markdown]
# All memory of a device, with what is computed in between:

# %%
taken = ow.memory(split).each_device
for purpose, size in taken.items():
    print(f"{purpose:12} {size / 1024:7.1f} KiB")

# %% [markdown]
# ## Train, on one device and on eight
#
# The same steps. A State of eight devices is fetched by name as ever: whole where it is looked at, split where it is.


# %%
def trained(program):
    step = ow.compile(program)
    state, losses = step.init(params), []
    for batch in batches:
        state, out = step(state, batch)
        losses.append(float(out.loss))
    return state, losses


_, alone = trained(program)
state, losses = trained(split)
name = "layers/0/up"
print(name, state[name].shape, "of which a device has", state[name].addressable_shards[0].data.shape)
print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}")
print("largest difference of a loss:", max(abs(a - b) for a, b in zip(alone, losses, strict=True)))
np.testing.assert_allclose(losses, alone, rtol=1e-3)

first = jax.devices()[0]
kept = sum(s.data.nbytes for x in state.buffers for s in x.addressable_shards if s.device == first)
print(f"{kept / 1024:.0f} KiB of state on {first}")
assert kept < BUDGET

# %% [markdown]
# Another layout is another table. `P(None, "model")` for the matrices that widen and `P("model")` for those that narrow
# is tensor parallelism. Beside data parallelism, and in two stages that work at the same time, it takes 2 x 2 x 2
# devices; the numbers stay.

# %%
table = {"*/up": P("data", "model"), "*/down": P("model", "data"), "*": "data"}
cut = ow.pipeline(ow.partition(program, {"data": 2, "model": 2}, table), stages=2, micro_batches=4)
print(cut)
_, in_stages = trained(cut)
np.testing.assert_allclose(in_stages, alone, rtol=1e-3)

# %% [markdown]
# `replicate` and `partition` both compile to one computation for all devices. JAX's older way, `jax.pmap`, is a
# `jit` of `shard_map` since JAX 0.10; `compile(..., by="pmap")` still takes it, and `shard_map`, which is what runs
# unless it is asked for, is what we recommend.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
left.barh(["one device", "each of eight"], [needed / 1024, kept / 1024], color=["0.6", "C0"])
left.axvline(BUDGET / 1024, color="C3", linestyle="--", label="what a device may hold")
left.set(xlabel="KiB of parameters and slots")
left.invert_yaxis()
left.legend()
right.plot(alone, color="0.6", linewidth=4, label="one device")
right.plot(losses, color="C0", linewidth=1.2, label="eight devices")
right.set(xlabel="step", ylabel="loss")
right.legend()
plt.show()
