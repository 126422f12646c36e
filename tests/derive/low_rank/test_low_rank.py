"""Low-rank factors beside each product, against the same written by hand in plain JAX and three libraries."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import onward as ow

RANK, ALPHA, RATE = 2, 4.0, 0.1
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(0, 0.5, shape).astype("float32")


X, Y = normal(8, 5, 6), normal(8, 5, 6)


def plain():
    """Einsums with several axes; a weight that comes first, one transposed and cast, one for each group."""
    params = {
        "attention": {"wq": normal(6, 2, 3), "wo": normal(2, 3, 6), "b": normal(6)},
        "mlp": {"w1": normal(8, 6), "w2": normal(6, 2, 4)},
        "groups": normal(5, 6, 6),
    }

    def loss(p, x, y):
        q = jnp.einsum("btd,dhk->bthk", x, p["attention"]["wq"])
        x = x + jnp.einsum("bthk,hkd->btd", jnp.tanh(q), p["attention"]["wo"]) + p["attention"]["b"]
        h = jnp.tanh(jax.vmap(jax.vmap(lambda v: p["mlp"]["w1"] @ v))(x))
        x = x + h @ p["mlp"]["w2"].reshape(6, 8).T.astype(jnp.float32)
        return jnp.mean((jnp.einsum("btd,tde->bte", x, p["groups"]) - y) ** 2)

    return loss, params


class Block(nn.Module):
    """A layer of attention in flax."""

    @nn.compact
    def __call__(self, x):
        """Attention and a dense layer, which casts what it reads."""
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6)(x)
        return nn.Dense(6, dtype=jnp.float32)(x)


def flax():
    model = Block()

    def loss(params, x, y):
        return jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    return loss, model.init(jax.random.key(0), X)["params"]


def haiku():
    def network(x):
        return x + hk.MultiHeadAttention(2, 3, w_init=hk.initializers.RandomNormal(), model_size=6)(x, x, x)

    model = hk.without_apply_rng(hk.transform(network))

    def loss(params, x, y):
        return jnp.mean((model.apply(params, x) - y) ** 2)

    return loss, model.init(jax.random.key(0), X)


class Mixer(eqx.Module):
    """Attention and a linear layer of equinox, which keep outputs before inputs."""

    attention: eqx.nn.MultiheadAttention
    linear: eqx.nn.Linear

    def __call__(self, x):
        """The layer for one sequence."""
        return jax.vmap(self.linear)(x + self.attention(x, x, x))


def equinox():
    one, two = jax.random.split(jax.random.key(0))
    model = Mixer(eqx.nn.MultiheadAttention(2, 6, key=one), eqx.nn.Linear(6, 6, key=two))

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    return loss, model


OUTPUTS_FIRST = ("mlp/w1", "mlp/w2")  # and each ``weight`` of equinox
LIBRARIES = {"plain": plain, "flax": flax, "haiku": haiku, "equinox": equinox}


def by_hand(loss, params, program, state, steps):
    """The same training with ``jax.grad`` and optax: weights and factors are put together before the loss.

    The first values of the factors are taken from the State, and nothing else of Onward.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = ["/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path) for path, _ in paths]
    factors = {v.name: jnp.asarray(state[v]) for v in program.parameters}
    leaves = [leaf for _, leaf in paths]

    def put_together(factors):
        return jax.tree.unflatten(
            treedef, [adapted(n, w, factors) for n, w in zip(names, leaves, strict=True)]
        )

    def adapted(name, w, factors):
        if f"{name}/low_rank_a" not in factors:
            return w
        a, b = factors[f"{name}/low_rank_a"], factors[f"{name}/low_rank_b"]
        if name == "groups":
            return w + ALPHA / RANK * jnp.einsum("tdr,tre->tde", a, b)
        delta = jnp.tensordot(a, b, 1)
        if name in OUTPUTS_FIRST or name.endswith("/weight"):
            delta = jnp.moveaxis(delta, -1, 0)
        return w + ALPHA / RANK * delta.reshape(w.shape)

    optimizer = optax.sgd(RATE)
    kept = optimizer.init(factors)
    run = jax.jit(jax.value_and_grad(lambda f: loss(put_together(f), X, Y)))
    losses = []
    for _ in range(steps):
        value, gradients = run(factors)
        losses.append(value)
        updates, kept = optimizer.update(gradients, kept)
        factors = optax.apply_updates(factors, updates)
    return losses, factors, put_together(factors)


@pytest.fixture(scope="module", params=LIBRARIES)
def trained(request):
    loss, params = LIBRARIES[request.param]()
    program = ow.SGD(RATE).minimize(ow.low_rank(loss, params, X, Y, rank=RANK, alpha=ALPHA))
    step = ow.compile(program)
    state = step.init(params, seed=3)
    expected = by_hand(loss, params, program, state, 3)
    losses = []
    for _ in range(3):
        state, out = step(state, X, Y)
        losses.append(out.loss)
    return loss, params, program, state, losses, expected


def test_it_is_what_one_writes_by_hand(trained):
    *_, state, losses, (expected, factors, _) = trained
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len(factors) >= 6
    for name, value in factors.items():
        np.testing.assert_allclose(state[name], value, rtol=2e-4, atol=2e-5, err_msg=name)


def test_the_merged_weights_are_those_put_together_by_hand(trained):
    _, params, program, state, _, (_, _, together) = trained
    merged = ow.merge_low_rank(program, state)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(merged), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_is_frozen_stays_bit_by_bit_and_has_no_gradient_and_no_slots(trained):
    _, params, program, state, *_ = trained
    frozen = [v for v in program.state if v.kind is ow.Kind.FROZEN]
    arrays = jax.tree.leaves(eqx.filter(params, eqx.is_array))
    for before, v in zip(arrays, frozen, strict=True):
        np.testing.assert_array_equal(before, state[v])
    assert {p for p, _ in program.gradients} == set(program.parameters)
    assert set(frozen).isdisjoint(program.next_state)
    assert not any(f"grad({v.name})" in program.variables for v in frozen)
