"""What every optimizer that measures norms, distances or averages must do, in one table."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import OPTIMIZED, together, training
from tests.derive.optimizers.reference_b import descended, gradients, trajectory, tree

import onward as ow
from onward.derive.lengths import length
from onward.derive.optimizers.distance_over_gradients import DoG, LDoG
from onward.derive.optimizers.factored import SM3, Adafactor
from onward.derive.optimizers.layerwise import LAMB, LARS, NovoGrad
from onward.derive.optimizers.learning_rate_free import DAdaptAdam, DAdaptSGD, Prodigy
from onward.derive.optimizers.norms import norm
from onward.derive.optimizers.proximal import FTRL, ProximalAdagrad, ProximalGD
from onward.derive.optimizers.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD


def parabola(w):
    return jnp.sum(jnp.linspace(1.0, 10.0, 6) * jnp.abs(w) ** 2)


def rosenbrock(w):
    return (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2


def falling(rate, steps):
    """From a rate to nothing, as steps of fixed length need it."""
    return lambda step: rate * (1 - step / steps)


# Each with its steps on the parabola, from ones to a thousandth, and on Rosenbrock's valley, from (-1, 2).
CASES = {
    "LARS": (
        (LARS(1.0, 0.9, 0.0, 0.02), 200),
        (LARS(falling(1.0, 3000), 0.9, 0.0, 0.005), 3000),
    ),
    "LAMB": (
        (LAMB(falling(0.1, 200), weight_decay=0.0), 200),
        (LAMB(falling(0.05, 2000), weight_decay=0.0), 2000),
    ),
    "NovoGrad": ((NovoGrad(falling(0.05, 200)), 200), (NovoGrad(falling(0.01, 2000)), 2000)),
    "SM3": ((SM3(0.3), 200), (SM3(1.0), 10_000)),
    "Adafactor": ((Adafactor(falling(0.2, 200)), 200), (Adafactor(falling(0.05, 3000)), 3000)),
    "ProximalGD": ((ProximalGD(0.05), 200), (ProximalGD(1e-3), 10_000)),
    "ProximalAdagrad": ((ProximalAdagrad(0.3), 200), (ProximalAdagrad(0.5), 10_000)),
    "FTRL": ((FTRL(0.5), 200), (FTRL(0.5), 10_000)),
    "ScheduleFreeSGD": ((ScheduleFreeSGD(0.08), 300), (ScheduleFreeSGD(2e-3), 10_000)),
    "ScheduleFreeAdamW": ((ScheduleFreeAdamW(0.1), 200), (ScheduleFreeAdamW(0.1), 3000)),
    "DoG": ((DoG(), 300), (DoG(), 20_000)),
    "LDoG": ((LDoG(), 300), (LDoG(), 20_000)),
    "DAdaptSGD": ((DAdaptSGD(), 300), (DAdaptSGD(), 10_000)),
    "DAdaptAdam": ((DAdaptAdam(), 300), (DAdaptAdam(), 10_000)),
    "Prodigy": ((Prodigy(), 300), (Prodigy(), 3000)),
}
ONE_LAYER = {"LARS", "LAMB", "NovoGrad", "SM3", "Adafactor", "LDoG"}
TOGETHER = {"DoG", "DAdaptSGD", "DAdaptAdam", "Prodigy"}


RULES = {name: bowl for name, ((bowl, _), _) in CASES.items()}


@cache
def bowls(dtype):
    start = np.exp(1j * np.arange(6)) if dtype == "complex64" else np.ones(6)
    return together(
        {
            name: (partial(descended, optimizer, parabola, steps=steps), start.astype(dtype))
            for name, ((optimizer, steps), _) in CASES.items()
        }
    )


@cache
def valleys():
    return together(
        {
            name: (partial(descended, optimizer, rosenbrock, steps=steps), np.float32([-1, 2]))
            for name, (_, (optimizer, steps)) in CASES.items()
        },
        OPTIMIZED,  # DAdaptAdam comes through the valley only with sums as XLA rounds them then
    )


@pytest.mark.parametrize("name", CASES)
def test_it_descends(name):
    before, after = bowls("float32")[name]
    assert after < 1e-3 * before
    assert valleys()[name][1] < 1e-2


@pytest.mark.parametrize("name", CASES)
def test_it_descends_among_complex_numbers(name):
    before, after = bowls("complex64")[name]
    assert after < 1e-3 * before


NOTHING = [*(np.zeros(s, np.float32) for s in [(), (3,), (2, 2, 3, 2), (0,), (0, 3)]), np.ones((2, 3), "f")]


@cache
def from_nothing():
    found = [np.zeros((3, *p.shape), np.float32) for p in NOTHING]
    for g in found:
        g[-1] = 1
    return together({name: (partial(trajectory, o), NOTHING, found) for name, o in RULES.items()})


@pytest.mark.parametrize("name", CASES)
def test_nothing_becomes_nan_where_there_is_nothing(name):
    """Gradients of zero, parameters of zero, and arrays without numbers; a gradient comes at the end."""
    paths, evaluated = from_nothing()[name]
    for path in (*paths, *evaluated):
        assert np.all(np.isfinite(path))
    for p, path in zip(NOTHING, paths, strict=True):
        np.testing.assert_allclose(path[1], p, atol=0.5)


RATES = np.float32([0.01, 0.1, 0.3])
NAMES = ["a", "b"]


def two(steps):
    """Parameters and gradients: a vector and a matrix."""
    return tuple([np.float32(a) for a in arrays[1:3]] for arrays in (tree(), gradients(steps)))


@cache
def swept():
    """With all rates at once, and with one after the other."""

    def case(optimizer, over):
        def moved(parameters, found, rates):
            return over(lambda r: trajectory(optimizer, parameters, found, {"learning_rate": r})[0], rates)

        return moved, *two(20), RATES

    at_once = {name: case(o, lambda f, x: jax.vmap(f)(x)) for name, o in RULES.items()}
    return together(at_once | {f"{name} alone": case(o, jax.lax.map) for name, o in RULES.items()})


@pytest.mark.parametrize("name", CASES)
def test_a_sweep_of_learning_rates_is_the_same_as_one_by_one(name):
    at_once, alone = swept()[name], swept()[f"{name} alone"]
    for mine, theirs in zip(at_once, alone, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert np.any(at_once[1][0] != at_once[1][1])
    assert np.any(at_once[1][1] != at_once[1][2])


@cache
def programs():
    """Of each rule the Program of two parameters."""
    parameters = dict(zip(NAMES, two(1)[0], strict=True))

    def loss(params):
        return sum(jnp.sum(jnp.cos(w)) for w in params.values())

    return {name: optimizer.minimize(loss, parameters) for name, optimizer in RULES.items()}


@cache
def three_steps():
    """Of each Program: its state and gradients; and what the rule by itself makes of those gradients."""
    parameters = dict(zip(NAMES, two(1)[0], strict=True))
    wanted = [f"grad({n})" for n in NAMES]
    found = together({name: training(p, parameters, steps=3, fetch=wanted) for name, p in programs().items()})
    rules = together(
        {
            name: (partial(trajectory, RULES[name]), two(1)[0], [seen[g] for g in wanted])
            for name, (_, seen) in found.items()
        }
    )
    return {name: (found[name][0], rules[name][0]) for name in RULES}


@pytest.mark.parametrize("name", CASES)
def test_a_program_updates_as_the_rule_does(name):
    """With the gradients that the Program computed, the rule by itself goes the same way."""
    kind = {t.op.update for t in programs()[name].updates} - {ow.UpdateType.BOOKKEEPING}
    across, layer = name in TOGETHER, name in ONE_LAYER
    wanted = (
        ow.UpdateType.ACROSS if across else ow.UpdateType.PER_MATRIX if layer else ow.UpdateType.ELEMENTWISE
    )
    assert kind == {wanted}
    state, paths = three_steps()[name]
    for n, path in zip(NAMES, paths, strict=True):
        np.testing.assert_allclose(state[n], path[-1], rtol=1e-5, atol=1e-6)


HALF = ["Adafactor", "ScheduleFreeAdamW", "DoG"]


@cache
def in_half_precision():
    w = np.ones((3, 2), jnp.bfloat16)
    return together(
        {name: training(RULES[name].minimize(lambda w: jnp.sum(w * w), w), w, steps=2) for name in HALF}
    )


@pytest.mark.parametrize("name", HALF)
def test_parameters_in_half_precision_keep_it_and_slots_have_more(name):
    state, _ = in_half_precision()[name]
    assert state["w"].dtype == jnp.bfloat16
    assert np.all(np.isfinite(np.float32(state["w"])))
    assert {v.dtype for n, v in state.items() if "/" in n} == {np.dtype("float32")}


def test_lengths_are_those_of_numpy_also_where_squares_overflow():
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    for size in (1.0, 1e18, 1e25, 1e38):
        expected = np.linalg.norm(x.astype(np.float64)) * size
        its = length([jnp.asarray(x[:1] * np.float32(size)), jnp.asarray(x[1:] * np.float32(size))])
        np.testing.assert_allclose(float(its.scaled) / float(its.down), expected, rtol=1e-6)
    scaled, down = jax.jit(lambda x: tuple(length([x])))(jnp.float32(1e25))  # XLA knows the root of a square
    np.testing.assert_allclose(float(scaled) / float(down), 1e25, rtol=1e-6)
    assert float(length([jnp.array([np.inf, 1])]).norm) == np.inf
    assert np.isnan(float(length([jnp.array([np.nan, 1])]).norm))
    assert float(norm(jnp.array([np.inf, 1]))) == np.inf


RUNNING = (
    *(
        ow.Adam,
        ow.AdamW,
        ow.optimizer.AMSGrad,
        ow.optimizer.NAdam,
        ow.optimizer.RAdam,
        ow.optimizer.Yogi,
        ow.optimizer.AdaBelief,
        ow.optimizer.ADOPT,
        ow.LAMB,
        ow.optimizer.NovoGrad,
    ),
    *(
        ow.RMSProp,
        ow.optimizer.Adadelta,
        ow.optimizer.DecayedAdagrad,
        ow.Adafactor,
        ow.optimizer.ScheduleFreeAdamW,
        ow.optimizer.Adan,
    ),
)


def test_gradients_whose_squares_overflow_leave_finite_slots():
    """What is infinite in a running mean never leaves it, and the parameter would not move again."""
    ones = np.ones(3, np.float32)
    rules = [ow.Group(optimizer.__name__, optimizer()) for optimizer in RUNNING]
    params = {optimizer.__name__: ones for optimizer in RUNNING}
    step = ow.compile(
        ow.SGD(0.1, groups=rules).minimize(
            lambda params, x: jnp.sum(jnp.stack(list(params.values())) * x), params, ones
        )
    )
    state = step.init(params)
    for x in (1.0, 1e20, 1e38, 1.0):
        state, _ = step(state, x * ones)
    slots = {name: np.asarray(state[name]) for name in state}
    assert {name.partition("/")[0] for name in slots if "/" in name} >= params.keys()
    assert not {name: value for name, value in slots.items() if not np.isfinite(value).all()}
