"""Everything around an optimizer at once: rules, groups and dtypes, with transforms in all orders.

What a combination gives is compared with the plain Program on one device, which other tests compare with the
papers; or with another order of the same transforms.
"""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onward as ow

STEPS, ROWS = 4, 8
jitted = partial(jax.jit)
TRANSFORMS = {
    "accumulate": lambda p: ow.accumulate(p, 2),
    "mixed": lambda p: ow.mixed_precision(p, "bfloat16"),
    "scaled": lambda p: ow.mixed_precision(p, "float16", scale=256.0),
    "guard": lambda p: ow.guard(p, "skip"),
    "stop": lambda p: ow.guard(p, "stop"),
    "average": lambda p: ow.replicate(p, 2),
    "sharded": lambda p: ow.replicate(p, 2, ow.Sharded()),
    "local": lambda p: ow.replicate(p, 2, ow.merge.LocalSGD(2)),
}


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def parameters(dtype=jnp.float32):
    random = np.random.default_rng(0)
    params = {"b": np.zeros(2), "w": random.normal(size=(3, 2))}
    return {name: jnp.asarray(value.astype(dtype)) for name, value in params.items()}


def batches(rows=ROWS):
    x = np.random.default_rng(1).normal(size=(STEPS, rows, 3)).astype("float32")
    return list(zip(x, np.sin(x[..., :2]), strict=True))


def falling(step):
    return 3e-2 / (1 + step)


def optimizer(learning_rate=None):
    if learning_rate is None:
        learning_rate = falling
    return ow.Adam(
        learning_rate,
        rules=[ow.ClipByGlobalNorm(0.5), ow.WeightDecay(0.1, where="w*"), ow.EMA(0.9)],
        groups=[ow.Group("b", ow.Momentum(0.1, 0.9))],
    )


@cache
def minimized(dtype=jnp.float32, learning_rate=None):
    return optimizer(learning_rate).minimize(loss, parameters(dtype), *batches()[0])


def transformed(program, order):
    for name in order:
        program = TRANSFORMS[name](program)
    return program


def numbers(state):
    """All state that is not an error of rounding, by name, as float64."""
    return {name: np.asarray(state[name]).astype(np.float64) for name in state if not name.endswith("/rest")}


def compiled(program, **options):
    return ow.compile(program, **options)


@cache
def trained(order=(), dtype=jnp.float32):
    step = compiled(transformed(minimized(dtype), order))
    state, losses = step.init(parameters(dtype)), []
    for batch in batches():
        state, out = step(state, *batch)
        losses.append(float(out.loss))
    return numbers(state), losses


def expect_same(found, expected, rtol):
    names = expected[0].keys() & found[0].keys()
    assert names >= {"w", "w/mean", "w/average", "b/velocity", "step"}
    for name in names:
        one, other = found[0][name].ravel(), expected[0][name].ravel()  # what is sharded lies end to end
        np.testing.assert_allclose(one, other, atol=rtol * np.max(np.abs(other)), err_msg=name)
    np.testing.assert_allclose(found[1], expected[1], rtol=rtol)


@pytest.mark.parametrize(
    "order",
    [
        ("accumulate", "guard", "average"),
        ("average", "accumulate", "stop"),
        ("guard", "sharded", "accumulate"),
        ("accumulate", "sharded", "guard"),
    ],
    ids=" ".join,
)
def test_any_order_makes_the_step_of_the_big_batch_on_one_device(order):
    expect_same(trained(order), trained(), 1e-5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("mixed", "accumulate", "guard", "average"), ("average", "guard", "accumulate", "mixed")),
        (("mixed", "accumulate", "guard", "average"), ("guard", "mixed", "sharded", "accumulate")),
        (("accumulate", "guard", "mixed", "local"), ("local", "mixed", "guard", "accumulate")),
        (("scaled", "accumulate", "average"), ("average", "accumulate", "scaled")),
    ],
    ids=lambda order: " ".join(order),
)
def test_another_order_of_the_same_transforms_makes_the_same_step(one, other):
    expect_same(trained(one), trained(other), 1e-5)
    distance = np.max(np.abs(trained(one)[0]["w"] - trained()[0]["w"]))
    assert 0 < distance < 0.1


def test_bfloat16_parameters_take_every_transform():
    order = ("mixed", "accumulate", "guard", "sharded")
    found, plain = trained(order, jnp.bfloat16), trained((), jnp.bfloat16)
    assert not np.array_equal(found[0]["w"], np.asarray(parameters(jnp.bfloat16)["w"]).astype(np.float64))
    for name in ("w", "b"):
        np.testing.assert_allclose(found[0][name], plain[0][name], atol=2e-2)
        np.testing.assert_allclose(plain[0][name], trained()[0][name], atol=5e-2)


def test_a_bad_example_on_one_device_in_one_micro_batch_changes_nothing_anywhere():
    program = transformed(minimized(), ("mixed", "accumulate", "guard", "average"))
    step = compiled(program, donate=False)
    state, _ = step(step.init(parameters()), *batches()[0])
    x, y = batches()[1]
    after, out = step(state, np.where(np.arange(ROWS)[:, None] == 5, np.nan, x).astype("float32"), y)
    before, after = numbers(state), numbers(after)
    assert np.isnan(out.loss)
    assert after.pop("skipped") == before.pop("skipped") + 1 == 1
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_a_combination_runs_under_scan_and_vmap_and_takes_other_numbers_and_batches_without_ado():
    order = ("mixed", "accumulate", "guard", "average")
    step = compiled(transformed(minimized(learning_rate=1e-2), order), donate=False)
    first, found = step.init(parameters()), []
    state = first
    for batch in batches()[:2]:
        state, out = step(state, *batch)
        found.append(float(out.loss))
    x, y = (np.stack(part) for part in zip(*batches()[:2], strict=True))
    scanned, outs = jitted(lambda s: jax.lax.scan(lambda s, batch: step(s, *batch), s, (x, y)))(first)
    np.testing.assert_allclose(outs.loss, found, rtol=1e-6)
    np.testing.assert_allclose(scanned["w"], state["w"], rtol=1e-6)

    swept = first.sweep({"learning_rate": [1e-2, 0.0]})
    swept, _ = jitted(jax.vmap(step, (0, None, None)))(swept, *batches()[0])
    assert np.array_equal(swept["w"][1], first["w"])
    assert not np.array_equal(swept["w"][0], first["w"])

    for change in ({"learning_rate": 0.2}, {"clip_by_global_norm/max_norm": 9.0}, {"ema/decay": 0.5}):
        before = state
        state, _ = step(state.replace(change), *batches()[0])
    assert step.compilations == 1
    np.testing.assert_allclose(state["w/average"], (before["w/average"] + state["w"]) / 2, rtol=1e-5)

    big = [np.concatenate([part, part]) for part in batches()[0]]
    _, once = step(first, *batches()[0])
    _, twice = step(first, *big)
    assert (step.compilations, step.traces) == (2, 1)
    np.testing.assert_allclose(twice.loss, once.loss, rtol=1e-5)


def test_averages_of_a_replicated_training_are_evaluated_on_its_state():
    program = transformed(minimized(), ("accumulate", "guard", "average"))
    step, test = compiled(program), compiled(ow.for_evaluation(program))
    state, _ = step(step.init(parameters()), *batches()[0])
    averages = {"b": state["b"], "w": state["w/average"]}
    expected = loss(jax.tree.map(np.asarray, averages), *batches()[1])
    np.testing.assert_allclose(test(state, *batches()[1])[1].loss, expected, rtol=1e-6)


# ----------------------------------------------------------------------------- layers and trainers


def network():
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 2))
    return ow.layer.mse(ow.layer.fc(ow.layer.dropout(x, 0.2), 2, act="relu"), y)


@pytest.mark.parametrize(
    "order",
    [
        ("mixed", "accumulate", "average"),
        ("accumulate", "mixed", "sharded"),
        ("average", "mixed", "accumulate"),
        ("guard", "mixed", "local", "accumulate"),
    ],
    ids=" ".join,
)
def test_a_network_without_a_length_of_its_batch_takes_every_order(order):
    program = transformed(ow.SGD(0.1).minimize(ow.trace(network)), order)
    assert [op.type for op in program.ops].count("accumulate") == 1
    assert program.recipe.origin.assumes_batch


@cache
def training(order):
    model = ow.Model(network, seed=1)
    adam = ow.Adam(1e-2, rules=[ow.ClipByGlobalNorm(1.0), ow.EMA(0.9)], slot_dtype="bfloat16")
    return model, transformed(adam.minimize(model.topology), order)


def trainer(order):
    model, program = training(order)
    return ow.Trainer(model.copy(), program)


def reader():
    x, y = (np.concatenate(part) for part in zip(*batches(), strict=True))
    return ow.batches({"x": x, "y": y}, ROWS, shuffle=True)


def test_a_training_with_everything_on_resumes_bit_for_bit(tmp_path):
    order = ("mixed", "accumulate", "guard", "sharded")
    whole, resumed = trainer(order), trainer(order)
    x, y = batches()[0]
    whole.update(x, np.full_like(y, np.inf))
    whole.train(reader(), epochs=1, progress=False)
    whole.checkpoint(tmp_path)
    whole.train(reader(), epochs=1, progress=False)
    resumed.restore(tmp_path)
    assert int(resumed["skipped"]) == 1
    resumed.train(reader(), epochs=2, progress=False)
    assert int(whole["step"]) == int(resumed["step"]) == 2 * STEPS
    for name in whole.state:
        if not jnp.issubdtype(whole[name].dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(np.asarray(whole[name]), np.asarray(resumed[name]), err_msg=name)


def test_a_checkpoint_without_rule_and_guard_serves_a_training_that_has_them(tmp_path):
    model = ow.Model(network, seed=1)
    before = ow.Trainer(model, ow.Adam(1e-2, slot_dtype="bfloat16"))
    before.train(reader(), progress=False)
    before.checkpoint(tmp_path)
    after = trainer(("guard",))
    with pytest.warns(UserWarning, match=r"newly initialized: .*fc_0/w/average.*skipped"):
        after.restore(tmp_path)
    np.testing.assert_array_equal(after["fc_0/w/average"], before["fc_0/w"])
    np.testing.assert_array_equal(np.asarray(after["fc_0/w/mean"]), np.asarray(before["fc_0/w/mean"]))
    assert int(after["step"]) == STEPS


def filled(leaf):
    """Numbers in place of what only tells its shape."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return np.random.default_rng(leaf.size).normal(0, 0.5, leaf.shape).astype(leaf.dtype)


def test_an_equinox_model_with_clipping_and_masked_decay_trains_as_with_optax():
    model = jax.tree.map(filled, eqx.filter_eval_shape(eqx.nn.MLP, 3, 2, 4, depth=1, key=jax.random.key(2)))

    def cost(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ours = ow.AdamW(
        1e-2,
        weight_decay=0.3,
        rules=[ow.ClipByGlobalNorm(0.1)],
        groups=[ow.Group("*/bias", weight_decay=0.0)],
    )
    step = compiled(ow.guard(ow.accumulate(ours.minimize(cost, model, *batches()[0]), 2)))
    state = step.init(model)
    arrays, static = eqx.partition(model, eqx.is_array)
    theirs = optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adamw(1e-2, weight_decay=0.3, mask=lambda tree: jax.tree.map(lambda a: a.ndim > 1, tree)),
    )

    @jitted
    def advance(arrays, kept, batch):
        gradients = jax.grad(lambda a: cost(eqx.combine(a, static), *batch))(arrays)
        updates, kept = theirs.update(gradients, kept, arrays)
        return optax.apply_updates(arrays, updates), kept

    kept = theirs.init(arrays)
    for batch in batches():
        state, _ = step(state, *batch)
        arrays, kept = advance(arrays, kept, batch)
    found = jax.tree.leaves(eqx.filter(state.parameters, eqx.is_array))
    for mine, other in zip(found, jax.tree.leaves(arrays), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


# ----------------------------------------------------------------------------- refusals name the reason


@pytest.mark.parametrize(
    ("order", "options", "words"),
    [
        (("guard", "scaled"), {}, "leaves out steps that overflow by itself. Leave guard away"),
        (("scaled", "stop"), {}, "Mixed precision in float16 leaves out the steps that overflow by itself"),
        (("guard", "stop"), {}, "guarded already"),
        (("mixed", "accumulate", "mixed"), {}, "in mixed precision already"),
        (("accumulate", "mixed", "accumulate"), {}, "Accumulate once, over the product"),
        (("accumulate",), {"rules": [ow.SAM(0.05)]}, "evaluates the loss again on the batch"),
        (("mixed", "local"), {"rules": [ow.SAM(0.05)]}, "every device trains parameters of its own"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_combined_is_refused_with_the_reason(order, options, words):
    program = ow.SGD(0.1, **options).minimize(loss, parameters(), *batches()[0])
    with pytest.raises(ow.GraphError) as error:
        transformed(program, order)
    assert words in str(error.value)
