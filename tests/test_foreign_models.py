"""Models of other libraries train the first time, and exactly as they do in plain JAX with optax.

A ``Case`` is what a person arrives with: a loss, a model, perhaps its state, and batches. Each is trained
five steps by Onward and by ``jax.value_and_grad`` with optax; losses, parameters and state must agree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import equinox as eqx
import flax
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tests.pairs import missing_pairs

import onward as ow

STEPS = 5
KEY = jax.random.key(0)

OPTIMIZERS = {
    "sgd": (ow.SGD(0.05), optax.sgd(0.05)),
    "momentum": (ow.Momentum(0.05, 0.9), optax.sgd(0.05, momentum=0.9)),
    "nesterov": (ow.Momentum(0.05, 0.9, nesterov=True), optax.sgd(0.05, momentum=0.9, nesterov=True)),
    "adam": (ow.Adam(1e-2), optax.adam(1e-2)),
}


@dataclass(frozen=True)
class Case:
    """``loss(model, [state,] *batch)`` and everything to call it with."""

    loss: Callable[..., Any]
    model: Any
    batches: list[tuple[Any, ...]]
    state: Any = None


def regression(size=8, keyed=False):
    """Five batches of (x, y) with four features, each with a random key of its own where asked."""
    x = np.random.default_rng(0).standard_normal((STEPS, size, 4)).astype(np.float32)
    y = np.sin(x.sum(-1, keepdims=True))
    keys = jax.random.split(KEY, STEPS)
    return [(x[i], y[i], keys[i]) if keyed else (x[i], y[i]) for i in range(STEPS)]


def images(size=6):
    """Five batches of (image of 1x6x6, label of three, key)."""
    x = np.random.default_rng(1).standard_normal((STEPS, size, 1, 6, 6)).astype(np.float32)
    labels = np.arange(STEPS * size, dtype=np.int32).reshape(STEPS, size) % 3
    return list(zip(x, labels, jax.random.split(KEY, STEPS), strict=True))


def made(make, *arguments, low=-0.5):
    """What is made, by shape alone, and floats of NumPy in it: nothing is compiled for that."""
    draw = np.random.default_rng(2).uniform
    shapes, rest = eqx.partition(eqx.filter_eval_shape(make, *arguments), is_shape)
    return eqx.combine(
        jax.tree.map(lambda s: jnp.asarray(draw(low, 0.5, s.shape).astype(s.dtype)), shapes), rest
    )


def is_shape(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


def squared(prediction, y):
    return jnp.mean((prediction - y) ** 2)


# ------------------------------------------------------------------------------------------ equinox


def eqx_mlp(activation=jax.nn.relu, depth=1):
    def loss(model, x, y):
        return squared(jax.vmap(model)(x), y)

    return Case(loss, made(lambda key: eqx.nn.MLP(4, 1, 8, depth, activation, key=key), KEY), regression())


def eqx_sequential():
    def sequential(key):
        return eqx.nn.Sequential(
            [
                eqx.nn.Linear(4, 8, key=key),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.LayerNorm(8),
                eqx.nn.Dropout(0.3),
                eqx.nn.GRUCell(8, 5, key=key),
                eqx.nn.Linear(5, 1, key=key),
            ]
        )

    def loss(model, x, y, key):
        linear, gelu, norm, dropout, cell, out = model.layers

        def one(x, key):
            h = dropout(norm(gelu(linear(x))), key=key)
            return out(cell(h, jnp.zeros(5)))

        return squared(jax.vmap(one)(x, jax.random.split(key, len(x))), y)

    return Case(loss, made(sequential, KEY), regression(keyed=True))


class ConvNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear
    name: str

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 2, 3, key=first)
        self.norm = eqx.nn.LayerNorm(32)
        self.dropout = eqx.nn.Dropout(0.4)
        self.out = eqx.nn.Linear(32, 3, key=second)
        self.name = "a string among the leaves"

    def __call__(self, x, key):
        h = self.norm(jax.nn.relu(self.conv(x)).ravel())
        return self.out(self.dropout(h, key=key))


def eqx_conv():
    def loss(model, x, label, key):
        logits = jax.vmap(model)(x, jax.random.split(key, len(x)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    return Case(loss, made(ConvNet, KEY), images())


class NormNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, mode, key):
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 2, 3, use_bias=False, key=first)
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode=mode)
        self.out = eqx.nn.Linear(32, 3, key=second)

    def __call__(self, x, state):
        h, state = self.norm(self.conv(x), state)
        return self.out(jax.nn.relu(h).ravel()), state


def eqx_batch_norm(mode="batch"):
    model, state = eqx.nn.make_with_state(NormNet)(mode, KEY)

    def loss(model, state, x, label):
        apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = apply(x, state)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), state

    return Case(loss, model, [batch[:2] for batch in images()], state)


# --------------------------------------------------------------------------------------------- flax


class LinenNet(nn.Module):
    normalize: bool = False
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        h = nn.Dense(8, use_bias=not self.normalize)(x)
        if self.normalize:
            h = nn.BatchNorm(use_running_average=not train, momentum=0.9)(h)
        h = nn.Dropout(self.rate, deterministic=not train)(nn.tanh(h))
        return nn.Dense(1)(h)


def variables_of(net, low=-0.5):
    return made(lambda key, x: net.init(key, x, False), KEY, jnp.ones((1, 4)), low=low)


def linen():
    net = LinenNet()

    def loss(params, x, y):
        return squared(net.apply({"params": params}, x, True), y)

    return Case(loss, variables_of(net)["params"], regression())


def linen_all_variables():
    """The whole ``variables`` dict as parameters, frozen as flax offers it."""
    net = LinenNet()

    def loss(variables, x, y):
        return squared(net.apply(variables, x, True), y)

    return Case(loss, flax.core.freeze(variables_of(net)), regression())


def linen_dropout():
    net = LinenNet(rate=0.5)

    def loss(params, x, y, key):
        return squared(net.apply({"params": params}, x, True, rngs={"dropout": key}), y)

    return Case(loss, variables_of(net)["params"], regression(keyed=True))


def linen_batch_stats():
    net = LinenNet(normalize=True, rate=0.5)
    params, stats = variables_of(net)["params"], variables_of(net, low=0.1)["batch_stats"]

    def loss(params, batch_stats, x, y, key):
        prediction, updated = net.apply(
            {"params": params, "batch_stats": batch_stats},
            x,
            True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return squared(prediction, y), updated["batch_stats"]

    return Case(loss, params, regression(keyed=True), stats)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def nnx_params_only():
    graphdef, params = nnx.split(nnx.Linear(4, 1, rngs=nnx.Rngs(0)), nnx.Param)

    def loss(params, x, y):
        return squared(nnx.merge(graphdef, params)(x), y)

    return Case(loss, params, regression())


def nnx_with_rest():
    """Batch statistics and the dropout's own random counter are the rest that ``nnx.split`` leaves."""
    graphdef, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x, y):
        model = nnx.merge(graphdef, params, rest)
        value = squared(model(x), y)
        return value, nnx.split(model, nnx.Param, ...)[2]

    return Case(loss, params, regression(), rest)


# -------------------------------------------------------------------------------------------- haiku


def haiku():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 1])(x)))

    def loss(params, x, y):
        return squared(net.apply(params, x), y)

    return Case(loss, made(net.init, KEY, jnp.ones((1, 4))), regression())


def haiku_state():
    def forward(x):
        h = hk.Linear(8, with_bias=False)(x)
        h = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(h, is_training=True)
        return hk.Linear(1)(hk.dropout(hk.next_rng_key(), 0.5, jax.nn.relu(h)))

    net = hk.transform_with_state(forward)
    params, _ = made(net.init, KEY, jnp.ones((2, 4)))
    _, state = made(net.init, KEY, jnp.ones((2, 4)), low=0.1)

    def loss(params, state, x, y, key):
        prediction, state = net.apply(params, state, key, x)
        return squared(prediction, y), state

    return Case(loss, params, regression(keyed=True), state)


CASES: dict[str, Callable[[], Case]] = {
    "eqx-mlp": partial(eqx_mlp, depth=2),
    "eqx-mlp-swish": partial(eqx_mlp, jax.nn.swish),
    "eqx-mlp-prelu": lambda: eqx_mlp(eqx.nn.PReLU()),
    "eqx-mlp-lambda": lambda: eqx_mlp(lambda x: jnp.sin(x)),
    "eqx-sequential": eqx_sequential,
    "eqx-conv": eqx_conv,
    "eqx-batch-norm": eqx_batch_norm,
    "eqx-batch-norm-ema": partial(eqx_batch_norm, "ema"),
    "linen": linen,
    "linen-variables": linen_all_variables,
    "linen-dropout": linen_dropout,
    "linen-batch-stats": linen_batch_stats,
    "nnx-params": nnx_params_only,
    "nnx-rest": nnx_with_rest,
    "haiku": haiku,
    "haiku-state": haiku_state,
}


WITH_STATE = ["eqx-batch-norm", "linen-batch-stats", "nnx-rest", "haiku-state"]
TRAINED = {
    "eqx-mlp": ["sgd"],
    "eqx-mlp-swish": ["momentum"],
    "eqx-mlp-prelu": ["nesterov"],
    "eqx-mlp-lambda": ["sgd"],
    "eqx-sequential": ["momentum"],
    "eqx-conv": ["adam"],
    "eqx-batch-norm": ["nesterov"],
    "eqx-batch-norm-ema": ["sgd"],
    "linen": ["adam"],
    "linen-variables": ["nesterov"],
    "linen-dropout": ["sgd"],
    "linen-batch-stats": ["momentum"],
    "nnx-params": ["adam", "momentum", "nesterov"],
    "nnx-rest": ["sgd"],
    "haiku": ["nesterov", "sgd", "momentum"],
    "haiku-state": ["adam"],
}
PAIRS = [(case, optimizer) for case, chosen in TRAINED.items() for optimizer in chosen]


@cache
def case_of(name):
    return CASES[name]()


def training_program(case, optimizer):
    options = {} if case.state is None else {"state": case.state}
    return optimizer.minimize(case.loss, case.model, *case.batches[0], **options)


@cache
def compiled(name, optimizer):
    return ow.compile(training_program(case_of(name), OPTIMIZERS[optimizer][0]))


@cache
def trained_by_onward(name, optimizer):
    """The losses of five steps, and the State after them."""
    case, step = case_of(name), compiled(name, optimizer)
    state = step.init(case.model) if case.state is None else step.init(case.model, case.state)
    losses = []
    for batch in case.batches:
        state, out = step(state, *batch)
        losses.append(float(out.loss))
    return losses, state


@cache
def trained_by_optax(name, optimizer):
    """Plain JAX: the model's float arrays are trained, everything else stays in a closure."""
    case, rule = case_of(name), OPTIMIZERS[optimizer][1]
    params, static = eqx.partition(case.model, eqx.is_inexact_array)
    carried, fixed = eqx.partition(case.state, eqx.is_array)
    moments = rule.init(params)

    @jax.jit
    def step(params, carried, moments, *batch):
        def loss(params):
            model = eqx.combine(params, static)
            if case.state is None:
                return case.loss(model, *batch), None
            value, following = case.loss(model, eqx.combine(carried, fixed), *batch)
            return value, eqx.filter(following, eqx.is_array)

        (value, following), grads = jax.value_and_grad(loss, has_aux=True)(params)
        change, moments_after = rule.update(grads, moments, params)
        return optax.apply_updates(params, change), following, moments_after, value

    losses = []
    for batch in case.batches:
        params, carried, moments, value = step(params, carried, moments, *batch)
        losses.append(float(value))
    return losses, eqx.combine(params, static), eqx.combine(carried, fixed)


def assert_same(found, expected):
    """The same containers, the same static leaves, and arrays that agree."""
    assert type(found) is type(expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not eqx.is_array(other):
            assert one is other or one == other
        elif jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(other))
        else:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


def test_every_library_is_trained_by_every_optimizer_with_state_and_without():
    rows = [(case.split("-")[0], case_of(case).state is not None, optimizer) for case, optimizer in PAIRS]
    assert {case for case, _ in PAIRS} == set(CASES)
    assert missing_pairs(rows, ("eqx", "linen", "nnx", "haiku"), (False, True), OPTIMIZERS) == []


@pytest.mark.parametrize(("case", "optimizer"), PAIRS)
def test_five_steps_equal_plain_jax(case, optimizer):
    losses, state = trained_by_onward(case, optimizer)
    expected, model, carried = trained_by_optax(case, optimizer)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len(set(losses)) == STEPS
    assert_same(state.parameters, model)
    assert_same(state.model_state, carried)


@pytest.mark.parametrize("case", CASES)
def test_the_model_comes_back_as_it_was_passed_and_that_one_stays_usable(case):
    _, state = trained_by_onward(case, TRAINED[case][0])
    before = case_of(case)
    again = CASES[case]()
    for found, passed, untouched in (
        (state.parameters, before.model, again.model),
        (state.model_state, before.state, again.state),
    ):
        assert type(found) is type(passed)
        assert jax.tree.structure(found) == jax.tree.structure(passed)
        if passed is not None:
            arrays = jax.tree.leaves(eqx.filter(passed, eqx.is_inexact_array))
            same = jax.tree.leaves(eqx.filter(untouched, eqx.is_inexact_array))
            assert arrays
            assert all(map(np.array_equal, arrays, same))


@pytest.mark.parametrize("case", WITH_STATE)
def test_a_batch_of_another_size_goes_through_the_model_again(case):
    step, case = compiled(case, TRAINED[case][-1]), case_of(case)
    x, y, *rest = case.batches[1]
    _, out = step(step.init(case.model, case.state), x[:3], y[:3], *rest)
    # without jit, flax.nnx would write into the state that it is given
    expected, _ = eqx.filter_jit(case.loss)(case.model, case.state, x[:3], y[:3], *rest)
    np.testing.assert_allclose(out.loss, expected, rtol=1e-5)
    assert step.traces == 1


# ------------------------------------------------------------------------- what each library promises


def test_a_trained_equinox_model_predicts_with_its_static_leaves():
    case = case_of("eqx-conv")
    _, state = trained_by_onward("eqx-conv", TRAINED["eqx-conv"][0])
    _, model, _ = trained_by_optax("eqx-conv", TRAINED["eqx-conv"][0])
    trained = state.parameters
    assert (trained.name, trained.dropout) == (case.model.name, case.model.dropout)
    x = case.batches[0][0][0]
    found = eqx.nn.inference_mode(trained)(x, KEY)
    np.testing.assert_allclose(found, eqx.nn.inference_mode(model)(x, KEY), rtol=1e-4, atol=1e-5)
    assert not np.allclose(found, eqx.nn.inference_mode(case.model)(x, KEY), rtol=1e-3)


def test_the_activation_of_an_equinox_model_is_static_and_compared():
    case, step = case_of("eqx-mlp"), compiled("eqx-mlp", "sgd")
    assert [v.name for v in step.program.parameters] == [
        f"layers/{i}/{part}" for i in range(3) for part in ("weight", "bias")
    ]
    assert step.init(case.model).parameters.activation is case.model.activation
    other = eqx_mlp(jax.nn.tanh, depth=2).model
    with pytest.raises(ow.ArgumentError, match=r"holds .* where the traced one holds .*trace again"):
        step.init(other)


def test_the_slope_of_prelu_is_trained():
    case = case_of("eqx-mlp-prelu")
    _, state = trained_by_onward("eqx-mlp-prelu", TRAINED["eqx-mlp-prelu"][0])
    before, after = case.model.activation.negative_slope, state.parameters.activation.negative_slope
    assert after.shape == before.shape
    assert not np.array_equal(after, before)


def test_python_numbers_in_an_equinox_model_are_static():
    class Scaled(eqx.Module):
        weight: jax.Array
        factor: float
        times: int

        def __call__(self, x):
            h = x @ self.weight
            for _ in range(self.times):
                h = h * self.factor if self.factor > 1 else h
            return h

    def loss(model, x, y):
        return squared(model(x), y)

    batch = regression()[0]
    program = ow.SGD(0.1).minimize(loss, Scaled(jnp.ones((4, 1)), 2.0, 3), *batch)
    assert [v.name for v in program.parameters] == ["weight"]
    step = ow.compile(program)
    state, out = step(step.init(Scaled(jnp.ones((4, 1)), 2.0, 3)), *batch)
    np.testing.assert_allclose(out.loss, squared(8 * batch[0] @ np.ones((4, 1)), batch[1]), rtol=1e-5)
    assert (state.parameters.factor, state.parameters.times) == (2.0, 3)


def test_equinox_batch_norm_predicts_with_the_trained_statistics():
    case = case_of("eqx-batch-norm")
    _, state = trained_by_onward("eqx-batch-norm", TRAINED["eqx-batch-norm"][0])
    _, model, carried = trained_by_optax("eqx-batch-norm", TRAINED["eqx-batch-norm"][0])
    x = case.batches[0][0][0]
    found, _ = eqx.nn.inference_mode(state.parameters)(x, state.model_state)
    expected, _ = eqx.nn.inference_mode(model)(x, carried)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_trained_linen_parameters_go_back_into_apply():
    case = case_of("linen-batch-stats")
    _, state = trained_by_onward("linen-batch-stats", TRAINED["linen-batch-stats"][0])
    net = LinenNet(normalize=True, rate=0.5)
    variables = {"params": state.parameters, "batch_stats": state.model_state}
    _, params, stats = trained_by_optax("linen-batch-stats", TRAINED["linen-batch-stats"][0])
    x = case.batches[0][0]
    expected = net.apply({"params": params, "batch_stats": stats}, x, False)
    np.testing.assert_allclose(net.apply(variables, x, False), expected, rtol=1e-4, atol=1e-5)


def test_nnx_update_takes_the_trained_parameters():
    model = NnxNet(nnx.Rngs(0))
    case = case_of("nnx-rest")
    _, state = trained_by_onward("nnx-rest", TRAINED["nnx-rest"][0])
    nnx.update(model, state.parameters, state.model_state)
    model.eval()
    _, params, rest = trained_by_optax("nnx-rest", TRAINED["nnx-rest"][0])
    other = NnxNet(nnx.Rngs(0))
    nnx.update(other, params, rest)
    other.eval()
    x = case.batches[0][0]
    np.testing.assert_allclose(model(x), other(x), rtol=1e-4, atol=1e-5)


def test_random_keys_and_counters_of_nnx_are_carried_and_not_trained():
    program = compiled("nnx-rest", "sgd").program
    kinds = {v.name: v.kind for v in program.state if v.name.startswith("rest/")}
    assert set(kinds.values()) == {ow.Kind.STATE}
    assert {name for name in kinds if "rngs" in name} == {
        "rest/dropout/rngs/count/value",
        "rest/dropout/rngs/key/value",
    }
    _, state = trained_by_onward("nnx-rest", TRAINED["nnx-rest"][0])
    assert int(state["rest/dropout/rngs/count/value"]) == STEPS


def test_haiku_module_names_are_part_of_the_variable_names():
    program = compiled("haiku", "sgd").program
    names = [v.name for v in program.parameters]
    assert names == [f"mlp/~/linear_{i}/{part}" for i in range(2) for part in ("b", "w")]


def test_a_frozen_layer_of_a_foreign_model_stays():
    case = case_of("eqx-mlp")
    program = ow.SGD(0.1).minimize(
        case.loss, case.model, *case.batches[0], parameter_list=["layers/1/*", "layers/2/*"]
    )
    step = ow.compile(program)
    state, _ = step(step.init(case.model), *case.batches[0])
    assert [p.name for p, _ in program.gradients] == [
        f"layers/{i}/{p}" for i in (1, 2) for p in ("weight", "bias")
    ]
    np.testing.assert_array_equal(state.parameters.layers[0].weight, case.model.layers[0].weight)
    assert not np.array_equal(state.parameters.layers[1].weight, case.model.layers[1].weight)


def test_models_without_arrays_to_train_are_refused_by_name():
    with pytest.raises(ow.LossError, match="no parameters"):
        ow.SGD(0.1).minimize(lambda model, x: jnp.sum(model(x)), eqx.nn.Lambda(jax.nn.relu), jnp.ones(3))


# ------------------------------------------------------------------- what is told whether it is trained


def eqx_evaluated():
    """A loss that asks, and the library's own prediction when nothing is trained."""
    case = eqx_batch_norm()

    class Dropped(eqx.Module):
        net: NormNet
        dropout: eqx.nn.Dropout

        def __call__(self, x, state, key):
            return self.net(self.dropout(x, key=key), state)

    def apply(model, state, x, key):
        apply = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        return apply(x, state, jax.random.split(key, len(x)))

    def loss(model, state, x, y, key):
        logits, state = apply(eqx.nn.inference_mode(model, not ow.is_training()), state, x, key)
        return squared(logits[:, :1], y), state

    def predict(model, state, x):
        return apply(eqx.nn.inference_mode(model), state, x, KEY)[0][:, :1]

    batches = [(x, np.float32(label)[:, None], key) for x, label, key in images()]
    return Case(loss, Dropped(case.model, eqx.nn.Dropout(0.5)), batches, case.state), predict


def linen_evaluated():
    net, case = LinenNet(normalize=True, rate=0.5), linen_batch_stats()

    def loss(params, stats, x, y, key):
        prediction, changed = net.apply(
            {"params": params, "batch_stats": stats},
            x,
            ow.is_training(),
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return squared(prediction, y), changed["batch_stats"]

    def predict(params, stats, x):
        return net.apply({"params": params, "batch_stats": stats}, x, False)

    return Case(loss, case.model, case.batches, case.state), predict


def nnx_evaluated():
    graphdef, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x, y):
        model = nnx.merge(graphdef, params, rest)
        if not ow.is_training():
            model.eval()
        return squared(model(x), y), nnx.state(model, nnx.Not(nnx.Param))

    def predict(params, rest, x):
        model = nnx.merge(graphdef, params, rest)
        model.eval()
        return model(x)

    return Case(loss, params, regression(), rest), predict


def haiku_evaluated():
    def forward(x, is_training):
        h = hk.Linear(8, with_bias=False)(x)
        h = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(h, is_training)
        return hk.Linear(1)(hk.dropout(hk.next_rng_key(), 0.5 if is_training else 0.0, jax.nn.relu(h)))

    net, case = hk.transform_with_state(forward), haiku_state()

    def loss(params, state, x, y, key):
        prediction, state = net.apply(params, state, key, x, ow.is_training())
        return squared(prediction, y), state

    def predict(params, state, x):
        return net.apply(params, state, KEY, x, False)[0]

    return Case(loss, case.model, case.batches, case.state), predict


EVALUATED = {
    "eqx": eqx_evaluated,
    "linen": linen_evaluated,
    "nnx": nnx_evaluated,
    "haiku": haiku_evaluated,
}


@pytest.mark.parametrize("make", EVALUATED.values(), ids=EVALUATED)
def test_the_test_program_evaluates_as_the_library_itself(make):
    """Another batch than that of training; the statistics stay as they are."""
    case, predict = make()
    program = training_program(case, ow.SGD(0.05))
    step, test = ow.compile(program), ow.compile(ow.for_test(program), donate=False)
    state = step.init(case.model, case.state)
    for batch in case.batches[:2]:
        state, _ = step(state, *batch)
    batch = case.batches[2]
    after, out = test(state, *batch)
    own = predict(state.parameters, state.model_state, batch[0])
    np.testing.assert_allclose(out.loss, squared(own, batch[1]), rtol=1e-5)
    assert_same(after.model_state, state.model_state)
    assert not np.isclose(out.loss, step(state, *batch)[1].loss)


# ------------------------------------------------------------- what no step would replace is refused


def whole_nnx():
    graphdef, everything = nnx.split(NnxNet(nnx.Rngs(0)))
    return (
        lambda model, x, y: squared(nnx.merge(graphdef, model)(x), y),
        everything,
        r"nnx\.split\(model, nnx\.Param",
    )


def whole_nnx_module():
    return lambda model, x, y: squared(model(x), y), NnxNet(nnx.Rngs(0)), r"nnx\.split\(model, nnx\.Param"


def whole_nnx_without_dropout():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.norm(x)

    return (
        lambda model, x, y: squared(model(x), y),
        Net(nnx.Rngs(0)),
        r"would replace 'norm/mean/value' .*'norm/var/value' .*nnx\.Not\(nnx\.Param\)",
    )


def whole_nnx_in_evaluation():
    """The loss reads the statistics, which would be trained."""
    loss, model, _ = whole_nnx_without_dropout()
    model.eval()
    return loss, model, r"would train 'norm/mean/value' .*'norm/var/value' .*nnx\.split"


def whole_linen():
    net = LinenNet(normalize=True)

    def loss(variables, x, y):
        return squared(net.apply(variables, x, True, mutable=["batch_stats"])[0], y)

    return loss, variables_of(net, low=0.1), r"would replace 'batch_stats/.*/mean'.*mutable=\[\"batch_stats"


def whole_haiku():
    net = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(hk.Linear(1)(x), is_training=True))
    variables = made(net.init, KEY, jnp.ones((2, 4)))

    def loss(variables, x, y):
        return squared(net.apply(*variables, None, x)[0], y)

    return loss, variables, r"would replace .*mean_ema/hidden'.*transform_with_state"


def whole_eqx(mode="batch"):
    model, state = eqx.nn.make_with_state(partial(eqx.nn.BatchNorm, axis_name="batch", mode=mode))(4)

    def loss(both, x, y):
        apply = jax.vmap(both[0], axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return squared(apply(x, both[1])[0], y)

    return loss, (model, state), r"would (replace|train) .*make_with_state"


WHOLE = {
    "nnx": whole_nnx,
    "nnx module": whole_nnx_module,
    "nnx without dropout": whole_nnx_without_dropout,
    "nnx in evaluation": whole_nnx_in_evaluation,
    "linen": whole_linen,
    "haiku": whole_haiku,
    "eqx": whole_eqx,
    "eqx ema": partial(whole_eqx, "ema"),
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_everything_as_parameters_is_refused_with_the_recipe_of_the_library(make):
    loss, model, words = make()
    with pytest.raises(ow.ArgumentError, match=f"(?s){words}"):
        ow.SGD(0.1).minimize(loss, model, *regression()[0])


def dropped_by_nnx(**options):
    """A list of modules, of which one keeps a key and a counter."""
    rngs = nnx.Rngs(0)
    model = [nnx.Linear(4, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs, **options)]
    return lambda model, x, y: squared(model[1](model[0](x)), y), model, *regression()[0]


def test_dropout_of_nnx_is_refused_where_it_draws():
    with pytest.raises(ow.ArgumentError, match=r"(?s)'.*/count/value'.*'.*/key/value'.*nnx\.Param"):
        ow.SGD(0.1).minimize(*dropped_by_nnx())
    assert ow.SGD(0.1).minimize(*dropped_by_nnx(deterministic=True)).gradients
