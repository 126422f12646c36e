"""The rules that optax has as well: the same steps."""

from functools import cache, partial

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from tests.compiled import together
from tests.derive.rules.around import assert_close, case, given

import onward as ow
from onward.derive.rule import GradientRule

PEERS = {
    "ClipByValue": (ow.ClipByValue(0.5), optax.clip(0.5)),
    "ClipByGlobalNorm": (ow.ClipByGlobalNorm(1.5), optax.clip_by_global_norm(1.5)),
    "AdaptiveClip": (ow.rule.AdaptiveClip(0.5, 0.25), optax.adaptive_grad_clip(0.5, 0.25)),
    "L2": (ow.L2(0.1), optax.add_decayed_weights(0.1)),
    "WeightDecay": (ow.WeightDecay(0.5), optax.add_decayed_weights(0.5)),
}


def chained(rule, peer):
    before = isinstance(rule, GradientRule)
    inner = [optax.trace(0.8), optax.scale_by_learning_rate(0.05)]
    return optax.chain(peer, *inner) if before else optax.chain(inner[0], peer, inner[1])


@cache
def of_both():
    tree = given("float32", 20)
    ours = {name: case(ow.Momentum(0.05, 0.8, rules=[rule]), *tree) for name, (rule, _) in PEERS.items()}
    theirs = {f"optax {name}": (partial(steps_of, chained(*pair)), *tree) for name, pair in PEERS.items()}
    return together(ours | theirs)


@pytest.mark.parametrize("name", PEERS)
def test_the_same_as_optax(name):
    assert_close(of_both()[name], of_both()[f"optax {name}"], 1e-5)


def test_lookahead_is_that_of_optax():
    params, gradients = given("float32", 20)
    peer = optax.lookahead(optax.sgd(0.1), sync_period=6, slow_step_size=0.3)
    pair = optax.LookaheadParams(params, params)

    def advance(carry, g):
        pair, slots = carry
        updates, slots = peer.update(g, slots, pair)
        pair = optax.apply_updates(pair, updates)
        return (pair, slots), pair.fast

    def theirs(pair, gradients):
        return jax.lax.scan(advance, (pair, peer.init(pair)), gradients)[1]

    ours = case(ow.SGD(0.1, rules=[ow.rule.Lookahead(0.3, 6)]), params, gradients)
    actual, expected = together({"ours": ours, "theirs": (theirs, pair, gradients)}).values()
    assert_close(actual, expected, 1e-5)


def test_centralize_is_that_of_optax_whose_outputs_are_first():
    """Optax has the layout of torch."""
    params, gradients = given("float32", 20)
    peer = optax.chain(optax.centralize(), optax.sgd(0.1))
    turned = (
        {k: last_first(x, 0) for k, x in params.items()},
        {k: last_first(x, 1) for k, x in gradients.items()},
    )
    ours = case(ow.SGD(0.1, rules=[ow.rule.Centralize()]), params, gradients)
    actual, theirs = together({"ours": ours, "theirs": (partial(steps_of, peer), *turned)}).values()
    expected = {k: np.moveaxis(x, 1, -1) if x.ndim > 2 else x for k, x in theirs.items()}
    assert_close(actual, expected, 1e-5)


def last_first(x, at):
    """The array with its last axis at this place, if it is a matrix or more."""
    return np.moveaxis(x, -1, at) if x.ndim - at > 1 else x


def steps_of(peer, w, gradients):
    """The parameters after each step of optax."""

    def advance(carry, g):
        w, slots = carry
        updates, slots = peer.update(g, slots, w)
        w = optax.apply_updates(w, updates)
        return (w, slots), w

    return jax.lax.scan(advance, (w, peer.init(w)), gradients)[1]
