"""Every first-order optimizer against the equations of its paper, against optax, and at the edges."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from tests.compiled import together, training
from tests.derive.optimizers import papers
from tests.derive.optimizers.reference import assert_as_in_the_paper, by_the_paper, given, run

import onward as ow
from onward.derive.optimizers.arithmetic import bias_correction

CASES = {
    "SGD": (ow.SGD(0.1), papers.sgd),
    "Momentum": (ow.Momentum(0.1), papers.momentum),
    "Momentum, nesterov": (ow.Momentum(0.1, nesterov=True), papers.nesterov),
    "Nesterov": (ow.Nesterov(0.1, 0.8), papers.nesterov),
    "ASGD": (ow.optimizer.ASGD(0.1, decay=0.5), papers.asgd),
    "SignSGD": (ow.optimizer.SignSGD(0.1), papers.sign_sgd),
    "Signum": (ow.optimizer.Signum(0.1), papers.signum),
    "Lion": (ow.Lion(0.1, weight_decay=0.2), papers.lion),
    "Rprop": (ow.optimizer.Rprop(0.1, largest=0.2), papers.rprop),
    "Adagrad": (ow.Adagrad(0.1, 1e-6, initial_accumulator=0.5), papers.adagrad),
    "DecayedAdagrad": (ow.optimizer.DecayedAdagrad(0.1), papers.decayed_adagrad),
    "Adadelta": (ow.optimizer.Adadelta(), papers.adadelta),
    "RMSProp": (ow.RMSProp(0.1), papers.rmsprop),
    "RMSProp, centered, momentum": (ow.RMSProp(0.1, momentum=0.8, centered=True), papers.graves),
    "Adam": (ow.Adam(0.1, 0.9, 0.99, 1e-6), papers.adam),
    "AdamW": (ow.AdamW(0.1, weight_decay=0.2), papers.adamw),
    "LazyAdam": (ow.optimizer.LazyAdam(0.1), papers.lazy_adam),
    "AMSGrad": (ow.optimizer.AMSGrad(0.1, beta2=0.9), papers.amsgrad),
    "Adamax": (ow.optimizer.Adamax(0.1), papers.adamax),
    "NAdam": (ow.optimizer.NAdam(0.1, momentum_decay=0.1), papers.nadam),
    "RAdam": (ow.optimizer.RAdam(0.1), papers.radam),
    "Yogi": (ow.optimizer.Yogi(0.1), papers.yogi),
    "AdaBelief": (ow.optimizer.AdaBelief(0.1), papers.adabelief),
    "ADOPT": (ow.optimizer.ADOPT(0.1), papers.adopt),
    "Adan": (ow.optimizer.Adan(0.1, weight_decay=0.2), papers.adan),
    "AdEMAMix": (ow.optimizer.AdEMAMix(0.1, weight_decay=0.2, warmup=60), papers.ademamix),
    "MARS": (ow.optimizer.MARS(0.1, weight_decay=0.2, gamma=0.1), papers.mars),
}
SIGNS = {"SignSGD": "SGD", "Signum": "Momentum", "Lion": "AdamW", "Rprop": "Adam"}
PEERS = {
    "SGD": optax.sgd(0.1),
    "Momentum": optax.sgd(0.1, 0.9),
    "Nesterov": optax.sgd(0.1, 0.8, nesterov=True),
    "SignSGD": optax.sign_sgd(0.1),
    "Signum": optax.chain(optax.ema(0.9, debias=False), optax.sign_sgd(0.1)),
    "Lion": optax.lion(0.1, weight_decay=0.2),
    "DecayedAdagrad": optax.rmsprop(0.1, 0.95, 1e-6, eps_in_sqrt=False),
    "Adadelta": optax.adadelta(1.0, rho=0.95),
    "RMSProp": optax.rmsprop(0.1),
    "RMSProp, centered, momentum": optax.rmsprop(0.1, momentum=0.8, centered=True),
    "Adam": optax.adam(0.1, 0.9, 0.99, 1e-6),
    "AdamW": optax.adamw(0.1, weight_decay=0.2),
    "Adamax": optax.adamax(0.1),
    "RAdam": optax.radam(0.1),
    "AdaBelief": optax.adabelief(0.1),
    "ADOPT": optax.contrib.adopt(0.1),
}
RATES = np.array([0.1, 0.3], np.float32)


@cache
def swept():
    """Of every optimizer a hundred steps with each of the learning rates, which are the first axis."""

    def both(optimizer):
        return jax.vmap(lambda rate, tree: run(optimizer, *tree, learning_rate=rate), (0, None))

    return together(
        {name: (both(optimizer), RATES, given("float32")) for name, (optimizer, _) in CASES.items()}
    )


@pytest.mark.parametrize("name", CASES)
def test_a_hundred_steps_of_the_papers_equations_with_two_learning_rates_at_once(name):
    optimizer, rule = CASES[name]
    for i, rate in enumerate(RATES):
        expected = by_the_paper(rule, optimizer, *given("float32"), learning_rate=rate)
        assert_as_in_the_paper({k: v[i] for k, v in swept()[name].items()}, expected, 1e-5)


def wide(name):
    """A matrix in double precision, and complex numbers where they have a sign."""
    parameters, gradients = given("float64", shapes={"matrix": (3, 2)})
    if name in SIGNS:
        return parameters, gradients
    more = given("complex128", shapes={"complex": (4,)})
    return parameters | more[0], gradients | more[1]


@cache
def in_double_precision():
    with jax.enable_x64(True):
        return together(
            {name: (partial(run, optimizer), *wide(name)) for name, (optimizer, _) in CASES.items()}
        )


@pytest.mark.parametrize("name", CASES)
def test_a_hundred_steps_in_double_precision_and_of_complex_numbers(name):
    optimizer, rule = CASES[name]
    parameters, gradients = wide(name)
    actual = in_double_precision()[name]
    assert {k: v.dtype for k, v in actual.items()} == {k: v.dtype for k, v in parameters.items()}
    expected = by_the_paper(rule, optimizer, parameters, gradients)
    assert_as_in_the_paper(actual, expected, 1e-12)


def as_optax(peer):
    def trajectory(w, gradients):
        def advance(carry, gradient):
            w, slots = carry
            updates, slots = peer.update(gradient, slots, w)
            w = optax.apply_updates(w, updates)
            return (w, slots), w

        return jax.lax.scan(advance, (w, peer.init(w)), gradients)[1]

    return trajectory


@cache
def of_both():
    """The same ten steps of ours and of optax."""
    tree = given("float32", steps=10, shapes={"matrix": (3, 4)})
    ours = {name: (partial(run, CASES[name][0]), *tree) for name in PEERS}
    theirs = {f"optax {name}": (as_optax(peer), *tree) for name, peer in PEERS.items()}
    return together(ours | theirs)


@pytest.mark.parametrize("name", PEERS)
def test_the_same_as_optax(name):
    assert_as_in_the_paper(of_both()[name], of_both()[f"optax {name}"], 1e-4)


SHAPES_AND_DTYPES = {
    "scalar": np.ones((), jnp.bfloat16),
    "kernel": np.ones((2, 2, 1, 2), np.float16),
    "empty": np.ones((0, 3), np.float32),
}


MOVED = np.linspace(-1, 2, 4, dtype=np.float32)


@cache
def beside_zeros():
    """Of every optimizer five steps of a Program in which the gradients of all but one parameter are zero."""
    params = SHAPES_AND_DTYPES | {"moved": MOVED}

    def loss(params, zero):
        moved = jnp.sum(jnp.cos(3 * params["moved"]))
        return moved + sum(jnp.sum(p.astype(jnp.float32)) * zero for p in params.values())

    def case(optimizer):
        program = optimizer.minimize(loss, params, 0.0)
        return training(program, params, np.zeros(5, np.float32), fetch=["grad(moved)"])

    return together({name: case(optimizer) for name, (optimizer, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_zero_gradients_move_nothing_whatever_the_shape_and_dtype(name):
    """Beside them one parameter of which the gradient is not zero, as the paper says."""
    optimizer, rule = CASES[name]
    after, seen = beside_zeros()[name]
    expected = by_the_paper(rule, optimizer, {"moved": MOVED}, {"moved": seen["grad(moved)"]})
    assert_as_in_the_paper({"moved": after["moved"]}, {"moved": expected["moved"][-1]}, 1e-5)
    for k, before in SHAPES_AND_DTYPES.items():
        assert after[k].dtype == before.dtype
        if "weight_decay" in optimizer.hyperparameters:
            assert np.all(after[k] > 0)
            assert np.all(after[k] <= 1)
        else:
            np.testing.assert_array_equal(after[k], before)


@pytest.mark.parametrize("name", SIGNS)
def test_complex_parameters_have_no_sign(name):
    with pytest.raises(ow.HyperparameterError, match=f"{name}.*complex64.*Use {SIGNS[name]} "):
        CASES[name][0].minimize(lambda z: jnp.abs(z) ** 2, jnp.complex64(1j))


def test_gradients_of_complex_parameters_point_uphill():
    step = ow.compile(ow.optimizer.NAdam(0.1).minimize(lambda z: jnp.abs(z - 1j) ** 2, jnp.complex64(1)))
    state = step.init(jnp.complex64(1))
    for _ in range(60):
        state, _ = step(state)
    assert abs(complex(state.parameters) - 1j) < 0.1


@pytest.mark.parametrize(
    ("kind", "name"),
    [(type(o), n) for o in {type(o): o for o, _ in CASES.values()}.values() for n in o.below_one],
)
def test_a_mean_that_would_never_forget_or_grow_is_refused(kind, name):
    with pytest.raises(ow.HyperparameterError, match=f"{kind.__name__}: {name} is 1.0.*less than 1"):
        kind(**{name: 1.0})


@pytest.mark.parametrize("name", CASES)
def test_negative_hyperparameters_are_refused(name):
    kind = type(CASES[name][0])
    for field in kind().hyperparameters:
        with pytest.raises(ow.HyperparameterError, match=f"{kind.__name__}: {field} is -1.0.*at least 0"):
            kind(**{field: -1.0})


def test_steps_of_rprop_that_never_grow_are_refused():
    with pytest.raises(ow.HyperparameterError, match=r"Rprop: eta_plus is 0.9. It must be at least 1"):
        ow.optimizer.Rprop(eta_plus=0.9)


@pytest.mark.parametrize("after", [0, 7])
def test_asgd_is_evaluated_at_the_mean_of_its_weights(after):
    optimizer = ow.optimizer.ASGD(0.1, average_after=after)
    step = ow.compile(optimizer.minimize(lambda w: (w - 1) ** 2, jnp.float32(3.0)))
    state, weights = step.init(jnp.float32(3.0)), []
    for _ in range(20):
        state, _ = step(state)
        weights.append(float(state.parameters))
    average = optimizer.evaluated(state.parameters, {"average": state["w/average"]})
    np.testing.assert_allclose(average, np.mean(weights[after:]), rtol=1e-5)


def test_lazy_adam_leaves_the_slots_of_untouched_rows():
    optimizer, table = ow.optimizer.LazyAdam(0.1), jnp.ones((3, 2))
    step = ow.compile(optimizer.minimize(lambda t, rows: jnp.sum(t[rows] ** 2), table, jnp.array([0])))
    state, _ = step(step.init(table), jnp.array([1]))
    before = {n: np.asarray(state[n]) for n in ("t", "t/mean", "t/variance")}
    state, _ = step(state, jnp.array([2]))
    for name, value in before.items():
        changed = np.any(np.asarray(state[name]) != value, axis=1)
        assert changed.tolist() == [False, False, True], name


def test_a_momentum_of_zero_keeps_no_velocity_that_could_be_turned_on():
    plain, heavy = ow.RMSProp(), ow.RMSProp(momentum=0.5)
    program = plain.minimize(lambda w: w**2, jnp.float32(1.0))
    assert {v.name for v in program.state} == {"w", "w/variance", "step", *plain.hyperparameters}
    assert "momentum" not in plain.hyperparameters
    assert "momentum" in heavy.hyperparameters
    assert "momentum" in ow.RMSProp(momentum=lambda step: 0.0).hyperparameters


def test_ademamix_without_warmup_is_that_after_the_warmup():
    tree = given("float32", steps=6, shapes={"vector": (5,)})
    optimizers = [*(ow.optimizer.AdEMAMix(0.1, beta3=0.99, warmup=w) for w in (0, 1, 1e4)), ow.Adam(0.1)]
    found = together({i: (partial(run, optimizer), *tree) for i, optimizer in enumerate(optimizers)})
    never, done, long, adam = (path["vector"] for path in found.values())
    np.testing.assert_array_equal(never, done)
    np.testing.assert_allclose(long, adam, atol=1e-3)
    assert not np.allclose(never, adam, atol=1e-2)


def test_the_names_of_update_ops():
    names = {
        ow.optimizer.AMSGrad: "ams_grad",
        ow.optimizer.ADOPT: "adopt",
        ow.RMSProp: "rms_prop",
        ow.optimizer.SignSGD: "sign_sgd",
    }
    assert {kind: kind().name for kind in names} == names


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9, 0.9999])
def test_the_bias_correction_keeps_its_digits(beta):
    t, exact = np.arange(1, 2000, dtype=np.int32), np.float64(np.float32(beta))
    np.testing.assert_allclose(bias_correction(jnp.float32(beta), t), 1 - exact**t, rtol=1e-6)
