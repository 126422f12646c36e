"""Transformations of optax as optimizers: the same steps, state by name, and what they compose with."""

from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from tests.compiled import together, training

import onward as ow

ROWS, STEPS = 8, 4
ELEMENTWISE, PER_MATRIX, ACROSS = ow.UpdateType.ELEMENTWISE, ow.UpdateType.PER_MATRIX, ow.UpdateType.ACROSS


def matrices(tree):
    return jax.tree.map(lambda a: a.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda a: "matrix" if a.ndim > 1 else "other", tree)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 3e-2, 2, 10)
ADAM = optax.adam(1e-2)
KINDS = {
    "schedule and mask": (optax.adamw(SCHEDULE, weight_decay=0.1, mask=matrices), ELEMENTWISE),
    "nothing kept": (optax.sgd(0.1), ELEMENTWISE),
    "numbers alone": (optax.rprop(1e-2), ELEMENTWISE),
    "partition": (
        optax.partition({"matrix": ADAM, "other": optax.sgd(0.1, 0.9)}, labels),
        ELEMENTWISE,
    ),
    "masked": (optax.masked(optax.lion(1e-2), matrices), ELEMENTWISE),
    "injected": (optax.inject_hyperparams(optax.rmsprop)(learning_rate=SCHEDULE, decay=0.8), ELEMENTWISE),
    "schedule free": (optax.contrib.schedule_free_adamw(1e-2), ELEMENTWISE),
    "norms": (optax.lamb(1e-2), PER_MATRIX),
    "matrices": (optax.contrib.muon(1e-2, ns_steps=2), PER_MATRIX),
    "rows and columns": (optax.adafactor(1e-2, min_dim_size_to_factor=2), PER_MATRIX),
    "noise": (optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(0.1)), PER_MATRIX),
    "all together": (
        optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.9), optax.scale(-0.1)),
        ACROSS,
    ),
    "distance": (optax.contrib.prodigy(1.0), ACROSS),
    "every other": (optax.MultiSteps(ADAM, 2), ACROSS),
    "if finite": (optax.apply_if_finite(ADAM, 2), ACROSS),
    "dtypes of its own": (optax.adam(1e-2, mu_dtype=jnp.bfloat16), ELEMENTWISE),
}


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["dense"]["w"] + params["dense"]["b"])
    return jnp.mean((hidden * params["scale"] - y) ** 2)


def parameters(dtype="float32"):
    random = np.random.default_rng(0)
    dense = {"b": random.normal(size=2), "w": random.normal(size=(3, 2))}
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), {"dense": dense, "scale": 0.7})


def batches():
    x = np.random.default_rng(1).normal(size=(STEPS, ROWS, 3)).astype("float32")
    return x, np.sin(x[..., :2])


@cache
def minimized(kind):
    x, y = batches()
    return ow.from_optax(KINDS[kind][0]).minimize(loss, parameters(), x[0], y[0])


def plain(transformation, params, *data):
    """The parameters after each step of optax."""

    def advance(carry, batch):
        params, state = carry
        updates, state = transformation.update(jax.grad(loss)(params, *batch), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.lax.scan(advance, (params, transformation.init(params)), data)[1]


def without_keys(whole, *given):
    """Random keys are no array of NumPy."""
    state, seen = whole(*given)
    return {n: x for n, x in state.items() if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}, seen


@cache
def of_both():
    cases: dict[Any, Any] = {}
    for kind, (transformation, _) in KINDS.items():
        names = ["dense/b", "dense/w", "scale"]
        whole, *given = training(minimized(kind), parameters(), *batches(), after=names)
        cases[kind] = partial(without_keys, whole), *given
        cases["optax", kind] = partial(plain, transformation), parameters(), *batches()
    return together(cases)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_optax(kind):
    ours, theirs = of_both()[kind][1], of_both()["optax", kind]
    expected = {"dense/b": theirs["dense"]["b"], "dense/w": theirs["dense"]["w"], "scale": theirs["scale"]}
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_how_far_it_looks_is_found(kind):
    program = minimized(kind)
    made = [op for op in program.ops if op.type == ow.from_optax(KINDS[kind][0]).name]
    assert {op.update for op in made} == {KINDS[kind][1]}
    assert len(made) == (1 if KINDS[kind][1] is ACROSS else 3)


def test_the_update_reads_like_one_of_our_own():
    program = minimized("schedule and mask")
    told = str(program)
    w = "next(dense/w), next(dense/w/mu), next(dense/w/nu) = scale_by_adam(grad(dense/w), "
    assert w in told
    assert "next(scale_by_adam/count)" in told
    plan = ow.from_optax(KINDS["schedule and mask"][0]).plan(program)
    assert str(plan).startswith("Plan of from_optax(scale_by_adam, ")
    assert [*plan["dense/w"].slots] == ["dense/w/mu", "dense/w/nu"]
    assert plan["dense/w"].slot_bytes == 48


def test_float64_parameters_are_updated_in_float64():
    with jax.enable_x64(True):
        params, data = parameters("float64"), [a.astype("float64") for a in batches()]
        transformation = optax.adamw(1e-2)
        program = ow.from_optax(transformation).minimize(loss, params, *(a[0] for a in data))
        found = together(
            {
                "ours": training(program, params, *data, after=["dense/w"]),
                "theirs": (partial(plain, transformation), params, *data),
            }
        )
    assert found["ours"][0]["dense/w/mu"].dtype == "float64"
    np.testing.assert_allclose(found["ours"][1]["dense/w"], found["theirs"]["dense"]["w"], rtol=1e-13)


def test_bfloat16_parameters_stay_as_optax_has_them_or_get_a_master():
    def forward(w):
        return jnp.sum(w.astype("float32") ** 2)

    w = jnp.asarray([1.0, 3.0], "bfloat16")
    types = {}
    for how in ("nearest", "master"):
        program = ow.from_optax(optax.adam(1e-4), low_precision=how).minimize(forward, w)
        types[how] = {v.name: str(v.dtype) for v in program.state if v.name.startswith("w/")}
    assert types["nearest"] == {"w/mu": "bfloat16", "w/nu": "bfloat16"}
    assert types["master"] == dict.fromkeys(["w/rest", "w/mu", "w/nu"], "float32")


def test_a_complex_gradient_points_uphill():
    step = ow.compile(
        ow.from_optax(optax.sgd(0.5)).minimize(lambda z: jnp.abs(z) ** 2, jnp.complex64(1 + 2j))
    )
    state, _ = step(step.init(jnp.complex64(1 + 2j)))
    assert abs(complex(state.parameters)) < 1e-6


class Pair(NamedTuple):
    a: Any
    b: Any


def test_it_sees_the_containers_and_only_what_is_trained():
    seen = []

    def init(params):
        seen.append(jax.tree.map(jnp.shape, params))
        return ()

    descent = optax.GradientTransformation(init, lambda g, s, _: (jax.tree.map(jnp.negative, g), s))
    params = [Pair(jnp.ones(2), jnp.ones(3)), {"c": jnp.float32(1)}]

    def total(params):
        return sum(jnp.sum(x) for x in jax.tree.leaves(params))

    ow.from_optax(descent).minimize(total, params, parameter_list=["params/0/a", "params/1/c"])
    ow.from_optax(descent, groups=[ow.Group("params/0/*", frozen=True)]).minimize(total, params)
    ow.SGD(0.1, groups=[ow.Group("*/b", ow.from_optax(descent))]).minimize(total, params)
    chosen, frozen, group = seen
    assert chosen == [Pair((2,), None), {"c": ()}]
    assert frozen == [Pair(None, None), {"c": ()}]
    assert group == [Pair(None, (3,)), {"c": None}]


def test_a_module_is_seen_as_equinox_filters_it():
    model = eqx.nn.Linear(2, 1, key=jax.random.key(0))
    seen = []
    transformation = optax.masked(optax.sgd(0.1), lambda tree: seen.append(tree) or matrices(tree))
    ow.from_optax(transformation).minimize(lambda m: jnp.sum(m(jnp.ones(2))), model)
    assert jax.tree.structure(seen[0]) == jax.tree.structure(eqx.filter(model, eqx.is_inexact_array))


def test_what_inject_hyperparams_has_is_changed_without_compiling():
    transformation = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    optimizer = ow.from_optax(transformation, rules=[ow.WeightDecay(0.5)])
    step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2)))
    state = step.init(jnp.ones(2))
    assert {"learning_rate", "weight_decay/rate"} <= set(state.hyperparameters)
    state, _ = step(state.replace({"learning_rate": 0.2}), np.ones(2, "float32"))
    np.testing.assert_allclose(state.parameters, 1 - 0.2 - 0.2 * 0.5, rtol=1e-6)
    state, _ = step(state.replace({"learning_rate": 0.0}), np.ones(2, "float32"))
    np.testing.assert_allclose(state.parameters, 0.7, rtol=1e-6)
    assert step.compilations == 1


def trained(program):
    step = ow.compile(program)
    state = step.init(parameters())
    for batch in zip(*batches(), strict=True):
        state, _ = step(state, *batch)
    return state


def batch_in_parts(program):
    return ow.replicate(ow.accumulate(ow.guard(program), 2), 2, ow.Sharded())


def watched_on_two(program):
    return ow.replicate(ow.watch(program, "grad(*)"), 2)


@pytest.mark.parametrize(
    ("kind", "transform"), [("schedule and mask", batch_in_parts), ("all together", watched_on_two)]
)
def test_transforms_leave_the_steps_what_they_are(kind, transform):
    found, expected = trained(transform(minimized(kind))), of_both()[kind][0]
    for name, value in expected.items():
        mine = np.ravel(found[name])[: value.size]  # what is sharded lies end to end
        np.testing.assert_allclose(mine, value.ravel(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_parameter_servers_cut_what_looks_at_single_numbers():
    cut = ow.split(minimized("schedule and mask"), servers=2, trainers=2)
    first, second = cut.servers
    assert [op.type for op in first.ops] == [
        "recv",
        "count",
        "advance",
        "scale_by_adam",
        "scale_by_adam",
        "send",
    ]
    assert [op.type for op in second.ops] == ["recv", "scale_by_adam", "scale_by_adam", "send"]
    assert [v.name for v in second.state if v.name.endswith("/mu")] == ["dense/w[1:3]/mu", "scale/mu"]


@pytest.mark.parametrize(
    ("kind", "transform", "words"),
    [
        (
            "norms",
            lambda p: ow.replicate(p, 2, ow.Sharded()),
            "scale_by_trust_ratio, scale) looks at them per mat",
        ),
        (
            "distance",
            lambda p: ow.replicate(p, 2, ow.Sharded()),
            "from_optax(prodigy) looks at them across param",
        ),
        ("distance", lambda p: ow.split(p, 2, 2), "from_optax(prodigy) looks at all parameters at once"),
    ],
    ids=["sharded norms", "sharded distance", "split"],
)
def test_what_looks_further_is_not_cut(kind, transform, words):
    with pytest.raises(ow.GraphError) as raised:
        transform(minimized(kind))
    assert words in str(raised.value)


def unsteady(gradients, state, params):
    return gradients, (state, state)


@pytest.mark.parametrize(
    ("transformation", "error", "words"),
    [
        (
            optax.adam,
            ow.ArgumentError,
            "was given the function 'adam'; expected a gradient transformation with",
        ),
        (
            ow.Adam(0.1),
            ow.ArgumentError,
            "expected a gradient transformation with init(parameters) and update(",
        ),
        (optax.lbfgs(), ow.ArgumentError, "'value', 'grad', and 'value_fn'. An update has these three alone"),
        (
            optax.polyak_sgd(1.0),
            ow.ArgumentError,
            "parameters: 'value'. An update has these three alone. Take",
        ),
        (optax.contrib.sophia(0.1), ow.ArgumentError, "'obj_fn'. An update has these three alone"),
        (optax.GradientTransformation(lambda p: (), unsteady), ow.GraphError, "A state keeps its form."),
        (optax.GradientTransformation(lambda p: {}[0], unsteady), ow.TraceError, "KeyError: 0"),
    ],
    ids=["a function", "ours", "a line search", "the loss", "second derivatives", "another state", "a fault"],
)
def test_what_cannot_be_taken_is_refused_with_the_reason(transformation, error, words):
    with pytest.raises(error) as raised:
        ow.from_optax(transformation).minimize(lambda w: jnp.sum(w), jnp.ones(2))
    assert words in str(raised.value)


def test_it_resumes_from_a_checkpoint_by_name(tmp_path):
    def network():
        return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 2), ow.data("y", (None, 2)))

    def trainer(model):
        return ow.Trainer(
            model, ow.from_optax(optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), ADAM))
        )

    model = ow.Model(network, seed=1)
    whole, resumed = trainer(model), trainer(model.copy())
    x, y = (a[0] for a in batches())
    whole.update(x, y)
    whole.checkpoint(tmp_path)
    whole.update(x, y)
    resumed.restore(tmp_path)
    resumed.update(x, y)
    for name in ("fc_0/w", "fc_0/w/mu", "scale_by_adam/count", "step"):
        np.testing.assert_array_equal(np.asarray(whole[name]), np.asarray(resumed[name]), err_msg=name)
