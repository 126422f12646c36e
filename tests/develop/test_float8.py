"""Products in float8: beside plain JAX by hand, what is clipped and what is not finite, and other transforms."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 16)).astype("float32")
Y = RNG.normal(size=(8, 4)).astype("float32")
WEIGHTS = {  # small enough that a step of 0.01 goes down
    "a": 0.2 * RNG.normal(size=(16, 32)).astype("float32"),
    "b": 0.2 * RNG.normal(size=(32, 16)).astype("float32"),
    "c": 0.2 * RNG.normal(size=(16, 4)).astype("float32"),
}
LOW, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def network(w, x, y):
    h = jax.nn.relu(x @ w["a"]) @ w["b"]
    return jnp.mean((h @ w["c"] - y) ** 2)


def minimized(function=network, w=None, *data, **options):
    w, data = WEIGHTS if w is None else w, data or (X, Y)
    return ow.mixed_precision(ow.SGD(0.01).minimize(function, w, *data), "float8", **options)


@cache
def trained(scaling):
    return minimized(scaling=scaling)


def scale_by_hand(x, most):
    amax = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)).astype(jnp.float32)
    return jnp.where(amax > 0, jnp.maximum(amax / most, 2.0**-126), 1)


def by_hand(spec, scale_of_x=None, scale_of_w=None):
    """A product as the papers have it, for an einsum and those of its two gradients, with ``custom_vjp``."""
    result, of_x, of_w = spec

    def low(x, scale, dtype, most):
        y = x.astype(jnp.float32) / scale
        return jnp.where(jnp.isfinite(y), jnp.clip(y, -most, most), y).astype(dtype).astype(jnp.float32)

    def forward(x, w):
        x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        s = scale_by_hand(x, 448.0) if scale_of_x is None else scale_of_x
        t = scale_by_hand(w, 448.0) if scale_of_w is None else scale_of_w
        x, w = low(x, s, LOW, 448.0), low(w, t, LOW, 448.0)
        return (jnp.einsum(result, x, w) * s * t).astype(jnp.bfloat16), (x, w, s, t)

    def backward(saved, g):
        x, w, s, t = saved
        u = scale_by_hand(g, 57344.0)
        g = low(g, u, GRADIENT, 57344.0)
        grads = jnp.einsum(of_x, g, w) * u * t, jnp.einsum(of_w, g, x) * u * s
        return tuple(found.astype(jnp.bfloat16).astype(jnp.float32) for found in grads)

    product = jax.custom_vjp(lambda x, w: forward(x, w)[0])
    product.defvjp(forward, backward)
    return product


SPECS = {
    "matmul": ("ij,jk->ik", (8, 16), (16, 4), ("ij,jk->ik", "ik,jk->ij", "ik,ij->jk")),
    "transposed": ("ji,kj->ik", (16, 8), (4, 16), ("ji,kj->ik", "ik,kj->ji", "ik,ji->kj")),
    "batched": ("bij,bjk->bik", (3, 8, 16), (3, 16, 4), ("bij,bjk->bik", "bik,bjk->bij", "bik,bij->bjk")),
    "two sums": ("iab,bak->ik", (8, 4, 6), (6, 4, 5), ("iab,bak->ik", "ik,bak->iab", "ik,iab->bak")),
}


@pytest.mark.parametrize("case", SPECS)
def test_a_product_and_its_gradients_are_those_by_hand(case):
    """Bit for bit but for the order of sums, which float32 shows after its 20th bit."""
    spec, of_x, of_w, all_three = SPECS[case]
    x, w = (RNG.normal(size=shape).astype("float32") for shape in (of_x, of_w))
    weight = jnp.asarray(RNG.normal(size=jax.eval_shape(lambda: jnp.einsum(spec, x, w)).shape), jnp.float32)

    def loss(p, weight):
        return jnp.sum(jnp.einsum(spec, p["x"], p["w"]).astype(jnp.float32) * weight)

    def plain(p, weight):
        return jnp.sum(by_hand(all_three)(p["x"], p["w"]).astype(jnp.float32) * weight)

    program = minimized(loss, {"x": x, "w": w}, weight, where="*")
    assert "float8_product" in [op.type for op in program.ops]
    step = ow.compile(program, fetch=[program.loss, *(g for _, g in program.gradients)])
    _, out = step(step.init({"x": x, "w": w}), weight)
    value, grads = jax.jit(jax.value_and_grad(plain))({"x": x, "w": w}, weight)
    np.testing.assert_allclose(out[program.loss], value, rtol=2.0**-20)
    for p, g in program.gradients:
        np.testing.assert_allclose(out[g], grads[p.name], rtol=2.0**-7, err_msg=p.name)
        assert np.mean(np.asarray(out[g]) == np.asarray(grads[p.name])) > 0.99, p.name
