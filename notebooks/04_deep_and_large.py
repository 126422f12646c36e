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
# # Deep and large
#
# A deep network takes long to compile, and a large one does not fit. What helps are transforms of the graph: roll,
# recompute, accumulate, mixed precision. None of them touches the model. Here each is measured on a transformer of
# 8 blocks, beside the same training step written by hand with `jax.jit`. The picture at the end shows the time to
# compile and the memory that each of them takes.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import onward as ow

# %% [markdown]
# ## A deep transformer
#
# It reads a digit as a text of 64 words, each one of 17 greys. Plain JAX, with a Python loop over the blocks.

# %%
BLOCKS, WIDTH, BATCH = 8, 32, 16
digits = load_digits()
texts = digits.images.reshape(-1, 64).astype(np.int32)
batch = texts[:BATCH], digits.target[:BATCH].astype(np.int32)


def normalized(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def attention(block, x):
    q, k, v = jnp.split(x @ block["qkv"], 3, -1)
    return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v @ block["out"]


def loss(params, texts, labels):
    x = params["words"][texts] + params["places"]
    for block in params["blocks"]:
        x = x + attention(block, normalized(x))
        x = x + jax.nn.relu(normalized(x) @ block["wide"]) @ block["narrow"]
    log_p = jax.nn.log_softmax(normalized(x).mean(1) @ params["head"])
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


rng = np.random.default_rng(0)


def weight(rows, columns):
    return rng.normal(0, 0.3 * rows**-0.5, (rows, columns)).astype(np.float32)


SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
SHAPES |= {"wide": (WIDTH, 4 * WIDTH), "narrow": (4 * WIDTH, WIDTH)}
params = {
    "words": weight(17, WIDTH),
    "places": weight(64, WIDTH),
    "blocks": [{name: weight(*shape) for name, shape in SHAPES.items()} for _ in range(BLOCKS)],
    "head": weight(WIDTH, 10),
}

# %% [markdown]
# ## The yardstick
#
# The training step that one writes without Onward. XLA tells how much temporary memory a compiled step takes.


# %%
def by_hand(params, batch):
    value, gradients = jax.value_and_grad(loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


seconds, mebibytes, losses = {}, {}, {}


def measure(name, compiled):
    start = time.process_time()
    step, state, memory = compiled()
    seconds[name] = time.process_time() - start
    mebibytes[name] = memory.temp_size_in_bytes / 2**20
    losses[name] = []
    for _ in range(3):
        state, value = step(state, batch)
        losses[name].append(float(value))
    print(f"{name}: {seconds[name]:.1f} CPU seconds to compile, {mebibytes[name]:.1f} MiB")
    print("losses", losses[name])


def compiled_by_hand():
    state = jax.tree.map(jnp.array, params)
    step = jax.jit(by_hand, donate_argnums=0).lower(state, batch).compile()
    return step, state, step.memory_analysis()


measure("by hand", compiled_by_hand)

# %% [markdown]
# The same as a Program. What memory it takes can be told before anything is compiled: each array in it has a size, a
# first and a last op.

# %%
program = ow.SGD(0.1).minimize(loss, params, *batch)
as_written = ow.memory(program, tune=False)  # by default it is told of what compile makes: a loop
print(f"{len(program.ops)} ops, {as_written.peak / 2**20:.1f} MiB at the peak")
as_written

# %% [markdown]
# ## Roll and recompute
#
# `roll` finds the run of ops that repeats, 8 times, and makes it one loop over stacked parameters. A loop takes as
# long to compile as one block. `recompute` keeps less for the backward pass, and computes the rest again where it is
# needed. On a CPU `compile` does both where they gain something, as here; `roll(program)` and
# `recompute(program, budget=...)` are the same by your own choice. What is measured is all that `compile` does.


# %%
def measured(name, program, **options):
    def compiled():
        step = ow.compile(program, **options)
        state = step.init(params)
        return (
            lambda state, batch: as_by_hand(step(state, *batch)),
            state,
            step.executable(state, *batch).memory,
        )

    measure(name, compiled)


def as_by_hand(result):
    state, out = result
    return state, out.loss


measured("rolled, recomputed", program)
np.testing.assert_allclose(losses["rolled, recomputed"], losses["by hand"], rtol=1e-4)

# %% [markdown]
# Four times as deep. The plan says what is left to compile, and how the parameters lie in memory: those of all blocks
# one behind the other, so that the loop reads them as they are. The names stay, and so do the losses.

# %%
deep = ow.SGD(0.1).minimize(loss, params | {"blocks": params["blocks"] * 4}, *batch)
start = time.process_time()
step = ow.compile(deep)
spent = time.process_time() - start
print(f"compiled in {spent:.1f} CPU seconds")
print(step.plan())

# %% [markdown]
# ## Accumulate
#
# A batch as four micro-batches one after the other, and one update: the memory of a quarter, the gradient of all. Here
# it stands alone, without a rolled network, to show what it does by itself.

# %%
accumulated = ow.accumulate(program, 4)
measured("accumulated", accumulated, roll=False, tune=False)
np.testing.assert_allclose(losses["accumulated"], losses["by hand"], rtol=1e-4)
micro_batches = accumulated.ops[0]
print(micro_batches.type, "runs", len(micro_batches.subprograms["micro_batch"].ops), "ops four times")

# %% [markdown]
# ## Mixed precision
#
# Matrix products in bfloat16, sums and updates in float32. On a GPU or TPU that is faster, and the arrays kept for the
# backward pass are half as large. A CPU has no such arithmetic, and XLA converts there and back. The losses are equal
# to the three digits that bfloat16 holds.

# %%
mixed = ow.mixed_precision(program)
float32, bfloat16 = (ow.memory(p, tune=False).peak / 2**20 for p in (program, mixed))
print(f"kept apart from any loop: {float32:.1f} MiB in float32, {bfloat16:.1f} MiB in mixed precision")
measured("mixed, rolled, recomputed", mixed)
np.testing.assert_allclose(losses["mixed, rolled, recomputed"], losses["by hand"], rtol=3e-2)

# %% [markdown]
# ## What each of them takes
#
# The transforms compose: `ow.accumulate(ow.mixed_precision(program), 4)` is a Program like any other.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3), sharey=True, layout="constrained")
colours = ["0.6", "C0", "C1", "C2"]
for axis, values, what in zip(axes, (mebibytes, seconds), ("MiB", "CPU seconds"), strict=True):
    bars = axis.barh(list(values), list(values.values()), color=colours)
    axis.bar_label(bars, fmt="%.1f", padding=3)
    axis.set(xlabel=what)
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)
axes[0].invert_yaxis()
axes[0].set_title("temporary memory of a training step")
axes[1].set_title("time to compile it")
plt.show()
