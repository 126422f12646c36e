"""Activations in host memory: the same numbers, turn by turn in loops, the device's bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import models

import onward as ow
from onward.core.marks import FETCH, STORE
from onward.core.memories import moves_memory, on_host
from onward.core.program import programs_within
from onward.core.show import nbytes
from onward.develop.stored import Saved, stored_values
from onward.execute.memory.held import MemoryShare
from onward.explain.budget.savings import memory_savings
from onward.explain.budget.search import bytes_taken

RNG = np.random.default_rng(0)
DEPTH, WIDTH, ROWS = 4, 8, 64


def _normal(*shape):
    return (0.4 * RNG.normal(size=shape)).astype("float32")


LAYERS, X = [_normal(WIDTH, WIDTH) for _ in range(DEPTH)], _normal(ROWS, WIDTH)


def _loss(layers, x):
    for w in layers:
        x = x + jnp.sin(x @ w)
    return jnp.mean(x**2)


PLAIN = ow.Adam(0.1).minimize(_loss, LAYERS, X)
ROLLED = ow.roll(PLAIN)


def _is_activation(v):
    return v.kind == "activation"


def _ran(program, params=LAYERS, data=(X,), tune=False, steps=2):
    step = ow.compile(program, tune=tune)
    state = step.init(params)
    for _ in range(steps):
        state, out = step(state, *data)
    return [out.loss, *(state[name] for name in sorted(state))]


def _expect_equal(one, other):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def _kinds(program):
    return [op.type for op in program.ops if op.type in (FETCH, STORE)]


def test_a_value_goes_behind_its_last_reader_and_comes_before_its_first():
    program = ow.offload(PLAIN, "add_1")
    names = [op.outputs[0].name for op in program.ops]
    at = names.index("stored(add_1)")
    assert names[at - 1] == "add_2"  # the last that reads it
    assert program.ops[at].made_by is ow.Pass.FORWARD
    at = names.index("fetched(add_1)")
    assert program.ops[at].made_by is ow.Pass.BACKWARD
    assert program["fetched(add_1)"] in program.ops[at + 1].inputs
    late = [op for op in program.ops[at:] if op.made_by is ow.Pass.BACKWARD]
    assert not any(program["add_1"] in op.inputs for op in late)
    assert ow.check(program) is program


def test_a_name_stands_for_what_its_op_saves():
    assert [v.name for v in stored_values(ow.offload(PLAIN, "sin"))] == ["stored(saved(sin))"]
    by_pattern = ow.offload(PLAIN, ["sin*", lambda v: v.name == "add"])
    assert len(stored_values(by_pattern)) == DEPTH + 1


MODELS = {
    "mlp": (models.mlp((6, 8, 8, 10), batch=4), False),
    "gpt": (models.transformer(layers=2, d=8, heads=2, seq=4, batch=2, words=16), False),
    "rolled gpt": (models.transformer(layers=4, d=8, heads=2, seq=4, batch=2, words=16), True),
    "lstm": (models.lstm(4, 3, 5, 2), False),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("mlp", "float32"),
        ("mlp", "float64"),
        ("gpt", "float32"),
        ("rolled gpt", "float64"),
        ("lstm", "float32"),
        ("lstm", "float64"),
    ],
)
def test_the_same_bits(case, dtype):
    model, is_rolled = MODELS[case]
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), model.params)
        data = [jnp.asarray(x, dtype) if x.dtype == "float32" else x for x in model.data]
        program = ow.Adam(1e-2).minimize(model.loss, params, *data)
        program = ow.roll(program) if is_rolled else program
        moved = ow.offload(program, _is_activation)
        assert len(stored_values(moved)) == len(Saved(program).candidates) > 5
        _expect_equal(_ran(program, params, data), _ran(moved, params, data))


def test_a_loop_moves_turn_by_turn():
    """Within the turns of both loops, so that the stack never lies on the device."""
    program = ow.offload(ROLLED, "saved(add_3)*")
    forward, backward = (op for op in program.ops if op.type.startswith("scan"))
    assert _kinds(program) == []
    assert on_host(forward.body) == {1, 2}
    assert {v.name for v in stored_values(program)} <= {v.name for v in backward.inputs}
    turns = [programs_within(op.body)["jaxpr"] for op in (forward, backward)]
    assert [sum(moves_memory(op.body) for op in turn.ops) for turn in turns] == [2, 2]
    assert ow.graph.rolls_of(program) == ow.graph.rolls_of(ROLLED)
    _expect_equal(_ran(ROLLED), _ran(program))
    assert {v.name for v in stored_values(program)} == {"saved(add_3)", "saved(add_3)_1"}
    steps = [ow.compile(p, tune=False, fetch=["saved(add_3)"]) for p in (ROLLED, program)]
    fetched = [step(step.init(LAYERS), X)[1]["saved(add_3)"] for step in steps]
    _expect_equal(*([x] for x in fetched))
    assert [x.sharding.memory_kind for x in fetched] == ["device", "device"]
    before, after = ow.memory(ROLLED, tune=False), ow.memory(program, tune=False)
    stacks = sum(map(nbytes, stored_values(program)))
    assert after.on_host == stacks == 2 * DEPTH * X.nbytes
    assert after.peak <= before.peak - stacks + 3 * X.nbytes


def test_a_stack_that_is_read_otherwise_is_moved_as_a_whole():
    def loss(w, xs):
        _, found = jax.lax.scan(lambda h, x: ((h := jnp.sin(h @ w + x)), h), jnp.zeros(3), xs)
        return jnp.sum(found**3)

    program = ow.append_backward(ow.trace(loss, jnp.eye(3), jnp.ones((5, 3))))
    moved = ow.offload(program, _is_activation)
    assert len(stored_values(moved)) > _kinds(moved).count(STORE) > 0
    wanted = jax.grad(loss)(jnp.eye(3), jnp.ones((5, 3)))
    step = ow.compile(moved, fetch=[moved.gradients[0][1].name])
    found = step(step.init(jnp.eye(3)), jnp.ones((5, 3)))[1]
    np.testing.assert_allclose(found[moved.gradients[0][1].name], wanted, rtol=1e-6)


def _recomputed(program):
    return ow.recompute(program, 0.9)


OTHERS = {
    "guard": lambda p: ow.guard(p, "skip"),
    "micro-batches": lambda p: ow.accumulate(p, 2),
    "bfloat16": lambda p: ow.mixed_precision(p, "bfloat16"),
    "float16": lambda p: ow.mixed_precision(p, "float16"),
    "replicate": lambda p: ow.replicate(p, 2),
    "partition": lambda p: ow.partition(p, {"data": 2}, {"*": "data"}),
    "state": ow.offload,
}


@pytest.mark.parametrize("name", OTHERS)
def test_with_other_transforms_in_either_order(name):
    other = OTHERS[name]
    wanted, early, late = other(PLAIN), other(ow.offload(PLAIN, "sin*")), ow.offload(other(PLAIN), "sin*")
    assert len(stored_values(early)) == len(stored_values(late)) == DEPTH
    assert str(early) == str(late)
    _expect_equal(_ran(wanted), _ran(early))
    assert ow.memory(early).on_host > ow.memory(wanted).on_host


def test_with_recomputation_other_lengths_and_a_test_program():
    lean = _recomputed(PLAIN)
    moved = ow.offload(lean, _is_activation)
    assert stored_values(moved)
    _expect_equal(_ran(lean), _ran(moved))
    step, plain = (ow.compile(p, tune=False) for p in (ow.offload(PLAIN, "sin*"), PLAIN))
    _expect_equal(*([s(s.init(LAYERS), X[:9])[1].loss] for s in (step, plain)))
    assert str(ow.for_test(ow.offload(PLAIN, "sin*"))) == str(ow.for_test(PLAIN))


def test_compile_leaves_names_alone_and_says_so():
    moved = ow.offload(PLAIN, "sin*")
    plan = str(ow.compile(moved).plan())
    assert "not rolled: activations lie in host memory; offload(roll(program), where) rolls it" in plan
    assert "offloaded: stored(saved(sin)), stored(saved(sin_1))" in plan
    for a, b in zip(_ran(PLAIN, tune=True), _ran(moved, tune=True), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert len(stored_values(ow.offload(ROLLED, "saved*"))) == 3
    with pytest.raises(ow.UnknownNameError, match=r"nothing is named 'sin\*'"):
        ow.roll(moved)


def test_memory_and_savings_tell_host_and_device_apart():
    moved = ow.offload(PLAIN, _is_activation)
    before, after = ow.memory(PLAIN, tune=False), ow.memory(moved, tune=False)
    kept = sum(map(nbytes, stored_values(moved)))
    assert after.on_host == kept
    assert after.shares[MemoryShare.SAVED] < 0.2 * before.shares[MemoryShare.SAVED]
    assert "of activations lie in host memory" in str(after)
    [row] = memory_savings(moved).rows
    assert row.way == "host memory"
    assert row.saved > 0.4 * kept
    assert "until the backward pass" in row.what[0]
    assert row.lost >= 0.9 * 2 * kept / 64e9
    both = ow.offload(PLAIN, ["*/mean", "sin*"])
    assert len(memory_savings(both).rows[0].what) == 2
    assert bytes_taken(both) < bytes_taken(ow.offload(PLAIN, "sin*"))
    assert "of state and activations lie in host memory" in str(ow.memory(both))


@pytest.mark.parametrize("model", [models.mlp((32, 32, 32, 10), batch=128), models.lstm(8, 8, 12, 16)])
def test_memory_is_near_the_part_of_the_compilers_report_that_a_device_holds(model):
    program = ow.SGD(1e-2).minimize(model.loss, model.params, *model.data)
    moved = ow.offload(program, _is_activation)
    assert ow.memory(moved, tune=False).peak == pytest.approx(bytes_taken(moved), rel=0.15)
    assert bytes_taken(moved) < 0.7 * bytes_taken(program)
