"""``compare`` names the op that was changed and none where nothing was; its bounds hold against float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.errors import ArgumentError
from onward.explain.compare.compare import compare
from onward.explain.compare.rounding import bounded
from onward.explain.compare.twins import is_near
from onward.explain.testing import assert_same_training

_DRAW = np.random.default_rng(3)
W = {"a": _DRAW.normal(size=(4, 5)).astype("f"), "b": _DRAW.normal(size=(5, 2)).astype("f")}
X, Y = _DRAW.normal(size=(8, 4)).astype("f"), _DRAW.normal(size=(8, 2)).astype("f")


def minimized(middle, optimizer=None):
    def loss(w, x, y):
        return jnp.mean((middle(x @ w["a"]) @ w["b"] - y) ** 2)

    return (optimizer or ow.SGD(0.1)).minimize(loss, W, X, Y)


@pytest.fixture(scope="module")
def right():
    return minimized(lambda h: jnp.tanh(h))


FAULTS = {
    "constant": (lambda h: jnp.tanh(h * 1.001), "mul"),
    "dropped": (lambda h: h, "tanh"),
    "axis": (lambda h: jnp.tanh(h - 0.01 * jnp.sum(h, 0)), "reduce_sum"),
    "dtype": (lambda h: jnp.tanh(h.astype(jnp.bfloat16)).astype(jnp.float32), "convert_element_type"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_was_changed_is_named_with_its_line(right, kind):
    middle, op = FAULTS[kind]
    found = compare(right, minimized(middle), W, X, Y)
    assert not found.equal
    assert found.op.type == op
    lines = {middle.__code__.co_firstlineno, next(op.source.line for op in right.ops if op.type == "tanh")}
    assert (found.file, found.line in lines) == (__file__, True)
    assert found.difference > found.bound
    assert found.reaches


def test_a_replica_is_compared_by_rows_and_merged_gradients(right):
    found = compare(right, ow.replicate(right, 2), W, X, Y)
    assert found.equal, str(found)
    assert found.largest < 1e-6


def test_a_merge_that_adds_up_instead_of_averaging_is_named(right):
    sums = ow.replicate(right, 2, merge=ow.Sum())
    found = compare(right, sums, W, X, Y)
    assert not found.equal
    assert found.op.made_by is ow.Pass.COLLECTIVE


def test_low_precision_is_equal_where_it_is_asked_for(right):
    assert compare(right, ow.mixed_precision(right, "bfloat16"), W, X, Y).equal
    in_float8 = ow.mixed_precision(right, "float8")
    assert compare(right, in_float8, W, X, Y).equal
    assert compare(right, in_float8, W, X, Y, precision="float8").equal
    changed = ow.mixed_precision(minimized(lambda h: 3 * jnp.tanh(h)), "float8")
    assert not compare(right, changed, W, X, Y).equal


def test_programs_in_low_precision_are_equal_within_a_bound_that_is_named(right):
    lowered = compare(right, ow.mixed_precision(right, "bfloat16"), W, X, Y)
    assert str(lowered).startswith("loss and loss are equal within rounding of bfloat16.\n")
    assert str(compare(right, right, W, X, Y)).startswith("loss and loss are equal.\n")
    half = [jax.tree.map(lambda x: x.astype("float16"), given) for given in (W, X, Y)]
    own = ow.SGD(0.1).minimize(lambda w, x, y: jnp.mean(x @ w["a"] @ w["b"] - y), *half)
    assert compare(own, own, *half).rounding == "float16"


def by_hand(moved):
    def step(w, mean, x, y):
        loss, g = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2))(w)
        mean = moved(mean, jnp.mean(x, 0))
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), mean, loss

    return ow.inspect(step, W, jnp.ones(4), X, Y)


def test_a_stale_statistic_is_named_by_the_step_in_which_it_shows():
    kept, stale = by_hand(lambda old, new: 0.9 * old + 0.1 * new), by_hand(lambda old, new: old + 0 * new)
    with pytest.raises(AssertionError, match=r"part at step 0 at '(mul|add)'.*\n(.*\n)*.*reaches +next mean"):
        assert_same_training(kept, stale, (W, jnp.ones(4)), X, Y)


def test_ours_and_theirs_train_alike():
    def step(w, x, y):
        loss, g = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2))(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), loss

    theirs = ow.inspect(step, W, X, Y)
    assert_same_training(minimized(lambda h: jnp.tanh(h)), theirs, W, X, Y, steps=2)


def test_state_that_begins_otherwise_is_no_fault_of_an_op(right):
    found = compare(right, minimized(lambda h: jnp.tanh(h), ow.SGD(0.2)), W, X, Y)
    assert not found.equal
    assert found.op is None
    assert found.variable == "learning_rate"


def test_bounds_hold_what_float64_says_and_little_more():
    x = _DRAW.normal(size=(3, 4000)).astype("f")
    program = ow.trace(lambda w, x: jnp.sum(w * x, 1), jnp.float32(3), x)
    given = {program["w"]: np.float32(3), program["x"]: x}
    found = bounded(program, program.ops, given, program.outputs, 0.0)[program.outputs[0]]
    off = np.abs(found.value - (3 * x.astype(np.float64)).sum(1))
    magnitudes = 3 * np.abs(x).sum(1)
    assert (off <= found.bound).all()
    assert (found.bound < 1e-3 * magnitudes).all()


def test_small_numbers_have_small_bounds():
    x = np.float32(1e-6) * _DRAW.normal(size=(8, 4)).astype("f")
    program = ow.trace(lambda w, x: jax.lax.scan(lambda c, row: (jnp.sin(c + row), None), w, x)[0], x[0], x)
    given = {program["w"]: x[0], program["x"]: x}
    found = bounded(program, program.ops, given, program.outputs, 0.0)[program.outputs[0]]
    assert (found.bound < 1e-3 * np.abs(x).max()).all()


def test_what_was_changed_within_a_loop_is_told():
    def looped(factor):
        return minimized(lambda h: jax.lax.scan(lambda c, row: (c + row * factor, c), h[0], h)[1])

    found = compare(looped(1.0), looped(1.5), W, X, Y)
    assert (found.op.type, [op.type for op in found.inside]) == ("scan", ["mul", "mul"])
    assert "1.5" in str(found)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    def saved(middle):
        path = tmp_path_factory.mktemp("steps") / "step.onward"
        step = ow.compile(minimized(middle))
        ow.save(step, path, step.init(W))
        return ow.load_step(path)

    return saved(lambda h: jnp.tanh(h)), saved(lambda h: jnp.sin(h))


def test_steps_from_files_are_compared_with_code_and_with_each_other(right, loaded):
    (same, state), (other, _) = loaded
    assert compare(right, same, state, X, Y).equal
    for a, b in ((right, other), (same, other)):
        found = compare(a, b, state, X, Y)
        assert (found.equal, found.before.type, found.after.type) == (False, "tanh", "sin")


def test_what_is_no_program_is_refused(right):
    with pytest.raises(ArgumentError, match="expected two Programs"):
        compare(right, W, W, X, Y)
    with pytest.raises(ArgumentError, match="2 and for 4 devices"):
        compare(ow.replicate(right, 2), ow.replicate(right, 4), W, X, Y)


@pytest.mark.parametrize("precision", ["bf16", "int32", 16, ["bfloat16"]], ids=str)
def test_a_precision_that_names_no_floats_is_refused(right, precision):
    with pytest.raises(ArgumentError, match=r"compare: precision is .*; expected a dtype of floats"):
        compare(right, right, W, X, Y, precision=precision)


def test_programs_without_anything_in_common_cannot_be_matched(right):
    bare = replace(right, outputs=(), loss=None, gradients=(), next_state={}, recipe=None)
    found = compare(bare, bare, W, X, Y)
    assert not found.equal
    assert "cannot be matched" in str(found)


def test_what_differs_by_a_rounding_of_typical_size_needs_no_run():
    x = np.array([1.0, -3.0, 1e-6, 0.0], np.float32)
    part = 2 * float(np.finfo(np.float32).eps)
    assert is_near(x, x + np.array([1e-7, 2e-7, 2e-7, 2e-7], np.float32), part)
    assert not is_near(x, x + np.array([0, 0, 2e-6, 0], np.float32), part)
    endless = np.append(x, np.float32(np.inf))
    assert not is_near(endless, endless + np.array([0, 0, 2e-7, 0, 0], np.float32), part)
    assert is_near(endless, endless, part)
    assert not is_near(x, endless, part)
