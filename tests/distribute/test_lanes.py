"""Devices of a stage that share nothing but examples: each has micro-batches of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.distribute.test_pipeline import QUICK, expect_equal, normal, trained

import onward as ow

WIDE = 4
PARAMS = {"layers": [normal(WIDE, WIDE) for _ in range(4)], "out": normal(WIDE, WIDE)}
X = normal(16, WIDE)
CLIPPED = ow.AdamW(0.1, rules=[ow.ClipByGlobalNorm(1.0)])
FSDP = {"layers/*": P("fsdp"), "out": P("fsdp")}
TENSOR = {"layers/*": P(None, "model"), "out": P("model")}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any], Any]] = {
    "data": ({"data": 2}, {}, None),
    "data and parameters": ({"data": 2, "fsdp": 2}, FSDP, ("data", "fsdp")),
    "parameters and data": ({"fsdp": 2, "data": 2}, FSDP, ("fsdp", "data")),
    "data and products": ({"data": 2, "model": 2}, TENSOR, None),
}


def network(params: Any, x: Any) -> Any:
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    made = x @ params["out"]
    results = {"each": made, "across": made.T, "largest": jnp.max(made), "hits": jnp.sum(made > 0)}
    return jnp.mean(made**2), results | {"norm": jnp.sum(params["out"] ** 2), "sum": jnp.sum(x)}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_steps_and_results_are_those_of_one_device(mesh: str, schedule: str):
    with jax.enable_x64(True):
        program = CLIPPED.minimize(network, PARAMS, X, has_aux=True)
        wanted, out = trained(ow.compile(program), PARAMS, X, 3)
        cut = ow.pipeline(ow.partition(program, *MESHES[mesh]), 2, 4, schedule)
        assert (cut.lanes.axes, cut.lanes.count) == (("data",), 2)
        found, seen = trained(ow.compile(cut, options=QUICK), PARAMS, X, 3)
        expect_equal(found, wanted, rtol=0, atol=1e-9)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), seen.aux, out.aux)
        assert seen.aux["each"].addressable_shards[0].data.shape[0] == 16 // prod_of_batch(mesh)


def prod_of_batch(mesh: str) -> int:
    lengths, _, batch = MESHES[mesh]
    return int(np.prod([lengths[axis] for axis in batch or ("data",)]))


def test_gradients_are_summed_once_a_step_and_nothing_else_is_sent_along_data():
    """Also where the norm of all gradients is read before the update reads them again."""
    program = CLIPPED.minimize(network, PARAMS, X, has_aux=True)
    size = sum(v.size * 4 for v in program.parameters)
    for cut in (ow.pipeline(program, 2, 4, data=2), ow.pipeline(program, 2, 4, "zero_bubble", data=4)):
        found = [c for c in ow.collectives(cut) if c.axes == ("data",) and "sums" in c.part]
        gradients = [c for c in found if "F" not in c.part]
        assert {c.kind for c in found} == {"all-reduce"}
        assert sum(c.bytes for c in gradients) == size
        assert all(c.times == 1 for c in ow.collectives(cut))
        values = [v for c in gradients for v in c.values]
        assert len(values) == 5
        assert all(v.op == "dot_general_grad" and "test_lanes.py" in v.line for v in values)


def test_a_mesh_of_other_axes_too_sums_along_the_lanes_once():
    program = CLIPPED.minimize(network, PARAMS, X, has_aux=True)
    cut = ow.pipeline(ow.partition(program, *MESHES["data and parameters"]), 2, 4)
    along = {c.times for c in ow.collectives(cut) if "data" in c.axes}
    assert along == {1}
    assert {c.times for c in ow.collectives(cut) if c.axes == ("fsdp",)} >= {4}


def test_axes_that_split_more_than_examples_are_no_lanes():
    program = ow.SGD(0.1).minimize(network, PARAMS, X, has_aux=True)
    middle = next(v.name for v in program.variables.values() if v.shape == (16, WIDE) and v.name != "x")
    gradient = dict(program.gradients)[program["out"]].name
    others = {
        "a parameter": {"out": P("data")},
        "another dimension": {middle: P(None, "data")},
        "a gradient": {gradient: P("data")},
    }
    for where in others.values():
        cut = ow.pipeline(ow.partition(program, {"data": 2}, where), 2, 4)
        assert (cut.lanes.axes, cut.lanes.within) == ((), cut.partition)
    rows = ow.pipeline(ow.partition(program, {"data": 2}, {middle: P("data")}), 2, 4)
    assert rows.lanes.axes == ("data",)
    state, out = trained(ow.compile(rows, options=QUICK), PARAMS, X, 2)
    wanted, seen = trained(ow.compile(program), PARAMS, X, 2)
    expect_equal(state, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.loss, seen.loss, rtol=1e-5)


def test_constraints_on_activations_hold_in_each_lane():
    program = ow.SGD(0.1).minimize(network, PARAMS, X, has_aux=True)
    middle = next(v.name for v in program.variables.values() if v.shape == (16, WIDE) and v.name != "x")
    where = TENSOR | {middle: P("data", "model")}
    cut = ow.pipeline(ow.partition(program, {"data": 2, "model": 2}, where), 2, 4)
    assert cut.lanes.axes == ("data",)
    constraints = [op for part in cut.parts.values() for op in part.ops if op.type == "sharding_constraint"]
    assert len(constraints) == 1
    state, _ = trained(ow.compile(cut, options=QUICK), PARAMS, X, 2)
    expect_equal(state, trained(ow.compile(program), PARAMS, X, 2)[0], rtol=1e-5, atol=1e-6)


def test_micro_batches_of_lanes_draw_numbers_of_their_own():
    """As many micro-batches one after the other do the same: the keys of each, in their order."""

    def loss(params: Any, count: Any, x: Any, table: Any) -> Any:
        h = ow.layer.dropout(jnp.tanh(x @ params["layers"][0] + table[0]), 0.5)
        return jnp.mean((h @ params["out"]) ** 2), count + 1

    params = {"layers": PARAMS["layers"][:1], "out": PARAMS["out"]}
    table = normal(16, WIDE)
    program = ow.SGD(0.1).minimize(loss, params, X, table, state=jnp.int32(0))
    one = ow.compile(ow.accumulate(program, 8, whole="table"))
    two = ow.compile(ow.pipeline(program, 2, 4, data=2, whole=["table"]), options=QUICK)
    states = [step.init(params, jnp.int32(0)) for step in (one, two)]
    for _ in range(2):
        states = [step(state, X, table)[0] for step, state in zip((one, two), states, strict=True)]
    assert [int(state.model_state) for state in states] == [2, 2]
    expect_equal(states[1], states[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("whole", ["table", lambda v: v.name == "table", iter(["tab*"])])
def test_data_that_each_micro_batch_gets_whole_is_told_as_elsewhere(whole: Any):
    def loss(params: Any, x: Any, table: Any) -> Any:
        return network(params, x + table[:1])[0]

    program = ow.SGD(0.1).minimize(loss, PARAMS, X, normal(16, WIDE))
    cut = ow.pipeline(program, 2, 4, whole=whole)
    assert {v.name: v.shape[0] for v in cut.parts[0, "F"].inputs} == {"x": 16 // 4, "table": 16}
