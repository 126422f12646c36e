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
# # Seeing a training program
#
# Where do memory and arithmetic go? What is kept for the backward pass? Which line made this NaN? What did that
# transform change? And what does the training step do that you wrote years ago, with another library? A Program
# is a graph of forward, backward and update, so each of these is one call. The picture at the end draws a step that was
# written with optax, in the same way as one of Onward's.
#
# The model: a small vision transformer on handwritten digits, each image cut into 16 patches. It is plain JAX;
# `jax.named_scope` gives its parts names.

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import onward as ow

digits = load_digits()
patches = (digits.images / 16).reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4).astype(np.float32)
labels = digits.target.astype(np.int32)
BLOCKS, WIDTH = 3, 32


def normalized(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)


def attention(block, x):
    q, k, v = (x @ block[name] for name in ("query", "key", "value"))
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) / WIDTH**0.5) @ v @ block["out"]


def loss(params, patches, labels):
    with jax.named_scope("embed"):
        x = patches @ params["patch"] + params["place"]
    for i, block in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{i}"):
            with jax.named_scope("attention"):
                x = x + attention(block, normalized(x))
            with jax.named_scope("mlp"):
                x = x + jax.nn.gelu(normalized(x) @ block["wide"]) @ block["narrow"]
    with jax.named_scope("head"):
        log_p = jax.nn.log_softmax(normalized(x).mean(1) @ params["head"])
        return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


rng = np.random.default_rng(0)


def weight(rows, columns):
    return rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)


SHAPES = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
SHAPES |= {"wide": (WIDTH, 4 * WIDTH), "narrow": (4 * WIDTH, WIDTH)}
params = {
    "patch": weight(4, WIDTH),
    "place": 0.1 * weight(16, WIDTH),
    "blocks": [{name: weight(*shape) for name, shape in SHAPES.items()} for _ in range(BLOCKS)],
    "head": weight(WIDTH, 10),
}
batch = patches[:64], labels[:64]
program = ow.AdamW(2e-3).minimize(loss, params, *batch)

# %% [markdown]
# ## The whole step in one picture
#
# Three lanes: the forward pass runs down, the backward pass comes up on the other side, each gradient beside the
# op it belongs to, and the update stands where its parameter is read. The three blocks are alike, so they are one
# box. Click the plus on a box to open it, an op to see its types, cost and line; drag to pan; once clicked, turn
# the wheel to zoom.

# %%
ow.draw(program)

# %% [markdown]
# ## Where arithmetic and memory go
#
# Each op counts where people look for it: gradients and updates with their layer. Blocks that take the same are
# one row. Click a column to sort.

# %%
ow.summary(program)

# %% [markdown]
# Live memory over the step: what is saved for the backward pass piles up, and is used up on the way back. The
# table names what is alive at the peak, who made it, and who reads it last.

# %%
ow.memory(program)

# %% [markdown]
# The same with half of it computed again in the backward pass, on one scale.

# %%
lean = ow.recompute(program, scopes="block_*")
ow.memory(program).beside(ow.memory(lean))

# %% [markdown]
# ## What did that transform do?

# %%
ow.diff(program, ow.mixed_precision(program))

# %%
print(ow.diff(program, ow.replicate(program, devices=8)))

# %% [markdown]
# ## Watch while it trains
#
# Statistics are computed within the compiled step, every tenth step, and change nothing else.

# %%
watched = ow.watch(
    program, gradients="blocks/*/wide", updates="blocks/*/wide", statistics=["norm", "ratio"], every=10
)
step = ow.compile(watched)
state = step.init(params)
history = []
for epoch in range(2):
    order = np.random.default_rng(epoch).permutation(1728).reshape(-1, 64)
    state, outs = step.run(state, [(patches[i], labels[i]) for i in order])
    history += outs.watched
    print(f"epoch {epoch + 1}: loss {float(outs.loss.mean()):.3f}")
ow.plot_watched(history, statistics=["norm", "ratio"])

# %% [markdown]
# And the time, measured: how long the instructions of the compiled step took, by the scope they came from.

# %%
print(ow.profile(step, step.init(params), batch))

# %% [markdown]
# ## Which line made this NaN?
#
# Somebody gives the loss of each class a weight by its frequency, and takes the logarithm of a probability that
# can be zero.


# %%
def fragile(head, patches, labels, frequency):
    with jax.named_scope("weights"):
        weights = -jnp.log(frequency)
    with jax.named_scope("mean"):
        share = weights[labels] / weights.sum()
    log_p = jax.nn.log_softmax(patches.mean(1) @ head)
    return -jnp.mean(share[:, None] * jnp.take_along_axis(log_p, labels[:, None], 1))


frequency = jnp.array([0.1] * 9 + [0.0])
head = weight(4, 10)
broken = ow.compile(ow.SGD(0.1).minimize(fragile, head, *batch, frequency))
print(ow.find_nonfinite(broken, broken.init(head), (*batch, frequency)))

# %% [markdown]
# `compile(program, check_finite=True)` looks at every step, and says the same in its error.
#
# ## The step that you have already
#
# A training step by hand, with optax. Nothing of it is rewritten: `inspect` traces it, finds the passes by the
# marks that JAX leaves, and all of the above works on it.

# %%
optimizer = optax.adamw(2e-3)


@jax.jit
def training_step(params, opt_state, patches, labels):
    value, gradients = jax.value_and_grad(loss)(params, patches, labels)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


theirs = ow.inspect(training_step, params, optimizer.init(params), *batch)
ow.summary(theirs, depth=1)

# %%
ow.draw(theirs)
