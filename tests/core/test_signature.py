"""Signatures: equal for what computes the same in every layer and Program, never for what differs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import onward as ow
from onward.core.jaxprs import signature as signatures_module
from onward.core.jaxprs.body import body_of
from onward.core.keys import key_of
from onward.derive import differentiate
from onward.derive.differentiate import rule_for

X = jnp.linspace(0.1, 1.0, 3)
SQUARE = jnp.ones((2, 2))


def signature(function, *types):
    return body_of(lambda *x: [function(*x)], *(types or (X,))).signature


def op_signatures(function):
    return [op.body.signature for op in ow.trace(function, X).ops]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def times(n, x):
    return n * x


times.defvjp(lambda n, x: (n * x, None), lambda n, _, g: (n * g,))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ignoring(n, x):
    return 1.0 * x


ignoring.defvjp(lambda n, x: (1.0 * x, None), lambda n, _, g: (n * g,))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def power(x, n):
    return x**n


@power.defjvp
def _power(n, primals, tangents):
    return power(*primals, n), n * primals[0] ** (n - 1) * tangents[0]


def local_rule(factor):
    """A rule defined again at each call, over a number."""

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (factor * g * jnp.cos(x),))
    return f


def scanned(body, length=3):
    return lambda x: lax.scan(lambda c, _: (body(c), None), x, None, length=length)[0]


REPEATED = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x),
    "custom_vjp": doubled,
    "nondiff custom_vjp": lambda x: times(3, x),
    "nondiff custom_jvp": lambda x: power(x, 2),
    "custom_vjp defined in the layer": lambda x: local_rule(2.0)(x),
    "custom_vjp under vmap": jax.vmap(doubled),
    "relu under vmap twice": lambda x: jax.vmap(jax.vmap(jax.nn.relu))(x[None])[0],
    "jit": jax.jit(lambda x: jnp.sin(x) * 2),
    "scan": scanned(lambda c: c * 2),
    "scan of a custom rule": scanned(jax.nn.relu),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x),
    "remat": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "switch": lambda x: lax.switch(1, [jnp.sin, jnp.cos, doubled], x),
    "linear solve": lambda x: lax.custom_linear_solve(
        lambda v: 2 * v, x, lambda mv, b: b / 2, transpose_solve=lambda mv, b: b / 2
    ),
    "constants": lambda x: x * jnp.asarray(np.arange(3.0, dtype=np.float32)),
}


@pytest.mark.parametrize("layer", REPEATED.values(), ids=REPEATED)
def test_layers_and_programs_share_signatures(layer):
    def network(x):
        return layer(layer(x)).sum()

    first, second = op_signatures(network), op_signatures(network)
    assert first == second
    assert op_signatures(lambda x: layer(x).sum())[0] == first[0]


def closure(value):
    return lambda x: value * x


DIFFERENT = {
    "shape": [signature(jnp.sin, jnp.ones(3)), signature(jnp.sin, jnp.ones(4))],
    "dtype": [signature(jnp.sin, jnp.ones(3)), signature(jnp.sin, jnp.ones(3, jnp.float16))],
    "primitive": [signature(jnp.sin), signature(jnp.cos)],
    "literal": [signature(lambda x: x + 1.5), signature(lambda x: x + 2.5)],
    "sign of zero": [signature(lambda x: x * 0.0), signature(lambda x: x * -0.0)],
    "order": [signature(lambda x, y: x - y, X, X), signature(lambda x, y: y - x, X, X)],
    "wiring": [signature(lambda x, y: x * y, X, X), signature(lambda x, y: x * x, X, X)],
    "parameter": [
        signature(lambda x: x.sum(0), jnp.ones((2, 2))),
        signature(lambda x: x.sum(1), jnp.ones((2, 2))),
    ],
    "steps of a scan": [signature(scanned(jnp.sin)), signature(scanned(jnp.sin, 4))],
    "body of a scan": [signature(scanned(jnp.sin)), signature(scanned(jnp.cos))],
    "number in a scan": [signature(scanned(lambda c: c * 2)), signature(scanned(lambda c: c * 3))],
    "direction of a scan": [
        signature(lambda x: lax.cumsum(x, reverse=False)),
        signature(lambda x: lax.cumsum(x, reverse=True)),
    ],
    "branches": [
        signature(lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)),
        signature(lambda x: lax.cond(x.sum() > 0, jnp.cos, jnp.sin, x)),
    ],
    "remat or not": [signature(jax.checkpoint(jnp.sin)), signature(jnp.sin)],
    "remat policy": [
        signature(jax.checkpoint(jnp.sin, policy=jax.checkpoint_policies.everything_saveable)),
        signature(jax.checkpoint(jnp.sin)),
    ],
    "rule or not": [signature(doubled), signature(lambda x: 2 * x)],
    "nondiff argument": [signature(lambda x: times(3, x)), signature(lambda x: times(4, x))],
    "nondiff argument that only the rule reads": [
        signature(lambda x: ignoring(3, x)),
        signature(lambda x: ignoring(4, x)),
    ],
    "captured by a rule": [signature(local_rule(2.0)), signature(local_rule(3.0))],
    "captured by a rule, in a scan": [
        signature(scanned(local_rule(2.0))),
        signature(scanned(local_rule(3.0))),
    ],
    "captured by a rule, under vmap": [
        signature(jax.vmap(local_rule(2.0))),
        signature(jax.vmap(local_rule(3.0))),
    ],
    "captured array": [
        signature(local_rule(np.float32([1, 2, 3]))),
        signature(local_rule(np.float32([1, 2, 4]))),
    ],
    "captured large array": [
        signature(local_rule(np.zeros(30_000))),
        signature(local_rule(np.ones(30_000))),
    ],
    "captured function": [signature(local_rule(closure(2.0))), signature(local_rule(closure(3.0)))],
}


@pytest.mark.parametrize("signatures", DIFFERENT.values(), ids=DIFFERENT)
def test_what_differs_has_another_signature(signatures):
    first, second = signatures
    assert first != second


def gradient_of_rule(rule) -> Array:
    program = ow.append_backward(ow.trace(lambda x: rule(x).sum(), X))
    step = ow.compile(program, fetch=["grad(x)"])
    return step(step.init(X))[1]["grad(x)"]


def test_the_rules_of_jax_are_known_without_tracing_them_and_those_of_users_are_not(monkeypatch):
    traced = []
    real = signatures_module._gradient_of
    monkeypatch.setattr(signatures_module, "_gradient_of", lambda eqn: traced.append(eqn) or real(eqn))

    def signatures(function):
        return [op.body.signature for op in ow.trace(lambda x: function(function(x)), X).ops]

    own = (jax.nn.relu, jax.nn.softplus, jax.vmap(jax.nn.relu), lambda x: jnp.logaddexp(x, 2.0))
    kinds = [signatures(function) for function in own]
    assert traced == []
    assert all(found[: len(found) // 2] == found[len(found) // 2 :] for found in kinds)
    assert signatures(doubled)
    assert traced


def test_a_function_of_users_is_not_taken_for_one_of_jax_by_its_name():
    def relu(x):
        return jnp.maximum(x, 0)

    @jax.custom_jvp
    def mine(x):
        return relu(x)

    mine.defjvp(lambda primals, tangents: (mine(*primals), 3 * tangents[0]))
    np.testing.assert_array_equal(gradient_of_rule(mine), np.full(3, 3.0, np.float32))
    np.testing.assert_array_equal(gradient_of_rule(jax.nn.relu), (X > 0).astype(np.float32))


FACTOR = 2.0


@jax.custom_vjp
def by_global(x):
    return jnp.sin(x)


by_global.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (_by_global(g),))


def _by_global(g):
    return FACTOR * g


def test_a_rule_that_reads_a_global_is_another_when_that_changes(monkeypatch):
    np.testing.assert_array_equal(gradient_of_rule(by_global), np.full(3, 2.0, np.float32))
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    np.testing.assert_array_equal(gradient_of_rule(by_global), np.full(3, 5.0, np.float32))


def test_a_rule_that_captured_a_list_is_another_when_that_changes():
    factors = [2.0]

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (factors[0] * g,))
    np.testing.assert_array_equal(gradient_of_rule(f), np.full(3, 2.0, np.float32))
    factors[0] = 7.0
    np.testing.assert_array_equal(gradient_of_rule(f), np.full(3, 7.0, np.float32))


class Holder:
    """Something with a method as the rule."""

    def __init__(self, factor):
        self.factor = factor

    def backward(self, _, g):
        return (self.factor * g,)

    def function(self):
        f = jax.custom_vjp(lambda x: jnp.sin(x))
        f.defvjp(lambda x: (jnp.sin(x), None), self.backward)
        return f


def test_a_method_is_known_by_its_object_and_what_that_holds():
    holder = Holder(2.0)
    np.testing.assert_array_equal(gradient_of_rule(holder.function()), np.full(3, 2.0, np.float32))
    holder.factor = 3.0
    np.testing.assert_array_equal(gradient_of_rule(holder.function()), np.full(3, 3.0, np.float32))
    np.testing.assert_array_equal(gradient_of_rule(Holder(4.0).function()), np.full(3, 4.0, np.float32))


class Liar:
    """Says that it equals whatever it is compared with."""

    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __rmul__(self, g):
        return g * self.factor

    __mul__ = __rmul__


def test_objects_are_not_asked_whether_they_are_equal():
    assert key_of(Liar(1.0)) != key_of(Liar(2.0))
    np.testing.assert_array_equal(gradient_of_rule(local_rule(Liar(0.0))), np.zeros(3))
    assert (np.asarray(gradient_of_rule(local_rule(Liar(1.0)))) != 0).all()


def test_functions_that_call_each_other_have_keys():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert key_of(even) == key_of(even)
    assert key_of(even) != key_of(odd)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ((1, 2), [1, 2]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (np.float32(1), np.float64(1)),
        (np.ones(2), np.ones((2, 1))),
        (jnp.ones(2), jnp.zeros(2)),
        (jnp.ones(2), np.ones(2, np.float32)),
        (partial(max, 1), partial(max, 2)),
        (partial(max, 1), partial(min, 1)),
        (closure(1), closure(2)),
        (closure([1, [2]]), closure([1, [3]])),
        (closure(closure(1)), closure(closure(2))),
        (jax.random.key(0), jax.random.key(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_keys_of_what_differs_differ(first, second):
    assert key_of(first) != key_of(second)
    assert key_of(first) == key_of(first)


def test_nan_is_the_same_number():
    assert key_of([float("nan")]) == key_of([float("nan")])


def test_a_rule_is_derived_once_for_all_layers(monkeypatch):
    derived = []
    derive = differentiate._derive
    monkeypatch.setattr(differentiate, "_derive", lambda *a: derived.append(a) or derive(*a))
    shape = (3, 7)  # of no other test

    def network(layers, x):
        for _ in range(layers):
            x = jax.vmap(jax.nn.relu)(local_rule(1.5)(jax.nn.softmax(x)))
            x = scanned(lambda c: jax.nn.relu(c) * 0.5, 2)(x)
        return x.sum()

    ow.append_backward(ow.trace(partial(network, 1), jnp.ones(shape)))
    once = len(derived)
    ow.append_backward(ow.trace(partial(network, 5), jnp.ones(shape)))
    assert 5 < len(derived) == once


def test_a_rule_found_again_is_the_same_object():
    first, second = (body_of(lambda x: [jax.nn.silu(x)], X) for _ in range(2))
    assert rule_for(first, [0], [0]) is rule_for(second, [0], [0])
