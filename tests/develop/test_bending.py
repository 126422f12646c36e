"""Rules of people's own that change gradients on their way back: which are in proportion, and who is told."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.jaxprs.homogeneous import grown
from onward.develop.over_batch.bending import bending

W, X = np.full((3, 3), 0.3, "float32"), np.random.default_rng(0).normal(size=(8, 3)).astype("float32")

IN_PROPORTION: dict[str, Any] = {
    "reversed": lambda x, g: -g,
    "of what is positive": lambda x, g: jnp.where((g > 0) & (x > 0), g, 0),
    "relu": lambda x, g: jax.nn.relu(g),
    "after what is not finite": lambda x, g: jnp.where(g[0, 0] > jnp.inf, 0, x) * g,
    "without NaN": lambda x, g: jnp.nan_to_num(g),
    "centred": lambda x, g: g - g.mean(0),
    "added up": lambda x, g: jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(3, g.dtype), g)[1],
    "on a condition": lambda x, g: jax.lax.cond(g[0, 0] > 0, lambda: g, lambda: 2 * g),
    "rounded": lambda x, g: g.astype(jnp.bfloat16).astype(g.dtype),
    "sizes and signs": lambda x, g: jnp.sqrt(jnp.square(g)) * jnp.sign(g),
}
BENT: dict[str, Any] = {
    "clipped": lambda x, g: jnp.clip(g, -0.1, 0.1),
    "of length 1": lambda x, g: g / jnp.linalg.norm(g),
    "of length at most 1": lambda x, g: g * jnp.minimum(1, 1 / jnp.linalg.norm(g)),
    "signs": lambda x, g: jnp.sign(g),
    "shifted": lambda x, g: g + 0.1,
    "softened": lambda x, g: jnp.tanh(g),
    "squared": lambda x, g: g * jnp.abs(g),
    "cut off": lambda x, g: jnp.where(jnp.abs(g) > 0.1, 0, g),
    "until it is small": lambda x, g: jax.lax.while_loop(lambda g: jnp.max(g) > 1, lambda g: g / 2, g),
}


def with_rule(rule: Any) -> Any:
    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    same.defvjp(lambda x: (x, x), lambda x, g: (rule(x, g),))
    return same


PLACES = {
    "alone": lambda same: lambda w, x: jnp.mean((same(jnp.tanh(x @ w)) @ w) ** 2),
    "scan": lambda same: (
        lambda w, x: jnp.mean(jax.lax.scan(lambda h, _: (same(jnp.tanh(h @ w)), None), x, None, 2)[0] ** 2)
    ),
    "checkpoint": lambda same: lambda w, x: jnp.mean(jax.checkpoint(lambda x: same(jnp.tanh(x @ w)))(x) ** 2),
    "jit": lambda same: lambda w, x: jnp.mean(jax.jit(lambda x: same(jnp.tanh(x @ w)))(x) ** 2),
}


def trained(rule: Any, place: str = "alone") -> ow.Program:
    return ow.SGD(0.1).minimize(PLACES[place](with_rule(rule)), W, X)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_in_proportion_is_told_from_what_is_not(place: str):
    found = {name: bending(trained(rule, place)) for name, rule in IN_PROPORTION.items()}
    assert {name: why for name, why in found.items() if why} == {}
    assert [name for name, rule in BENT.items() if not bending(trained(rule, place))] == []


def test_what_a_call_gives_beside_the_gradient_depends_on_what_it_is_made_of():
    def found(rule: Any) -> Any:
        return grown(ow.graph.body_of(lambda g, x: [*jax.jit(rule)(g, x)], W, W), [1.0, 0.0])

    assert found(lambda g, x: (2 * g, 3 * x)) == ([1.0, 0.0], "")
    assert found(lambda g, x: (2 * g, jnp.sign(g))) == ([1.0, 0.0], "jit")


@pytest.mark.parametrize("base", ["bfloat16", "int8"])
def test_a_weight_of_few_bits_that_waits_for_a_gradient_is_no_clip(base: str):
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)

    adapted = ow.low_rank(loss, {"a": W, "b": W}, X, rank=2, base=base)
    assert bending(ow.SGD(0.1).minimize(adapted)) == []


def test_what_float16_cannot_hold_is_no_clip_where_it_is_replaced():
    x, w = X.astype("float16"), W.astype("float16")
    same = with_rule(IN_PROPORTION["without NaN"])
    assert bending(ow.SGD(0.1).minimize(lambda w, x: jnp.mean(same(x @ w) ** 2), w, x)) == []


def test_in_a_sum_rules_of_parameters_are_told_of_and_those_of_examples_are_not():
    clip = with_rule(BENT["clipped"])

    def of_examples(w: Any, x: Any) -> Any:
        return jnp.sum(clip(x @ w) ** 2)

    def of_parameters(w: Any, x: Any) -> Any:
        return jnp.sum((x @ clip(w)) ** 2)

    ow.accumulate(ow.SGD(0.1).minimize(of_examples, W, X), 4)
    with pytest.warns(
        UserWarning, match="otherwise than in proportion .* 4 micro-batches has those of its own"
    ):
        ow.accumulate(ow.SGD(0.1).minimize(of_parameters, W, X), 4)


LAYOUTS: dict[str, Any] = {
    "accumulate": lambda program: ow.accumulate(program, 4),
    "replicate": lambda program: ow.replicate(program, 2),
    "float16": lambda program: ow.mixed_precision(program, "float16"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_makes_gradients_larger_on_their_way_tells_of_it(layout: str):
    clip = ow.error_clip(ow.trace(PLACES["alone"](lambda x: x), W, X), "tanh", 0.01)
    with pytest.warns(
        UserWarning, match=r"'error_clip_grad' .*otherwise than in proportion to them \('max'\)"
    ):
        LAYOUTS[layout](ow.SGD(0.1).minimize(clip))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LAYOUTS[layout](trained(IN_PROPORTION["of what is positive"]))


def test_a_sum_over_examples_is_clipped_as_in_the_whole_batch():
    same = with_rule(BENT["clipped"])
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(same(jnp.tanh(x @ w)) ** 2), W, X)
    steps = [ow.compile(one) for one in (program, ow.accumulate(program, 4))]
    (state, _), (again, _) = (step(step.init(W), X) for step in steps)
    np.testing.assert_allclose(again.parameters, state.parameters, rtol=1e-5)


def test_what_is_meant_so_is_not_warned_of():
    program = trained(BENT["clipped"])
    ow.accumulate(program, 4, is_sum=False)
    ow.replicate(program, 2, sync_batch_norm=False)
    ow.partition(program, {"data": 2}, {}, batch="data")
    ow.mixed_precision(program, "bfloat16")
