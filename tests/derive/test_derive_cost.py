"""Deriving is cheap: what was derived once is not derived again, in no layer and no Program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.lower import lower
from onward.derive import backward, differentiate

WIDTH = 6


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


def block(layer, x):
    x = x + jax.nn.softmax(jax.nn.silu(x @ layer["w"]))
    x = jax.vmap(clipped)(x) + jax.vmap(jax.nn.relu)(x)
    x = jax.lax.scan(lambda c, _: (jax.nn.relu(c) * 0.5 + c, None), x, None, length=2)[0]
    return jax.checkpoint(lambda x: jnp.tanh(x) * x)(x)


def loss(params, x):
    for layer in params:
        x = block(layer, x)
    return jnp.mean(x**2)


def parameters(layers):
    rng = np.random.default_rng(0)
    return [{"w": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)} for _ in range(layers)]


@pytest.fixture
def derived(monkeypatch):
    """The bodies that rules are derived for."""
    found = []
    derive = differentiate._derive
    monkeypatch.setattr(differentiate, "_derive", lambda *a: found.append(a) or derive(*a))
    return found


def test_layers_and_programs_share_rules(derived):
    x = np.ones((3, WIDTH), np.float32)
    program = ow.append_backward(ow.trace(loss, parameters(2), x))  # the first layer needs no gradient of x
    first = len(derived)
    assert 5 < first < len(program.ops)
    ow.append_backward(ow.trace(loss, parameters(6), x))
    assert len(derived) == first
    ow.Adam(1e-3).minimize(loss, parameters(3), x)
    assert len(derived) == first


def test_gradients_by_remembered_rules_are_jax_s():
    x = np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
    params = parameters(2)
    wanted = jax.tree.leaves(jax.jit(jax.grad(loss))(params, x))
    for _ in range(2):
        program = ow.append_backward(ow.trace(loss, params, x))
        found = jax.jit(lower(program, [g for _, g in program.gradients]))
        for gradient, expected in zip(found(jax.tree.leaves(params), [x]), wanted, strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def test_a_rule_is_found_by_many_lookups_however_full_the_memory(monkeypatch):
    monkeypatch.setattr(differentiate, "_rules", differentiate._RuleCache(2))
    x = np.ones((3, WIDTH), np.float32)
    program = ow.append_backward(ow.trace(loss, parameters(2), x))
    assert len(differentiate._rules.rules) == 2
    assert len(program.gradients) == 2


def test_rules_are_forgotten_oldest_first():
    memory = differentiate._RuleCache(2)
    for name in "ab":
        memory.put(name, name)
    assert memory.get("a") == "a"
    memory.put("c", "c")
    assert (memory.get("a"), memory.get("b"), memory.get("c")) == ("a", None, "c")


def test_names_and_ops_are_the_same_every_time():
    x = np.ones((3, WIDTH), np.float32)
    first, second = (ow.Adam(1e-3).minimize(loss, parameters(2), x) for _ in range(2))
    assert str(first) == str(second)
    assert list(first.variables) == list(second.variables)
    assert [op.body.signature for op in first.ops] == [op.body.signature for op in second.ops]
    assert backward._ones.cache_info().hits > 0
