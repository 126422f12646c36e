"""Every optimizer against its paper's equations in float64 NumPy, and against optax."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onward as ow

STEPS = 100


def sgd(w, g, s, t):
    return w - 0.1 * g


def momentum(w, g, s, t):
    s["v"] = 0.9 * s.get("v", 0) + g
    return w - 0.1 * s["v"]


def nesterov(w, g, s, t):
    s["v"] = 0.9 * s.get("v", 0) + g
    return w - 0.1 * (g + 0.9 * s["v"])


def adagrad(w, g, s, t):
    s["s"] = s.get("s", 0.5) + g**2
    return w - 0.1 * g / (np.sqrt(s["s"]) + 1e-6)


def adam(w, g, s, t, decay=0.0):
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.99 * s.get("v", 0) + 0.01 * g**2
    m, v = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.99**t)
    return w - 0.1 * (m / (np.sqrt(v) + 1e-6) + decay * w)


def adamw(w, g, s, t):
    return adam(w, g, s, t, decay=0.2)


REFERENCES = {
    "SGD": (ow.SGD(0.1), sgd, optax.sgd(0.1)),
    "Momentum": (ow.Momentum(0.1, 0.9), momentum, optax.sgd(0.1, 0.9)),
    "Nesterov": (ow.Momentum(0.1, 0.9, nesterov=True), nesterov, optax.sgd(0.1, 0.9, nesterov=True)),
    "Adagrad": (ow.Adagrad(0.1, 1e-6, initial_accumulator=0.5), adagrad, None),
    "Adam": (ow.Adam(0.1, 0.9, 0.99, 1e-6), adam, optax.adam(0.1, 0.9, 0.99, 1e-6)),
    "AdamW": (
        ow.AdamW(0.1, 0.9, 0.99, 1e-6, 0.2),
        adamw,
        optax.adamw(0.1, 0.9, 0.99, 1e-6, weight_decay=0.2),
    ),
}


def loss(params, x):
    return jnp.sum(jnp.cos(params["a"] * x)) + jnp.sum(params["b"] ** 2 * x[0])


def data(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "a": jax.random.normal(keys[0], (3, 4), dtype),
        "b": jax.random.normal(keys[1], (4,), dtype),
    }
    return params, jax.random.uniform(keys[2], (3, 4), dtype)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-4), (jnp.float64, 1e-6)])
def test_a_hundred_steps_of_the_papers_equations(name, dtype, rtol):
    """The gradients are those of the Onward run, so that only the rule is compared.

    In float64 the rule still reads float32 hyperparameters, 0.1 as 0.100000001: hence the tolerance.
    """
    optimizer, rule, _ = REFERENCES[name]
    with jax.enable_x64(dtype == jnp.float64):
        params, x = data(dtype)
        step = ow.compile(optimizer.minimize(loss, params, x), fetch=["grad(a)", "grad(b)"])
        state = step.init(params)
        expected = {k: np.asarray(v, np.float64) for k, v in params.items()}
        slots: dict = {k: {} for k in params}
        for t in range(1, STEPS + 1):
            state, out = step(state, x)
            for k in params:
                g = np.asarray(out[f"grad({k})"], np.float64)
                expected[k] = rule(expected[k], g, slots[k], t)
        for k, v in state.parameters.items():
            assert v.dtype == dtype
            np.testing.assert_allclose(v, expected[k], rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", [n for n, (_, _, peer) in REFERENCES.items() if peer is not None])
def test_the_same_as_optax(name):
    optimizer, _, peer = REFERENCES[name]
    params, x = data(jnp.float32)
    step = ow.compile(optimizer.minimize(loss, params, x))
    state = step.init(params)
    slots = peer.init(params)
    for _ in range(10):
        state, _ = step(state, x)
        updates, slots = peer.update(jax.grad(loss)(params, x), slots, params)
        params = optax.apply_updates(params, updates)
    for k, v in state.parameters.items():
        np.testing.assert_allclose(v, params[k], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_parameters_keep_their_dtype_and_stay_finite(name, dtype):
    optimizer, _, _ = REFERENCES[name]
    w = jnp.ones(4, dtype)
    step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), w, jnp.zeros(4, dtype)))
    state = step.init(w)
    for _ in range(3):
        state, _ = step(state, jnp.zeros(4, dtype))
    assert state.parameters.dtype == dtype
    assert all(
        v.dtype == jnp.float32 for n, v in zip(state.layout.position, state.values, strict=True) if "/" in n
    )
    assert np.all(np.isfinite(np.asarray(state.parameters, np.float32)))


def test_the_first_update_uses_the_schedule_at_zero():
    w = jnp.float32(0.0)
    program = ow.SGD(lambda step: 1.0 + 10.0 * step).minimize(lambda w: w, w)
    step = ow.compile(program, fetch=["learning_rate"])
    state = step.init(w)
    rates = []
    for _ in range(3):
        state, out = step(state)
        rates.append(float(out["learning_rate"]))
    assert rates == [1.0, 11.0, 21.0]
    assert float(state.parameters) == -33.0
    assert "learning_rate" not in state.hyperparameters


def test_schedules_hyperparameters_and_the_counter_are_made_once():
    params, x = data(jnp.float32)
    program = ow.Adam(lambda step: 0.1 / (step + 1)).minimize(loss, params, x)
    types = [t.op.type for t in program.updates]
    assert types == ["count", "schedule", "adam", "adam"]
    assert [v.name for v in program.hyperparameters] == ["beta1", "beta2", "epsilon"]
    assert [t.op.update for t in program.updates] == [
        ow.UpdateType.BOOKKEEPING,
        ow.UpdateType.BOOKKEEPING,
        ow.UpdateType.ELEMENTWISE,
        ow.UpdateType.ELEMENTWISE,
    ]
    assert all(t.program is program for t in program.updates)


def test_a_rule_across_parameters_is_one_op():
    class NormalizedDescent(ow.Optimizer):
        """One step of fixed length along the whole gradient."""

        type = ow.UpdateType.ACROSS
        learning_rate: ow.Hyperparameter = 0.1

        def update(self, parameters, gradients, slots, h):
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
            return tuple(
                p - h.learning_rate * g / norm for p, g in zip(parameters, gradients, strict=True)
            ), slots

    params, x = data(jnp.float32)
    program = NormalizedDescent(0.5).minimize(loss, params, x)
    assert [t.op.type for t in program.updates] == ["count", "normalized_descent"]
    step = ow.compile(program)
    state, _ = step(step.init(params), x)
    moved = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), state.parameters, params)
    np.testing.assert_allclose(jnp.sqrt(sum(moved.values())), 0.5, rtol=1e-5)


def test_a_rule_may_evaluate_the_loss_again():
    class Backtracking(ow.Optimizer):
        """Armijo's rule: halve the step until the loss falls enough."""

        type = ow.UpdateType.ACROSS
        evaluates_loss = True
        learning_rate: ow.Hyperparameter = 1.0

        def update(self, parameters, gradients, slots, h, loss):
            here, slope = loss(*parameters), sum(jnp.sum(g**2) for g in gradients)

            def moved(rate):
                return tuple(p - rate * g for p, g in zip(parameters, gradients, strict=True))

            rate = jax.lax.while_loop(
                lambda rate: loss(*moved(rate)) > here - 0.5 * rate * slope,
                lambda rate: rate / 2,
                h.learning_rate,
            )
            return moved(rate), slots

    def steep(w, x):
        return jnp.sum(x * w**2)

    w, x = jnp.array([1.0, -2.0]), jnp.array([100.0, 1.0])
    step = ow.compile(Backtracking(1.0).minimize(steep, w, x))
    state = step.init(w)
    losses = []
    for _ in range(20):
        state, out = step(state, x)
        losses.append(float(out.loss))
    assert all(b < a for a, b in pairwise(losses))
    assert losses[-1] < 0.5 * losses[1]


def test_frozen_parameters_have_no_slots():
    params, x = data(jnp.float32)
    program = ow.Adam(0.1).minimize(loss, params, x, parameter_list=["a"])
    assert {v.name for v in program.state if "/" in v.name} == {"a/mean", "a/variance"}
    step = ow.compile(program)
    state, _ = step(step.init(params), x)
    np.testing.assert_array_equal(state.parameters["b"], params["b"])
    assert not np.array_equal(state.parameters["a"], params["a"])


def test_the_names_of_update_ops():
    names = {type(o).__name__: o.name for o in (ow.SGD(), ow.Adam(), ow.AdamW(), ow.Adagrad(), ow.Momentum())}
    assert names == {
        "SGD": "sgd",
        "Adam": "adam",
        "AdamW": "adam_w",
        "Adagrad": "adagrad",
        "Momentum": "momentum",
    }
