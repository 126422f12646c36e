"""The rules that optax has as well: the same steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from tests.derive.rules.around import FAST, assert_close, given, run

import onward as ow
from onward.derive.rule import GradientRule

PEERS = {
    "ClipByValue": (ow.ClipByValue(0.5), optax.clip(0.5)),
    "ClipByGlobalNorm": (ow.ClipByGlobalNorm(1.5), optax.clip_by_global_norm(1.5)),
    "AdaptiveClip": (ow.AdaptiveClip(0.5, 0.25), optax.adaptive_grad_clip(0.5, 0.25)),
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


def test_centralize_is_that_of_optax_whose_outputs_are_first():
    """Optax has the layout of torch."""
    params, gradients = given("float32", 20)
    peer = optax.chain(optax.centralize(), optax.sgd(0.1))
    turned = (
        {k: last_first(x, 0) for k, x in params.items()},
        {k: last_first(x, 1) for k, x in gradients.items()},
    )
    expected = {k: np.moveaxis(x, 1, -1) if x.ndim > 2 else x for k, x in peers(peer, *turned).items()}
    assert_close(run(ow.SGD(0.1, rules=[ow.Centralize()]), params, gradients), expected, 1e-5)


def last_first(x, at):
    """The array with its last axis at this place, if it is a matrix or more."""
    return np.moveaxis(x, -1, at) if x.ndim - at > 1 else x


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
