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
# # Rewriting a model that you cannot edit
#
# A pattern is a small JAX function, and what should stand in its place is another one. `ow.rewrite` finds the pattern
# in a Program, in loops and `jax.checkpoint` as well, checks that both compute the same, and derives the gradient of the
# replacement. Three examples on one small transformer: an activation, an attention, a loss with a gradient of its own.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import onward as ow

LAYERS, HEADS, SIZE, VOCABULARY = 3, 2, 16, 96


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(q, k, v, mask):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)), v)


def cross_entropy(logits, labels):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], axis=-1))


def language_model(params, tokens, labels):
    """Someone's model: the layers are a scan, and nothing in it is meant to be exchanged."""
    x = params["table"][tokens]
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))

    def layer(x, w):
        q, k, v = (t.reshape(*t.shape[:2], HEADS, -1) for t in jnp.split(x @ w["qkv"], 3, -1))
        x = x + attention(q, k, v, mask).reshape(x.shape) @ w["out"]
        return x + gelu(x @ w["wide"]) @ w["narrow"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return cross_entropy(x @ params["table"].T, labels)


rng = np.random.default_rng(0)
shapes = {"qkv": (SIZE, 3 * SIZE), "out": (SIZE, SIZE), "wide": (SIZE, 4 * SIZE), "narrow": (4 * SIZE, SIZE)}
layers = {name: rng.normal(0, 0.1, (LAYERS, *shape)) for name, shape in shapes.items()}
params = jax.tree.map(jnp.float32, {"table": rng.normal(0, 0.3, (VOCABULARY, SIZE)), "layers": layers})
text = rng.integers(0, VOCABULARY, (8, 33)).astype("int32")
data = text[:, :-1], text[:, 1:]
program = ow.SGD(0.3).minimize(language_model, params, *data)


def trained(program, steps=10):
    step = ow.compile(program)
    state, losses = step.init(params), []
    for _ in range(steps):
        state, out = step(state, *data)
        losses.append(float(out.loss))
    return losses


expected = trained(program)

# %% [markdown]
# ## An activation
#
# The same activation under its own name. Where the pattern was found, and on what, is told before anything is changed.

# %%
print(*ow.graph.matches_of(program, gelu), sep="\n")
by_name = ow.rewrite(program, gelu, lambda x: jax.nn.gelu(x, approximate=True))

# %% [markdown]
# A replacement that computes something else is refused, with the place where it does.

# %%
try:
    ow.rewrite(program, gelu, lambda x: jax.nn.gelu(x, approximate=False))
except ow.ArgumentError as error:
    print(error)

# %% [markdown]
# If that is what you want, say how far it may be off.

# %%
exact = ow.rewrite(program, gelu, lambda x: jax.nn.gelu(x, approximate=False), tolerance=1e-3)

# %% [markdown]
# ## Attention
#
# JAX has attention as one function, which knows kernels of GPUs. `like` says what the pattern is called with; lengths do
# not matter, and the division by the root of `q.shape[-1]` is that of the place where it is found.


# %%
def by_jax(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])


head = jnp.ones((1, 4, 2, 8))
like = (head, head, head, jnp.ones((4, 4), bool))
with_kernel = ow.rewrite(by_name, attention, by_jax, like=like)

# %% [markdown]
# ## A loss with a gradient of its own
#
# The gradient of this loss is `softmax - one_hot`. Written so, the forward pass keeps nothing but the logits and one
# number a row. The rule is compared with the gradient of the pattern, as any replacement is.


# %%
@jax.custom_vjp
def lean(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def forward(logits, labels):
    return lean(logits, labels), (logits, labels)


def backward(saved, g):
    logits, labels = saved
    one_hot = labels[..., None] == jnp.arange(logits.shape[-1])
    return g * (jax.nn.softmax(logits) - one_hot) / labels.size, None


lean.defvjp(forward, backward)
like = jnp.ones((2, 3, 4)), jnp.ones((2, 3), "int32")
everything = ow.rewrite(with_kernel, cross_entropy, lean, like=like)

# %% [markdown]
# ## All three
#
# Each replacement was put behind the one before, so this is the model with all three. It trains as it was written.

# %%
found = trained(everything)
np.testing.assert_allclose(found, expected, rtol=1e-4)

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.plot(expected, color="0.75", lw=6, label="as it was written")
axis.plot(found, color="C0", label="rewritten")
axis.set(xlabel="step", ylabel="loss")
axis.legend()
plt.show()
