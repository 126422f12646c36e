"""What every optimizer that measures norms, distances or averages must do, in one table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.derive.optimizers.reference_b import descend, gradients, run, tree

import onward as ow
from onward.derive.optimizers.distance_over_gradients import DoG, LDoG
from onward.derive.optimizers.factored import SM3, Adafactor
from onward.derive.optimizers.layerwise import LAMB, LARS, NovoGrad
from onward.derive.optimizers.learning_rate_free import DAdaptAdam, DAdaptSGD, Prodigy
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


@pytest.mark.parametrize("name", CASES)
def test_it_descends(name):
    (bowl, steps), (valley, more) = CASES[name]
    assert descend(bowl, parabola, jnp.ones(6), steps) < 1e-3 * float(parabola(jnp.ones(6)))
    assert descend(valley, rosenbrock, jnp.array([-1.0, 2.0]), more) < 1e-2


@pytest.mark.parametrize("name", CASES)
def test_it_descends_among_complex_numbers(name):
    optimizer, steps = CASES[name][0]
    start = jnp.exp(1j * jnp.arange(6))
    assert descend(optimizer, parabola, start, steps) < 1e-3 * float(parabola(start))


@pytest.mark.parametrize("name", CASES)
def test_nothing_becomes_nan_where_there_is_nothing(name):
    """Gradients of zero, parameters of zero, and arrays without numbers; a gradient comes at the end."""
    optimizer = CASES[name][0][0]
    shapes = [(), (3,), (2, 2, 3, 2), (0,), (0, 3)]
    parameters = [*map(jnp.zeros, shapes), jnp.ones((2, 3))]
    found = [jnp.zeros((3, *p.shape)).at[-1].set(1) for p in parameters]
    paths, evaluated = run(optimizer, parameters, found)
    for path in (*paths, *evaluated):
        assert np.all(np.isfinite(path))
    for p, path in zip(parameters, paths, strict=True):
        np.testing.assert_allclose(path[1], p, atol=0.5)


@pytest.mark.parametrize("name", CASES)
def test_a_sweep_of_learning_rates_is_the_same_as_one_by_one(name):
    optimizer = CASES[name][0][0]
    parameters, found = ([jnp.asarray(a, jnp.float32) for a in both[1:3]] for both in (tree(), gradients(20)))

    def sweep(rate):
        return run(optimizer, parameters, found, {"learning_rate": rate})[0]

    rates = jnp.array([0.01, 0.1, 0.3])
    together, alone = jax.vmap(sweep)(rates), jax.lax.map(sweep, rates)
    for mine, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert np.any(together[1][0] != together[1][1])
    assert np.any(together[1][1] != together[1][2])


@pytest.mark.parametrize("name", CASES)
def test_a_program_updates_as_the_rule_does(name):
    """With the gradients that the Program computed, the rule by itself goes the same way."""
    optimizer = CASES[name][0][0]
    names = ["a", "b"]
    parameters = {n: jnp.asarray(p, jnp.float32) for n, p in zip(names, tree()[1:3], strict=True)}

    def loss(params):
        return sum(jnp.sum(jnp.cos(w)) for w in params.values())

    program = optimizer.minimize(loss, parameters)
    kind = {t.op.update for t in program.updates} - {ow.UpdateType.BOOKKEEPING}
    across, layer = name in TOGETHER, name in ONE_LAYER
    wanted = (
        ow.UpdateType.ACROSS if across else ow.UpdateType.PER_MATRIX if layer else ow.UpdateType.ELEMENTWISE
    )
    assert kind == {wanted}
    step = ow.compile(program, fetch=[f"grad({n})" for n in names])
    state, found = step.init(parameters), []
    for _ in range(3):
        state, out = step(state)
        found.append([out[f"grad({n})"] for n in names])
    paths, _ = run(optimizer, list(parameters.values()), [jnp.stack(gs) for gs in zip(*found, strict=True)])
    for n, path in zip(names, paths, strict=True):
        np.testing.assert_allclose(state.parameters[n], path[-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Adafactor", "ScheduleFreeAdamW", "DoG"])
def test_parameters_in_half_precision_keep_it_and_slots_have_more(name):
    w = jnp.ones((3, 2), jnp.bfloat16)
    step = ow.compile(CASES[name][0][0].minimize(lambda w: jnp.sum(w * w), w))
    state, _ = step(step.init(w))
    state, _ = step(state)
    assert state.parameters.dtype == jnp.bfloat16
    assert np.all(np.isfinite(np.asarray(state.parameters, np.float32)))
    slots = [v for n, v in zip(state.layout.position, state.values, strict=True) if "/" in n]
    assert {v.dtype for v in slots} == {np.dtype("float32")}
