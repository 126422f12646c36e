"""Every rule around three optimizers, a hundred steps, against NumPy and against optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from tests.derive.rules import by_rule
from tests.derive.rules.around import FAST, RTOL, assert_close, compare, given, run

import onward as ow
from onward.derive.rule import GradientRule

CASES = {
    "ClipByValue": (ow.ClipByValue(0.5), by_rule.clip_by_value(0.5)),
    "ClipByNorm": (ow.ClipByNorm(0.75), by_rule.clip_by_norm(0.75)),
    "ClipByGlobalNorm": (ow.ClipByGlobalNorm(1.5), by_rule.clip_by_global_norm(1.5)),
    "AdaptiveClip": (ow.AdaptiveClip(0.5, 0.25), by_rule.adaptive_clip(0.5, 0.25)),
    "L1": (ow.L1(0.1), by_rule.l1(0.1)),
    "L2": (ow.L2(0.1), by_rule.l2(0.1)),
    "Centralize": (ow.Centralize(), by_rule.centralize()),
    "WeightDecay": (ow.WeightDecay(0.1), by_rule.decay(0.1)),
    "WeightDecay, independent": (ow.WeightDecay(0.01, "independent"), by_rule.decay(0.01, True)),
    "WeightDecay, l2": (ow.WeightDecay(0.1, "l2"), by_rule.l2(0.1)),
    "EMA": (ow.EMA(0.9), by_rule.ema(0.9)),
    "EMA, ramp": (ow.EMA(0.9, ramp=True), by_rule.ema(0.9, True)),
    "PolyakAverage": (ow.PolyakAverage(begin=7), by_rule.mean_of_every(7, 1)),
    "SWA": (ow.SWA(begin=10, every=4), by_rule.mean_of_every(10, 4)),
    "Lookahead": (ow.Lookahead(0.3, every=6), by_rule.lookahead(0.3, 6)),
    "Cautious": (ow.Cautious(0.25), by_rule.cautious(0.25)),
}
KEPT = {"EMA": "/average", "EMA, ramp": "/average", "PolyakAverage": "/average", "SWA": "/average"}


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("name", CASES)
def test_a_hundred_steps_around_three_optimizers(name, dtype):
    rule, reference = CASES[name]
    if name in ("PolyakAverage", "SWA"):  # these references remember
        reference = by_rule.mean_of_every(rule.begin, getattr(rule, "every", 1))
    compare([rule], [reference], dtype, KEPT.get(name))


COMPLEX = [
    "ClipByValue",
    "ClipByGlobalNorm",
    "AdaptiveClip",
    "L1",
    "Centralize",
    "EMA",
    "Lookahead",
    "Cautious",
]


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters(name):
    rule, reference = CASES[name]
    compare([rule], [reference], "complex128", KEPT.get(name))


ORDERS = {
    "clip, then penalty": ["ClipByNorm", "L2"],
    "penalty, then clip": ["L2", "ClipByNorm"],
    "cautious, then decay": ["Cautious", "WeightDecay"],
    "decay, then cautious": ["WeightDecay", "Cautious"],
    "lookahead, then average": ["ClipByValue", "Lookahead", "EMA"],
    "average, then lookahead": ["EMA", "ClipByValue", "Lookahead"],
}


@pytest.fixture(scope="module")
def in_order():
    return {
        name: compare([CASES[n][0] for n in rules], [CASES[n][1] for n in rules], "float64", "/average")
        for name, rules in ORDERS.items()
    }


def test_rules_act_in_the_order_in_which_they_are_listed(in_order):
    """Each order is as by hand, and no two are the same."""
    names = list(ORDERS)
    for one, other in zip(names[::2], names[1::2], strict=True):
        assert any(not np.allclose(in_order[one][k], in_order[other][k]) for k in in_order[one])


def test_the_order_is_printed():
    rules = [ow.EMA(0.9), ow.L2(0.1), ow.Cautious(), ow.ClipByNorm(1.0)]
    program = ow.SGD(0.1, rules=rules).minimize(lambda w: jnp.sum(w**2), jnp.ones(2))
    expected = ["count", "l2", "clip_by_norm", "sgd", "ema", "cautious"]
    assert [t.op.type for t in program.updates] == expected
    plan = ow.SGD(0.1, rules=rules).plan(program)
    assert [rule.name for rule, _ in plan.order] == expected[1:]
    positions = [str(plan).index(f"{i}. {name}") for i, name in enumerate(expected[1:], 1)]
    assert positions == sorted(positions)


PEERS = {
    "ClipByValue": (ow.ClipByValue(0.5), optax.clip(0.5)),
    "ClipByGlobalNorm": (ow.ClipByGlobalNorm(1.5), optax.clip_by_global_norm(1.5)),
    "AdaptiveClip": (ow.AdaptiveClip(0.5, 0.25), optax.adaptive_grad_clip(0.5, 0.25)),
    "Centralize": (ow.Centralize(), optax.centralize()),
    "L2": (ow.L2(0.1), optax.add_decayed_weights(0.1)),
    "WeightDecay": (ow.WeightDecay(0.5), optax.add_decayed_weights(0.5)),
}


@pytest.mark.parametrize("name", PEERS)
def test_the_same_as_optax(name):
    rule, peer = PEERS[name]
    params, gradients = given("float32", 20)
    before = isinstance(rule, GradientRule)
    inner = [optax.trace(0.8), optax.scale_by_learning_rate(0.05)]
    whole = optax.chain(peer, *inner) if before else optax.chain(inner[0], peer, inner[1])
    assert_close(
        run(ow.Momentum(0.05, 0.8, rules=[rule]), params, gradients), peers(whole, params, gradients), 1e-5
    )


def test_lookahead_is_that_of_optax():
    params, gradients = given("float32", 20)
    peer = optax.lookahead(optax.sgd(0.1), sync_period=6, slow_step_size=0.3)
    pair = optax.LookaheadParams(params, params)

    def advance(carry, g):
        pair, slots = carry
        updates, slots = peer.update(g, slots, pair)
        pair = optax.apply_updates(pair, updates)
        return (pair, slots), pair.fast

    expected = jax.jit(
        lambda: jax.lax.scan(advance, (pair, peer.init(pair)), gradients)[1], compiler_options=FAST
    )()
    assert_close(run(ow.SGD(0.1, rules=[ow.Lookahead(0.3, 6)]), params, gradients), expected, 1e-5)


def peers(peer, params, gradients):
    """The parameters after each step of optax."""

    def advance(carry, g):
        w, slots = carry
        updates, slots = peer.update(g, slots, w)
        w = optax.apply_updates(w, updates)
        return (w, slots), w

    def whole(w, g):
        return jax.lax.scan(advance, (w, peer.init(w)), g)[1]

    return jax.jit(whole, compiler_options=FAST)(jax.tree.map(jnp.asarray, params), gradients)
