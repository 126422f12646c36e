"""16 bits where they are enough, float32 where they are not: dtypes, numbers, and the loss scale."""

from collections import Counter
from functools import cache

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks import models

import onward as ow
from onward.core.show import nbytes
from onward.develop.guard import guard
from onward.develop.mixed.mixed_precision import mixed_precision

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(8, 6, 6, 2)).astype("float32")
X = RNG.normal(size=(8, 6)).astype("float32")
LABELS = RNG.integers(0, 3, 8).astype("int32")
MACHINE = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def convolutions():
    h = ow.layer.conv(ow.data("images", (8, 6, 6, 2)), 4, 3)
    h = jax.nn.relu(ow.layer.batch_norm(h))
    h = ow.layer.conv(h, 4, 3, act="relu")
    return ow.layer.cross_entropy(ow.layer.fc(h.mean((1, 2)), 3), ow.data("labels", (8,), "int32"))


def perceptron(module, x, labels):
    logits = jax.vmap(module)(x)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def simple(w, x, labels):
    logits = jax.nn.relu(x @ w["a"] + w.get("b", 0)) @ w["c"]
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[1]), 1))


WEIGHTS = {
    "a": RNG.normal(size=(6, 16), scale=0.4).astype("float32"),
    "b": np.zeros(16, "float32"),
    "c": RNG.normal(size=(16, 3), scale=0.3).astype("float32"),
}
UNBIASED = {name: WEIGHTS[name] for name in "ac"}


def of_benchmark(model):
    return model.loss, (model.params,), model.data


NETWORKS = {
    "MLP": lambda: of_benchmark(models.mlp((12, 8, 4), batch=16)),
    "convolutions": lambda: (convolutions, (), (IMAGES, LABELS)),
    "transformer": lambda: of_benchmark(models.transformer(layers=1, d=16, heads=2, seq=4, batch=2)),
    "equinox": lambda: (perceptron, (equinox.nn.MLP(6, 3, 8, 1, key=jax.random.key(0)),), (X, LABELS)),
}


@cache
def network_of(name):
    """A loss, its parameters, and its data, made when a test asks for them."""
    return NETWORKS[name]()


@cache
def forward(name):
    loss, params, data = network_of(name)
    return ow.trace(loss, *params, *data) if params else ow.trace(loss)


def minimized(name):
    return ow.SGD(0.1).minimize(forward(name))


def first_step(program, params, data, names=()):
    """The loss and the gradients of the first step."""
    step = ow.compile(program, fetch=names, donate=False)
    _, out = step(step.init(*params), *data)
    return out


@cache
def in_float32(network):
    """The Program, the names of its gradients, and its first step."""
    _, params, data = network_of(network)
    program = ow.append_backward(forward(network))
    names = [f"grad({p.name})" for p, _ in program.gradients]
    return program, names, first_step(program, params, data, names)


@pytest.mark.parametrize(
    ("network", "dtype"),
    [
        ("MLP", "bfloat16"),
        ("MLP", "float16"),
        ("convolutions", "bfloat16"),
        ("equinox", "bfloat16"),
    ],
)
def test_loss_and_gradients_are_those_of_float32_but_for_rounding(network, dtype):
    _, params, data = network_of(network)
    program, names, expected = in_float32(network)
    low = mixed_precision(program if dtype == "bfloat16" else minimized(network), dtype)
    assert [g.name for _, g in low.gradients] == names
    found = first_step(low, params, data, names)
    assert found.loss.dtype == jnp.float32
    np.testing.assert_allclose(found.loss, expected.loss, rtol=4 * MACHINE[dtype])
    wanted, had = (np.concatenate([np.ravel(out[n]) for n in names]) for out in (expected, found))
    apart = np.linalg.norm(wanted - had) / np.linalg.norm(wanted)
    assert 0 < apart < 8 * MACHINE[dtype]


@pytest.mark.parametrize("network", NETWORKS)
def test_every_op_computes_in_the_dtype_of_its_role(network):
    low = mixed_precision(minimized(network))
    forward = [op for op in low.ops if op.made_by is ow.Pass.FORWARD]
    seen = Counter()
    for op in forward:
        dtypes = {str(v.dtype) for v in (*op.inputs, *op.outputs) if jnp.issubdtype(v.dtype, jnp.floating)}
        if op.type in ("dot_general", "conv_general_dilated"):
            assert dtypes == {"bfloat16"}
        elif op.type in ("exp", "log", "rsqrt", "reduce_sum", "relu"):
            assert dtypes <= {"float32"}
        elif op.type != "cast":
            assert len(dtypes) <= 1
        seen[op.type] += 1
    assert seen["dot_general"]
    assert seen["exp"] or seen["reduce_sum"]
    assert all(v.dtype != jnp.bfloat16 for v in (*low.state, *low.next_state.values(), *low.outputs))
    assert {str(g.dtype) for _, g in low.gradients} == {"float32"}


def test_no_variable_is_cast_twice_and_casts_stand_in_the_scope_of_their_reader():
    def twice(w, x):
        with jax.named_scope("first"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("second"):
            return jnp.mean((h @ w) ** 2)

    low = mixed_precision(ow.SGD(0.1).minimize(twice, np.ones((6, 6), "float32"), X))
    casts = [op for op in low.ops if op.type == "cast"]
    assert [(op.inputs[0].name, op.outputs[0].name, op.scope) for op in casts] == [
        ("x", "bfloat16(x)", "first"),
        ("w", "bfloat16(w)", "first"),
        ("second/dot_general", "float32(second/dot_general)", "second"),
    ]
    assert all(op.source.line for op in casts)
    assert "bfloat16(w) = cast(w, new_dtype=bfloat16)" in str(low)


def kept_bytes(program):
    """The bytes of all but state that the forward pass keeps for the backward pass."""
    backward = [op for op in program.ops if op.made_by is ow.Pass.BACKWARD]
    made = {v for op in backward for v in op.outputs}
    of_state = {v for op in program.ops if set(op.inputs) & set(program.state) for v in op.outputs}
    casts = {v for op in program.ops if op.type == "cast" for v in op.outputs}
    read = {v for op in backward for v in op.inputs} - made - set(program.state) - (of_state & casts)
    return sum(map(nbytes, read))


def test_half_is_kept_for_the_backward_pass():
    def deep(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    program = ow.SGD(0.1).minimize(deep, [np.ones((6, 6), "float32")] * 10, X)
    assert 0.5 <= kept_bytes(mixed_precision(program)) / kept_bytes(program) < 0.6
    program = minimized("transformer")
    assert kept_bytes(mixed_precision(program)) < 0.8 * kept_bytes(program)


def rings(rng, n):
    """Points inside and outside of a circle."""
    x = rng.uniform(-1, 1, (n, 2)).astype("float32")
    return x, (np.sum(x**2, 1) > 0.6).astype("int32")


@pytest.mark.parametrize("dtype", [None, *MACHINE])
def test_training_reaches_what_float32_reaches(dtype):
    rng = np.random.default_rng(1)
    x, labels = rings(rng, 256)
    w = {
        "a": rng.normal(size=(2, 32)).astype("float32"),
        "b": np.zeros(32, "float32"),
        "c": rng.normal(size=(32, 2), scale=0.2).astype("float32"),
    }
    program = ow.Adam(0.05).minimize(simple, w, x, labels)
    step = ow.compile(program if dtype is None else mixed_precision(program, dtype))
    state = step.init(w)
    for _ in range(400):
        state, _ = step(state, x, labels)
    w = {name: np.asarray(value) for name, value in state.parameters.items()}
    right = np.argmax(np.maximum(x @ w["a"] + w["b"], 0) @ w["c"], 1) == labels
    assert right.mean() > 0.97


def test_numbers_that_a_dtype_does_not_hold_keep_an_op_in_float32():
    def masked(w, x):
        h = x @ w
        h = jnp.where(h > 0, h, -1e9) + 1e-9
        return jnp.mean(jnp.maximum(h, 0) @ w)

    program = ow.trace(masked, np.ones((6, 6), "float32"), X, training=False)
    dtypes = {}
    for dtype in MACHINE:
        low = mixed_precision(program, dtype)
        dtypes[dtype] = [str(op.outputs[0].dtype) for op in low.ops if op.type in ("select_n", "add")]
        assert np.isfinite(first_step(low, (np.ones((6, 6), "float32"),), (X,)).loss)
    assert dtypes == {"bfloat16": ["bfloat16"] * 2, "float16": ["float32"] * 2}


def test_what_is_kept_stays_in_float32():
    program = ow.SGD(0.1).minimize(simple, WEIGHTS, X, LABELS)
    for keep in ("c", "dot_general_1", ["dot_general_?"], lambda v: v.name == "c"):
        low = mixed_precision(program, keep=keep)
        assert low["dot_general"].dtype == jnp.bfloat16
        assert low["dot_general_1"].dtype == jnp.float32
        assert ow.for_test(low)["dot_general_1"].dtype == jnp.float32


def test_a_test_program_computes_in_the_same_dtypes():
    program = ow.SGD(0.1).minimize(ow.trace(convolutions))
    low = mixed_precision(program, "float16")
    test = ow.for_test(low)
    assert test["conv_0/conv_general_dilated"].dtype == jnp.float16
    assert not any(op.type == "scale_loss" for op in test.ops)
    assert str(mixed_precision(ow.for_test(program), "float16")) == str(test)
    state = ow.compile(low).init()
    _, found = ow.compile(test, donate=False)(state, IMAGES, LABELS)
    _, expected = ow.compile(ow.for_test(program), donate=False)(state, IMAGES, LABELS)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=4e-3)


def test_a_forward_program_can_be_minimized_later():
    forward = ow.trace(simple, WEIGHTS, X, LABELS)
    before, after = (
        ow.SGD(0.1).minimize(mixed_precision(forward)),
        mixed_precision(ow.SGD(0.1).minimize(forward)),
    )
    assert str(before) == str(after)


def test_other_batches_are_traced_in_the_same_dtypes():
    step = ow.compile(mixed_precision(ow.SGD(0.1).minimize(simple, UNBIASED, X, LABELS), "float16"))
    state, _ = step(step.init(UNBIASED), X[:5], LABELS[:5])
    assert step.traces == 1
    assert int(state["good_steps"]) == 1


@pytest.mark.parametrize("dtype", MACHINE)
def test_on_two_devices_as_on_one(dtype):
    program = ow.Momentum(0.1, 0.9).minimize(simple, UNBIASED, X, LABELS)
    one = mixed_precision(program, dtype)
    inside, outside = ow.replicate(one, 2), mixed_precision(ow.replicate(program, 2), dtype)
    assert str(inside) == str(outside)
    states = []
    for p in (one, inside) if dtype == "bfloat16" else (one, inside, ow.replicate(one, 2, ow.Sharded())):
        step = ow.compile(p)
        state = step.init(UNBIASED)
        for factor in (1, 1e9 if dtype == "float16" else 1, 1):
            state, _ = step(state, X * np.float32(factor), LABELS)
        states.append(state)
        for name in UNBIASED:
            np.testing.assert_allclose(state[name], states[0][name], atol=0.2 * MACHINE[dtype])
        if dtype == "float16":
            assert (int(state["skipped"]), float(state["loss_scale"])) == (1, 2.0**14)


def small(w, x):
    """A loss whose gradients are below what float16 holds."""
    return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"]) * 1e-7


def test_gradients_that_float16_does_not_hold_are_held_by_the_scale():
    w = {"a": WEIGHTS["a"], "b": np.ones(16, "float32")}
    program = ow.SGD(0.1).minimize(small, w, X)
    gradients = [
        np.asarray(first_step(p, (w,), (X,), ["grad(a)"])["grad(a)"])
        for p in (
            program,
            mixed_precision(program, "float16"),
            mixed_precision(program, "float16", scale=2.0**-9),
        )
    ]
    assert np.linalg.norm(gradients[1] - gradients[0]) < 0.02 * np.linalg.norm(gradients[0])
    assert not np.any(gradients[2])


def test_a_power_of_two_cancels_out():
    program = ow.SGD(0.1).minimize(simple, UNBIASED, X, LABELS)
    programs = [mixed_precision(program, "bfloat16", scale=scale) for scale in (None, 2.0**20)]
    plain, scaled = (first_step(p, (UNBIASED,), (X, LABELS), ["grad(a)"])["grad(a)"] for p in programs)
    assert np.array_equal(plain, scaled)


def test_overflows_are_skipped_and_the_scale_follows_its_schedule():
    """Growth after 3 good steps in a row; batches 2, 3 and 8 overflow; against the rule written out."""
    program = ow.Adam(0.1).minimize(simple, UNBIASED, X, LABELS)
    clipped = ow.clip_by_global_norm(ow.append_backward(ow.trace(simple, UNBIASED, X, LABELS)), 1.0)
    clipped = ow.append_update(clipped, ow.Adam(0.1))
    for p in (program, clipped):
        step = ow.compile(mixed_precision(p, "float16", scale=1024.0, growth_every=3), donate=False)
        state = step.init(UNBIASED)
        scale, good, skipped = 1024.0, 0, 0
        for i in range(12):
            bad = i in (2, 3, 8)
            after, _ = step(state, X * np.float32(1e9 if bad else 1), LABELS)
            good = 0 if bad else good + 1
            scale = scale / 2 if bad else scale * 2 if good == 3 else scale
            good, skipped = good % 3, skipped + bad
            found = [float(after[name]) for name in ("loss_scale", "good_steps", "skipped")]
            assert found == [scale, good, skipped]
            same = [np.array_equal(after[n], state[n]) for n in (*UNBIASED, "a/mean", "step")]
            assert all(same) if bad else not any(same)
            state = after


def test_a_scale_that_is_too_large_at_first_comes_down():
    step = ow.compile(
        mixed_precision(ow.SGD(0.1).minimize(simple, UNBIASED, X, LABELS), "float16", scale=2.0**40)
    )
    state = step.init(UNBIASED)

    @jax.jit
    def train(state):
        return jax.lax.scan(lambda s, _: (step.function(s, X, LABELS)[0], ()), state, length=1000)[0]

    state = train(state)
    assert int(state["skipped"]) + int(state["step"]) == 1000
    assert int(state["skipped"]) == 40 - int(np.log2(state["loss_scale"])) > 10


def test_control_flow_and_rules_of_their_own_compute_in_float32():
    @jax.custom_vjp
    def own(x):
        return x * 2

    own.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 3,))

    def network(w, x):
        h = own(x @ w)
        h, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), h, None, length=2)
        return jnp.mean(h @ w)

    w = np.random.default_rng(0).uniform(0.1, 0.3, (6, 6)).astype("float32")
    program = ow.SGD(0.1).minimize(network, w, X)
    low = mixed_precision(program)
    by_type = {op.type: op for op in low.ops}
    assert {v.dtype for kind in ("own", "scan") for v in by_type[kind].inputs} == {np.dtype("float32")}
    expected, found = (first_step(p, (w,), (X,), ["grad(w)"])["grad(w)"] for p in (program, low))
    assert np.linalg.norm(expected - found) < 0.03 * np.linalg.norm(expected)


def test_a_result_of_low_dtype_is_returned_in_float32():
    def network(w, x):
        y = x @ w
        return jnp.mean(y @ w), y

    w = np.ones((6, 6), "float32")
    low = mixed_precision(ow.trace(network, w, X, has_aux=True))
    step = ow.compile(low)
    _, out = step(step.init(w), X)
    assert out.aux.dtype == jnp.float32
    np.testing.assert_allclose(out.aux, X @ w, atol=0.1)


def a_program():
    return ow.SGD(0.1).minimize(simple, WEIGHTS, X, LABELS)


REFUSED = {
    "another dtype": (
        lambda: mixed_precision(a_program(), "int8"),
        ow.ArgumentError,
        "'bfloat16', 'float16' or 'float8'",
    ),
    "twice": (lambda: mixed_precision(mixed_precision(a_program())), ow.GraphError, "already"),
    "no recipe": (
        lambda: mixed_precision(ow.graph.update_pass(a_program())),
        ow.RecipeError,
        "not made by trace",
    ),
    "nothing to keep": (lambda: mixed_precision(a_program(), keep="head/*"), ow.UnknownNameError, "keep"),
    "float16, not minimized": (
        lambda: mixed_precision(ow.trace(simple, WEIGHTS, X, LABELS), "float16"),
        ow.GraphError,
        r"Minimize first.*bfloat16",
    ),
    "float16, guarded": (
        lambda: mixed_precision(guard(a_program()), "float16"),
        ow.GraphError,
        "Leave guard away",
    ),
    "guarded later": (
        lambda: guard(mixed_precision(a_program(), "float16")),
        ow.GraphError,
        "guarded already",
    ),
    "a scale of 0": (lambda: mixed_precision(a_program(), scale=0), ow.HyperparameterError, "scale is 0"),
    "a factor of 1": (lambda: mixed_precision(a_program(), factor=1), ow.HyperparameterError, "above 1"),
    "never": (lambda: mixed_precision(a_program(), growth_every=0), ow.HyperparameterError, "at least 1"),
}


@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_a_precision_that_cannot_be(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_complex_numbers_are_not_lowered_and_told():
    program = ow.trace(lambda w, x: jnp.mean(jnp.abs(x @ w)), jnp.ones((3, 2), jnp.complex64), X[:, :3])
    with pytest.warns(UserWarning, match=r"dot_general at test_mixed_precision.py:\d+ computes in complex64"):
        mixed_precision(program)


def test_an_update_that_counts_in_float64_is_not_taken_for_the_network():
    """With 64-bit numbers the correction of optax's Adam is float64; micro-batches hide the products."""

    def step(w, slots, x):
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w))(w)
        updates, slots = optax.adam(1e-3).update(grad, slots, w)
        return optax.apply_updates(w, updates), slots, value

    w, x = np.ones((4, 4), "float32"), np.ones((4, 4), "float32")
    with jax.enable_x64(True):
        program = ow.adopt(step, w, optax.adam(1e-3).init(w), x)
        assert any(v.dtype == np.float64 for v in program.variables.values())
        mixed_precision(ow.accumulate(program, 2))  # a warning is an error here


def test_float64_is_not_lowered_and_told():
    with jax.enable_x64(True):
        program = ow.trace(lambda w, x: jnp.mean(x @ w), jnp.ones((3, 2)), jnp.ones((4, 3)))
        with pytest.warns(UserWarning, match="only float32 is lowered, and it computes in float64"):
            mixed_precision(program)


@jax.custom_vjp
def by_own_rule(a, b):
    return a @ b


by_own_rule.defvjp(lambda a, b: (a @ b, (a, b)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
OUT_OF_REACH = {
    "cond": lambda w, x: jnp.mean(jax.lax.cond(x[0, 0] > 0, lambda h: h @ w, jnp.sin, x)),
    "by_own_rule": lambda w, x: jnp.mean(by_own_rule(x, w)),
}


@pytest.mark.parametrize("op", OUT_OF_REACH)
def test_products_that_stay_in_float32_are_told(op):
    program = ow.trace(OUT_OF_REACH[op], jnp.ones((6, 6)), X)
    with pytest.warns(UserWarning, match=rf"products stand in what {op} at test_mixed_precision.py:\d+ runs"):
        mixed_precision(program)
    mixed_precision(program, keep="*")  # as it was asked for
    mixed_precision(ow.trace(lambda w, x: jnp.mean(x * w), jnp.ones(6), X))  # there is none


# ------------------------------------------------------------------------- within checkpoint and loops


def block(layer, h):
    normed = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.var(h, -1, keepdims=True) + 1e-5)
    return h + jax.nn.relu(normed @ layer["up"]) @ layer["down"]


LAYERS = {
    "up": RNG.normal(size=(3, 6, 8), scale=0.4).astype("float32"),
    "down": RNG.normal(size=(3, 8, 6), scale=0.4).astype("float32"),
}
DEEP = {"in": RNG.normal(size=(6, 6), scale=0.4).astype("float32"), "layers": LAYERS}


def one_by_one(form):
    def stack(layers, h):
        for i in range(3):
            h = form(block)(jax.tree.map(lambda w, i=i: w[i], layers), h)
        return h

    return stack


def in_a_scan(form):
    return lambda layers, h: jax.lax.scan(lambda h, w: (form(block)(w, h), None), h, layers)[0]


def as_it_is(f):
    return f


SAVED = jax.checkpoint_policies.dots_saveable
STACKS = {
    "checkpoint": one_by_one(jax.checkpoint),
    "checkpoint with a policy": one_by_one(lambda f: jax.checkpoint(f, policy=SAVED)),
    "scan": in_a_scan(as_it_is),
    "scan of checkpoints": in_a_scan(jax.checkpoint),
    "checkpointed scan": lambda layers, h: jax.checkpoint(in_a_scan(as_it_is))(layers, h),
    "reversed": lambda layers, h: jax.lax.scan(
        lambda h, w: (block(w, h), None), h, jax.tree.map(lambda w: w[::-1], layers), reverse=True
    )[0],
    "scan of scans": lambda layers, h: jax.lax.scan(
        lambda h, w: (jax.lax.fori_loop(0, 1, lambda _, h: block(w, h), h), None), h, layers
    )[0],
}


def deep(stack):
    def loss(w, x, labels):
        h = stack(w["layers"], jnp.maximum(x @ w["in"], 0.0))
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(h) * jax.nn.one_hot(labels, 6), 1))

    return ow.SGD(1.0).minimize(loss, DEEP, X, LABELS)


def operands_of_products(program):
    """The dtypes that products read, however deep."""
    return {
        str(v.dtype)
        for op in program.ops
        for call in op.body.calls_within
        if call.primitive == "dot_general"
        for v in call.operands
    }


@cache
def one_step(name):
    """The loss and the gradients of layers, one by one or as this stack has them, in bfloat16."""
    program = mixed_precision(deep(one_by_one(as_it_is) if name == "" else STACKS[name]))
    step = ow.compile(program)
    state, out = step(step.init(DEEP), X, LABELS)
    moved = jax.tree.map(lambda new, old: old - np.asarray(new), state.parameters, DEEP)
    return float(out.loss), moved, program


@pytest.mark.parametrize("name", STACKS)
def test_what_checkpoint_and_loops_run_is_computed_as_without_them(name):
    loss, gradients, program = one_step(name)
    assert operands_of_products(program) == {"bfloat16"}
    given = {str(op.outputs[0].dtype) for op in program.ops if op.type in ("remat2", "scan")}
    assert given == {"bfloat16"}  # as the first layer reads it
    expected, theirs, _ = one_step("")
    np.testing.assert_allclose(loss, expected, rtol=2 * MACHINE["bfloat16"])
    for found, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(theirs), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=8 * MACHINE["bfloat16"] * np.abs(wanted).max())


CARRIES = {
    "in float32 before the loop": (lambda h, w: h + h @ w, lambda x, w: x, "float32"),
    "made in float32 by each turn": (lambda h, w: jnp.exp(-((h @ w) ** 2)), lambda x, w: x @ w, "float32"),
    "made in bfloat16 of float32": (lambda h, w: h @ w, lambda x, w: x, "float32"),
    "in bfloat16 all the way": (lambda h, w: h @ w, lambda x, w: x @ w, "bfloat16"),
    "with a parameter beside it": (lambda h, w: h @ w + w[0], lambda x, w: x @ w, "bfloat16"),
}


@pytest.mark.parametrize("name", CARRIES)
def test_a_loop_carries_what_each_turn_is_given_and_makes(name):
    """And the gradient of a weight that all turns read is added up in float32."""
    turn, begin, dtype = CARRIES[name]

    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, _: (turn(h, w), h.sum()), begin(x, w), None, 4)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    program = ow.SGD(1.0).minimize(loss, 0.3 * DEEP["in"], X)
    low = mixed_precision(program)
    mixed_precision(ow.trace(loss, 0.3 * DEEP["in"], X))  # is not told that nothing was lowered
    [loop] = [op for op in low.ops if op.type == "scan"]
    assert str(loop.outputs[0].dtype) == dtype
    assert operands_of_products(low) == {"bfloat16"}
    [back] = [op for op in low.ops if op.type == "scan_grad"]
    sums = [v.dtype for call in back.body.calls_within for v in call.results if v.shape == (6, 6)]
    assert jnp.float32 in sums  # of the turns'
    (value, slope), (theirs, wanted) = (
        (out.loss, 0.3 * DEEP["in"] - np.asarray(state.parameters))
        for step in map(ow.compile, (low, program))
        for state, out in [step(step.init(0.3 * DEEP["in"]), X)]
    )
    np.testing.assert_allclose(value, theirs, rtol=16 * MACHINE["bfloat16"])
    np.testing.assert_allclose(slope, wanted, atol=16 * MACHINE["bfloat16"] * np.abs(wanted).max())


def test_a_loop_that_begins_with_zeros_adds_up_in_float32():
    """They are numbers that would give way to a product beside them, were they not carried on."""
    many = np.abs(RNG.normal(size=(512, 6))).astype("float32")

    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda h, row: (h + row @ w, None), jnp.zeros(6), x)[0])

    step = ow.compile(mixed_precision(ow.SGD(0.0).minimize(loss, np.abs(DEEP["in"]), many)))
    _, out = step(step.init(np.abs(DEEP["in"])), many)
    np.testing.assert_allclose(out.loss, loss(np.abs(DEEP["in"]), many), rtol=MACHINE["bfloat16"])


@pytest.mark.parametrize("name", ["scan", "remat2"])
def test_what_is_kept_by_its_own_name_runs_in_float32(name):
    form = "scan" if name == "scan" else "checkpoint"
    program = mixed_precision(deep(STACKS[form]), keep=f"{name}*")
    kept = [op for op in program.ops if op.type == name]
    products = [call for op in kept for call in op.body.calls_within if call.primitive == "dot_general"]
    assert products
    assert {str(v.dtype) for call in products for v in call.operands} == {"float32"}


@pytest.mark.parametrize("name", ["checkpoint", "scan", "checkpointed scan"])
def test_a_parameter_is_kept_within_too(name):
    def alone(w, x):
        return jnp.mean(jax.checkpoint(block)(w["layers"], x @ w["in"]))

    one = DEEP | {"layers": {name: w[0] for name, w in LAYERS.items()}}
    program = deep(STACKS[name]) if name != "checkpoint" else ow.trace(alone, one, X)
    program = mixed_precision(program, keep="*/down")
    kept = [
        (v.shape[-2:], str(v.dtype))
        for op in program.ops
        if op.made_by is ow.Pass.FORWARD
        for call in op.body.calls_within
        if call.primitive == "dot_general"
        for v in call.operands[1:]
    ]
    assert set(kept) == {((6, 6), "bfloat16"), ((6, 8), "bfloat16"), ((8, 6), "float32")}


def test_bfloat16_can_be_guarded():
    step = ow.compile(mixed_precision(guard(a_program())))
    state, _ = step(step.init(WEIGHTS), X * np.float32(np.inf), LABELS)
    assert int(state["skipped"]) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_weights_that_were_cast_by_hand_are_lowered(dtype):
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w["a"].astype(dtype)) @ w["c"].astype(dtype))

    w = {"a": RNG.normal(size=(6, 4)).astype("float32"), "c": RNG.normal(size=4).astype("float32")}
    program = ow.SGD(1.0).minimize(loss, w, X)
    lowered = mixed_precision(program, dtype)
    read = {str(v.dtype) for op in lowered.ops if op.type == "dot_general" for v in op.inputs}
    assert read == {dtype}
    states = [step(step.init(w), X)[0] for step in map(ow.compile, (program, lowered))]
    for name, value in w.items():
        found, expected = (value - state.parameters[name] for state in reversed(states))
        np.testing.assert_allclose(found, expected, rtol=0.03, atol=4 * MACHINE[dtype])
