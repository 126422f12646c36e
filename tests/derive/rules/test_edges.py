"""Rules at the edges: empty arrays, numbers, gradients of zero, and optimizers that lack what they need."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import together, training
from tests.derive.rules.around import dot

import onward as ow

RULES = {
    "ClipByValue": ow.ClipByValue(0.5),
    "ClipByNorm": ow.ClipByNorm(0.5),
    "ClipByGlobalNorm": ow.ClipByGlobalNorm(0.5),
    "AdaptiveClip": ow.rule.AdaptiveClip(0.5),
    "L1": ow.L1(0.0),
    "L2": ow.L2(0.0),
    "Centralize": ow.rule.Centralize(),
    "Noise": ow.rule.Noise(0.0),
    "SAM": ow.SAM(0.5),
    "WeightDecay": ow.WeightDecay(0.0),
    "EMA": ow.EMA(0.5),
    "PolyakAverage": ow.rule.PolyakAverage(),
    "SWA": ow.SWA(every=2),
    "Lookahead": ow.rule.Lookahead(0.5, every=2),
    "Cautious": ow.rule.Cautious(),
}
PARAMS = {
    "empty": np.ones((0, 3), np.float32),
    "none": np.ones(0, np.float32),
    "number": np.array(2, np.float32),
    "one": np.ones((1, 1), np.float32),
    "complex": np.ones(2, np.complex64),
    "low": np.ones(2, jnp.bfloat16),
}
ZEROS = {k: np.zeros_like(p) for k, p in PARAMS.items()}


def tried(name):
    """The parameters without those of low precision where two places near each other must differ."""
    return {k: p for k, p in PARAMS.items() if not (RULES[name].evaluates_loss and k == "low")}


@cache
def after_zeros():
    def of(name):
        params = tried(name)
        zeros = {k: np.zeros((2, *p.shape), p.dtype) for k, p in params.items()}
        program = ow.Momentum(0.5, rules=[RULES[name]]).minimize(dot, params, {k: ZEROS[k] for k in params})
        return training(program, params, zeros)

    return together({name: of(name) for name in RULES})


@pytest.mark.parametrize("name", RULES)
def test_gradients_of_zero_move_nothing_whatever_the_shape(name):
    state, _ = after_zeros()[name]
    for k, p in tried(name).items():
        assert state[k].dtype == p.dtype
        np.testing.assert_array_equal(state[k], p)
    for k, value in state.items():
        assert np.all(np.isfinite(np.asarray(value, np.complex64))), k


def test_limits_of_zero_let_nothing_through():
    rules = (ow.ClipByValue(0.0), ow.ClipByNorm(0.0), ow.ClipByGlobalNorm(0.0), ow.rule.AdaptiveClip(0.0))
    twice = {k: np.stack([p, p]) for k, p in PARAMS.items()}
    programs = {rule.name: ow.SGD(1.0, rules=[rule]).minimize(dot, PARAMS, PARAMS) for rule in rules}
    found = together({name: training(program, PARAMS, twice) for name, program in programs.items()})
    moved = [(n, k) for n, (state, _) in found.items() for k, p in PARAMS.items() if np.any(state[k] != p)]
    assert not moved


def test_long_and_short_gradients_are_clipped_without_overflow_of_the_factor():
    w, g = {"w": jnp.zeros(2)}, {"w": jnp.array([3e18, 4e18])}
    step = ow.compile(ow.SGD(1.0, rules=[ow.ClipByNorm(1.0)]).minimize(dot, w, g), donate=False)
    np.testing.assert_allclose(step(step.init(w), g)[0]["w"], [-0.6, -0.8], rtol=1e-6)
    tiny = {"w": jnp.array([3e-18, 4e-18])}
    np.testing.assert_allclose(step(step.init(w), tiny)[0]["w"], [-3e-18, -4e-18], rtol=1e-6)


def test_a_decay_that_follows_the_learning_rate_needs_one():
    class Plain(ow.Optimizer):
        """Steps as long as the gradient."""

        def update(self, parameter, gradient, slots):
            return parameter - gradient, slots

    w = {"w": jnp.ones(2)}
    with pytest.raises(
        ow.HyperparameterError, match=r"learning rate, and the optimizer has none.*independent"
    ):
        Plain(rules=[ow.WeightDecay(0.1)]).minimize(dot, w, w)
    step = ow.compile(Plain(rules=[ow.WeightDecay(0.25, "independent")]).minimize(dot, w, w))
    np.testing.assert_allclose(step(step.init(w), w)[0]["w"], -0.25)


def test_names_of_ops_and_hyperparameters():
    rules = [*RULES.values(), ow.EMA(0.75)]
    assert [r.name for r in rules] == [
        *("clip_by_value", "clip_by_norm", "clip_by_global_norm", "adaptive_clip", "l1", "l2", "centralize"),
        *("noise", "sam", "weight_decay", "ema", "polyak_average", "swa", "lookahead", "cautious", "ema"),
    ]
    program = ow.SGD(0.5, rules=[ow.L1(0.1), ow.L2(0.1), ow.EMA(0.5), ow.EMA(0.75)]).minimize(
        dot, PARAMS, ZEROS
    )
    names = [v.name for v in program.hyperparameters]
    assert names[:4] == ["learning_rate", "l1/rate", "l2/rate", "ema/decay"]
    assert len(set(names)) == 5


@pytest.mark.parametrize("size", [1.0, 1e25, 3e38])
@pytest.mark.parametrize("rule", [ow.ClipByGlobalNorm(1.0), ow.ClipByNorm(1.0), ow.rule.AdaptiveClip(1.0)])
def test_a_gradient_whose_square_overflows_is_shortened_not_lost(rule, size):
    step = ow.compile(ow.SGD(1.0, rules=[rule]).minimize(lambda w, x: jnp.sum(w * x), *[jnp.ones(2)] * 2))
    begin = np.array([0.6, 0.8], np.float32)
    state, _ = step(step.init(begin), size * begin)
    np.testing.assert_allclose(begin - state["w"], begin, rtol=1e-5)


def test_sam_goes_its_radius_whatever_the_size_of_the_gradient():
    """Of ``c w**2 / 2`` at 1 the gradient is c; at ``1 + 0.5`` it is ``1.5 c``."""
    program = ow.SGD(1.0, rules=[ow.SAM(0.5)]).minimize(lambda w, c: c * w**2 / 2, *[jnp.float32(1)] * 2)
    step = ow.compile(program)
    for size in (1.0, 1e25):
        state, _ = step(step.init(jnp.float32(1)), jnp.float32(size))
        np.testing.assert_allclose((1 - state["w"]) / size, 1.5, rtol=1e-6)


def test_the_transform_clips_what_overflows_when_squared():
    program = ow.append_backward(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2)))
    step = ow.compile(ow.append_update(ow.clip_by_global_norm(program, 1e-3), ow.SGD(1.0)))
    state, _ = step(step.init(jnp.zeros(2)), jnp.array([6e37, 8e37]))
    np.testing.assert_allclose(state["w"], [-6e-4, -8e-4], rtol=1e-5)


def test_an_infinite_gradient_stays_visible():
    step = ow.compile(
        ow.SGD(1.0, rules=[ow.ClipByGlobalNorm(1.0)]).minimize(
            lambda w, x: jnp.sum(w * x), *[jnp.ones(2)] * 2
        )
    )
    state, _ = step(step.init(jnp.zeros(2)), jnp.array([np.inf, 1.0]))
    assert np.isnan(state["w"][0])
