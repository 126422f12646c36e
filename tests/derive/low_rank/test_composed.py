"""Low rank with other transforms, with a base of fewer bits, saved, tested and merged."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

rng = np.random.default_rng(0)
PARAMS = [{"w": rng.normal(0, 0.5, (6, 6)).astype("float32"), "b": np.zeros(6, "float32")} for _ in range(2)]
X = rng.normal(size=(8, 6)).astype("float32")


def loss(params, x):
    """Two residual layers."""
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2)


@cache
def adapted(base=None, **options):
    return ow.low_rank(loss, PARAMS, X, rank=2, alpha=4, base=base, **options)


@cache
def minimized(base=None):
    return ow.SGD(0.1, rules=[ow.EMA(0.5)]).minimize(adapted(base))


@cache
def trained(program, steps=3):
    """The losses and the State after some steps."""
    step = ow.compile(program, tune=False)
    state, losses = step.init(PARAMS), []
    for _ in range(steps):
        state, out = step(state, X)
        losses.append(float(out.loss))
    return losses, state


def expect_close(merged, expected, rtol):
    for ours, theirs in zip(jax.tree.leaves(merged), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-6)


WITH = {
    "adapted last": lambda: ow.low_rank(
        ow.SGD(0.1, rules=[ow.EMA(0.5)]).minimize(loss, PARAMS, X), rank=2, alpha=4, where="*/w"
    ),
    "micro-batches": lambda: ow.accumulate(minimized(), 2),
    "adapted behind micro-batches": lambda: ow.low_rank(
        ow.accumulate(ow.SGD(0.1, rules=[ow.EMA(0.5)]).minimize(loss, PARAMS, X), 2), rank=2, alpha=4
    ),
    "devices": lambda: ow.replicate(minimized(), 2),
    "rolled": lambda: ow.roll(minimized()),
    "guarded": lambda: ow.guard(minimized(), "skip"),
    "recomputed": lambda: ow.recompute(minimized(), scopes=lambda scope: True),
}


@pytest.mark.parametrize("name", WITH)
def test_it_is_the_same_training_with_other_transforms(name):
    losses, state = trained(minimized())
    program = WITH[name]()
    same, other = trained(program)
    np.testing.assert_allclose(same, losses, rtol=1e-5)
    expect_close(ow.merge_low_rank(program, other), ow.merge_low_rank(minimized(), state), 1e-4)


def test_mixed_precision_computes_the_factors_in_16_bits():
    program = ow.mixed_precision(minimized("int8"))
    thin = [op for op in program.ops if "low_rank" in op.scope and op.type == "dot_general"]
    assert {str(v.dtype) for op in thin for v in (*op.inputs, *op.outputs)} == {"bfloat16"}
    np.testing.assert_allclose(trained(program)[0], trained(minimized())[0], rtol=2e-2)


def quantized(w):
    """By hand: 127 steps on either side, for each output."""
    scale = np.abs(w).max(0) / np.float32(127)
    return np.round(w / scale).astype(np.int8), scale


BASES = {
    "int8": lambda w: (q := quantized(w))[0] * q[1],
    "bfloat16": lambda w: np.asarray(jnp.asarray(w, jnp.bfloat16), np.float32),
}


@pytest.mark.parametrize("base", BASES)
def test_a_base_of_fewer_bits_is_the_training_with_the_rounded_weights(base):
    rounded = [{**layer, "w": BASES[base](layer["w"])} for layer in PARAMS]
    step = ow.compile(minimized(), tune=False)
    state, losses = step.init(rounded), []
    for _ in range(3):
        state, out = step(state, X)
        losses.append(float(out.loss))
    kept = minimized(base)
    same, other = trained(kept)
    assert same != trained(minimized())[0]
    np.testing.assert_allclose(same, losses, rtol=1e-6)
    expect_close(ow.merge_low_rank(kept, other), ow.merge_low_rank(minimized(), state), 1e-5)
    again = [op.type for op in kept.ops if op.made_by is ow.Pass.BACKWARD and op.type == "dequantize"]
    assert len(again) == 1, "one weight of two: the first layer needs no gradient of its input"


@pytest.mark.parametrize("name", ["micro-batches", "rolled"])
def test_weights_of_fewer_bits_are_merged_out_of_loops(name):
    loop = {"micro-batches": lambda p: ow.accumulate(p, 2), "rolled": ow.roll}[name]
    kept = minimized("int8")
    program = loop(kept)
    assert "dequantize" not in [op.type for op in program.ops]
    state, other = trained(kept)[1], trained(program)[1]
    expect_close(ow.merge_low_rank(program, other), ow.merge_low_rank(kept, state), 1e-4)
    averages = [ow.averaged(p, s) for p, s in ((program, other), (kept, state))]
    expect_close(*averages, 1e-4)


def test_bytes():
    """Of a weight n x m: what is kept in 32, 16 and 8 bits, and what is trained, by formulas."""
    n, layers, rank = 6, 2, 2
    factors, biases = layers * rank * 2 * n, layers * n
    for base, weight in ((None, 4 * n * n), ("bfloat16", 2 * n * n), ("int8", n * n + 4 * n)):
        program = ow.Adam(1e-3).minimize(adapted(base))
        of = {
            kind: sum(v.size * v.dtype.itemsize for v in program.state if v.kind is kind) for kind in ow.Kind
        }
        assert of[ow.Kind.FROZEN] == layers * weight + 4 * biases
        assert of[ow.Kind.PARAMETER] == 4 * factors
        slots = [v for v in program.state if v.kind is ow.Kind.STATE and v.shape]
        assert sum(v.size for v in slots) == 2 * factors
        assert sum(g.size for _, g in program.gradients) == factors


def test_the_text_of_the_program_shows_what_is_frozen():
    text = str(minimized("int8"))
    assert "4 parameters (48 numbers), 6 frozen (96 numbers)" in text
    assert "frozen    │ f32[6] " in text
    assert re.search(r"i8\[6,6\] +params/0/w/int8", text)
    assert "grad(params/0/w)" not in text


def test_weights_of_16_bits_get_factors_of_32():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    program = ow.SGD(0.1).minimize(ow.low_rank(loss, params, X.astype(jnp.bfloat16), rank=2))
    assert {str(p.dtype) for p in program.parameters} == {"float32"}
    step = ow.compile(program, tune=False)
    state, _ = step(step.init(params), X.astype(jnp.bfloat16))
    assert ow.merge_low_rank(program, state)[0]["w"].dtype == jnp.bfloat16


def test_another_length_a_test_program_and_averages():
    program = minimized("int8")
    _, state = trained(program)
    merged = ow.merge_low_rank(program, state)
    test = ow.compile(ow.for_test(program), tune=False)
    _, out = test(state, X[:5])
    np.testing.assert_allclose(out.loss, loss(merged, X[:5]), rtol=1e-5)
    averaged = ow.averaged(program, state)
    evaluated = ow.compile(ow.for_evaluation(program), tune=False)
    _, out = evaluated(state, X)
    np.testing.assert_allclose(out.loss, loss(averaged, X), rtol=1e-5)
    assert not np.array_equal(averaged[0]["w"], merged[0]["w"])


def test_weights_of_several_stages_are_merged_on_one_device():
    program = minimized()
    step = ow.compile(ow.pipeline(program, 2, 4), options={"xla_backend_optimization_level": 0})
    state, _ = step(step.init(PARAMS), X)
    _, one = trained(program, 1)
    for plain in (ow.merge_low_rank, ow.averaged):
        found = plain(program, state)
        expect_close(found, plain(program, one), rtol=1e-5)
        assert len({device for x in jax.tree.leaves(found) for device in x.devices()}) == 1


def test_the_factors_alone_are_a_file(tmp_path):
    program = minimized()
    _, state = trained(program)
    factors = {v.name: state[v] for v in program.parameters}
    ow.save_safetensors(tmp_path / "factors.safetensors", factors)
    fresh = ow.compile(program, tune=False).init(PARAMS, seed=1)
    back = fresh.replace(ow.load_safetensors(tmp_path / "factors.safetensors", factors))
    expect_close(ow.merge_low_rank(program, back), ow.merge_low_rank(program, state), 0)
    assert (tmp_path / "factors.safetensors").stat().st_size < 1024


def test_what_is_trained_as_a_whole_and_the_scales():
    program = ow.low_rank(
        loss, PARAMS, X, rank=4, where="params/0/w", train="*/b", rank_stabilized=True, alpha=4
    )
    names = {v.name for v in program.parameters}
    assert names == {"params/0/w/low_rank_a", "params/0/w/low_rank_b", "params/0/b", "params/1/b"}
    assert any(op.type == "mul" and "2.0" in repr(op) for op in program.ops)
    plain = ow.low_rank(loss, PARAMS, X, rank=4)
    assert not any(op.type == "mul" for op in plain.ops)


def network():
    """A network that declares its parameters."""
    out = ow.layer.fc(ow.layer.fc(ow.data("x", (None, 6)), 8, act=jnp.tanh), 2)
    return ow.layer.mse(out, ow.data("y", (None, 2)))


@pytest.mark.parametrize("base", [None, "int8"])
def test_layers_that_declare_their_weights(base):
    program = ow.SGD(0.1).minimize(ow.low_rank(network, rank=2, base=base, where="*/w"))
    step = ow.compile(program, tune=False)
    given = {"fc_0/w": np.full((6, 8), 0.5, np.float32)}
    state = step.init(given)
    merged = ow.merge_low_rank(program, state)
    np.testing.assert_allclose(merged["fc_0/w"], given["fc_0/w"], rtol=1e-6)
    plain = ow.compile(ow.trace(network), tune=False)
    _, out = plain(plain.init(merged), X, X[:, :2])
    np.testing.assert_allclose(step(state, X, X[:, :2])[1].loss, out.loss, rtol=1e-5)


STACKED = {name: np.stack([layer[name] for layer in PARAMS]) for name in ("w", "b")}
RECURRENT = rng.normal(0, 0.3, (6, 6)).astype("float32")


def layer_of(params, layer, x):
    x = x + jnp.tanh(x @ params["v"])
    return x + jnp.tanh(params["u"] @ x.T).T + jnp.tanh(x @ layer["w"] + layer["b"])


def one_by_one(form):
    def stack(params, x):
        for layer in params["layers"]:
            x = form(layer_of)({n: params[n] for n in "uv"}, layer, x)
        return x

    return stack


def in_a_scan(form):
    def stack(params, x):
        def turn(x, layer):
            return form(layer_of)({n: params[n] for n in "uv"}, layer, x), None

        return jax.lax.scan(turn, x, params["layers"])[0]

    return stack


def as_it_is(f):
    return f


RUN = {
    "scan": (in_a_scan(as_it_is), None),
    "scan, int8": (in_a_scan(as_it_is), "int8"),
    "checkpoint": (one_by_one(jax.checkpoint), None),
    "checkpoint, int8": (one_by_one(jax.checkpoint), "int8"),
    "scan of checkpoints": (in_a_scan(jax.checkpoint), None),
    "checkpointed scan of checkpoints, bfloat16": (jax.checkpoint(in_a_scan(jax.checkpoint)), "bfloat16"),
}


@pytest.mark.parametrize("name", RUN)
def test_what_loops_and_checkpoint_run_is_adapted_as_without_them(name):
    """Weights of each layer, stacked in a loop, and two that all layers read, one by a product before too."""
    form, base = RUN[name]
    losses, merged = [], []
    for stack in (form, one_by_one(as_it_is)):
        layers = STACKED if "scan" in name and stack is form else PARAMS
        params = {"layers": layers, "u": RECURRENT, "v": RECURRENT[::-1]}

        def function(params, x, stack=stack):
            return jnp.mean(stack(params, x @ params["u"]) ** 2)  # summed over its other axis within

        program = ow.SGD(0.1).minimize(ow.low_rank(function, params, X, rank=2, alpha=4, base=base))
        step = ow.compile(program, tune=False)
        state = step.init(params)
        if stack is form:
            first = state.copy()
        elif "scan" not in name:
            state = state.replace({n: first[n] for n in state if "low_rank" in n})
        else:
            told = {n: n.replace("layers/", "").partition("/") for n in state if n.startswith("layers/")}
            factors = {n: w for n, (_, _, w) in told.items() if "low_rank" in n}
            new = {n: first[f"layers/{w}"][int(told[n][0])] for n, w in factors.items()}
            state = state.replace(
                {**new, **{n: first[n] for n in state if n[:10] in ("u/low_rank", "v/low_rank")}}
            )
        for _ in range(2):
            state, out = step(state, X)
        losses.append(float(out.loss))
        merged.append(ow.merge_low_rank(program, state))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    if "scan" in name:
        merged[1]["layers"] = jax.tree.map(lambda *x: np.stack(x), *merged[1]["layers"])
    expect_close(merged[0], merged[1], 1e-4)
