"""Stages that are meshes: FSDP, tensor parallelism and both, with the numbers of one device."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tests.distribute.test_pipeline import (
    CLIPPED,
    MLP,
    NETWORKS,
    QUICK,
    WIDE,
    X,
    expect_equal,
    mlp,
    normal,
    trained,
)

import onward as ow

FSDP = {"data": 2}, {"*": "data"}
MODEL = {"model": 2}, {"*wide": P(None, "model")}
BOTH = {"data": 2, "model": 2}, {"*up": P("data", "model"), "*down": P("model", "data"), "*": "data"}


def held(state: Any) -> dict[str, tuple[int, ...]]:
    """The shape of what a device has of each state Variable, the same on all that have some."""
    shapes = {name: {part.data.shape for part in state[name].addressable_shards} for name in state}
    assert all(len(found) == 1 for found in shapes.values())
    return {name: found.pop() for name, found in shapes.items()}


@pytest.mark.parametrize(
    ("network", "stages", "schedule", "optimizer", "layout"),
    [
        ("gpt", 2, "zero_bubble", CLIPPED, BOTH),  # embedding and last layer are one parameter
        ("gpt", 2, "1f1b", ow.SGD(0.01), ({"data": 2, "copies": 2}, {"*": "data"})),
        ("mixer", 4, "gpipe", ow.Muon(0.02), FSDP),
        ("mixer", 2, "gpipe", ow.Adam(0.01, rules=[ow.EMA(0.5)]), MODEL),
        ("recurrent", 2, "1f1b", ow.Momentum(0.1), ({"data": 4}, {"params/0/velocity": None, "*": "data"})),
    ],
)
def test_twenty_steps_are_those_of_one_device(
    network: str, stages: int, schedule: str, optimizer: Any, layout: Any
):
    function, params, x = NETWORKS[network]
    x = np.concatenate([x, x])
    with jax.enable_x64(True):
        program = optimizer.minimize(function, params, x, has_aux=True)
        state, out = trained(ow.compile(program), params, x, 20)
        mesh, where = layout
        batch = ("data", "copies") if "copies" in mesh else None
        parted = ow.partition(program, mesh, where, batch)
        step = ow.compile(ow.pipeline(parted, stages, 4, schedule), options=QUICK)
        piped, seen = trained(step, params, x, 20)
        expect_equal(piped, state, rtol=0, atol=1e-9)
        np.testing.assert_allclose(seen.loss, out.loss, rtol=0, atol=1e-9)
        alone = ow.compile(parted, options=QUICK).init(params)
        assert held(piped) == held(alone)  # each device has what it would have in that mesh alone
        assert held(piped) != held(state)


def odd(params: Any, x: Any) -> Any:
    return mlp(params["layers"], x * params["scale"] + jnp.mean(params["three"]))


def test_a_part_gathers_each_parameter_once_and_what_no_axis_divides_is_whole():
    params = {"layers": MLP, "scale": np.ones((), "float32"), "three": np.ones(3, "float32")}
    program = ow.Momentum(0.1).minimize(odd, params, X)
    cut = ow.pipeline(ow.partition(program, *FSDP), 3, 3)
    told = str(cut)
    assert (
        "each stage has 2 devices (data 2), and bytes are those of one; over all stages it keeps 55 %" in told
    )
    rows = [re.split(r"  +", line)[:3] for line in told.split("\n")[2:5]]
    assert rows == [["0", "48 B", "60 B"], ["1", "32 B", "32 B"], ["2", "32 B", "32 B"]]
    told = str(ow.pipeline(program, 3, 3, data=2))
    assert re.findall(r"\n1 +(\S+ B) .*it keeps 100 % of its stage's state\n", told, re.S) == ["64 B"]
    told = str(ow.pipeline(ow.partition(program, {"model": 2}, {}), 3, 3))
    assert "keeps 100 % of its stage's state; what is held may be split further\n" in told
    step = ow.compile(cut)
    for stage in range(3):
        text = step.stages.parts[stage, "F"].call.as_text()
        gathers = re.findall(r" all-gather(?:-start)?\(", text)
        assert len(gathers) == sum(v.ndim == 2 for v in cut.parts[stage, "F"].state) == 1
    state, out = step(step.init(params), X)
    plain = ow.compile(program)
    wanted, seen = plain(plain.init(params), X)
    np.testing.assert_allclose(out.loss, seen.loss, rtol=1e-6)
    expect_equal(state, wanted, rtol=1e-5, atol=1e-6)
    parts = held(state)
    assert (parts["layers/1"], parts["layers/1/velocity"]) == ((2, WIDE), (2, WIDE))
    assert (parts["scale"], parts["three"], parts["three/velocity"]) == ((), (3,), (3,))


def two_products(params: Any, x: Any) -> Any:
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(x**2)


def test_stages_that_split_their_layers_add_up_and_gather_nothing():
    params = [(normal(WIDE, 8), normal(8, WIDE)) for _ in range(4)]
    program = ow.SGD(0.1).minimize(two_products, params, X)
    where = {"*/0": P(None, "model"), "*/1": P("model")}
    cut = ow.pipeline(ow.partition(program, {"data": 2, "model": 2}, where), 2, 3)
    step = ow.compile(cut)
    for (stage, work), part in step.stages.parts.items():
        text = part.call.as_text()
        sums = len(re.findall(r" all-reduce(?:-start)?\(", text))
        assert sums == 2 if (stage, work.value) == (0, "F") else sums > 0, (stage, work)
        assert "all-gather" not in text
    kept = [v for v in cut.parts[0, "F"].outputs if v.shape == (2, 8)]
    assert kept
    for v in kept:  # of the wide activations of both micro-batches each device has its own, and its columns
        assert step.stages.lies(v, 0).shard_shape((2, *v.shape)) == (1, 2, 4)
    (state, out), plain = trained(step, params, X, 3), ow.compile(program)
    wanted, seen = trained(plain, params, X, 3)
    np.testing.assert_allclose(out.loss, seen.loss, rtol=1e-5)
    expect_equal(state, wanted, rtol=1e-4, atol=1e-6)


def test_collectives_of_stages_have_stage_line_and_how_often():
    params = [(normal(WIDE, 8), normal(8, WIDE)) for _ in range(4)]
    program = ow.SGD(0.1, rules=[ow.ClipByGlobalNorm(1.0)]).minimize(two_products, params, X)
    where = {"*/0": P("data", "model"), "*/1": P("model", "data")}
    cut = ow.pipeline(ow.partition(program, {"data": 2, "model": 2}, where), 2, 3)
    found = ow.collectives(cut)
    first = [c for c in found if c.part == "F of stage 0"]
    gathers, others = (
        [c for c in first if c.kind == "all-gather"],
        [c for c in first if c.kind != "all-gather"],
    )
    assert [(c.axes, c.bytes) for c in gathers] == [(("data",), 64)] * 4
    assert {(c.kind, c.axes, *(v.op for v in c.values)) for c in others} == {
        ("all-reduce", ("model",), "dot_general")
    }
    read = {v.name for v in cut.parts[0, "F"].state}
    named = {v.op for c in gathers for v in c.values}
    assert named in (read, {"sharding_constraint"})  # jax 0.10 names what asks for it
    assert {c.times for c in found} == {1, 3}
    assert {c.part for c in found if c.times == 1} == {"update of stage 0", "update of stage 1"}
    line = two_products.__code__.co_firstlineno + 2
    products = {v.line for c in found for v in c.values if v.op in {"dot_general", "dot_general_grad"}}
    assert [text.rpartition(":")[2] for text in products] == [str(line)]
    assert found.bytes == sum(c.bytes * (c.times or 0) for c in found)
    assert "all-gather  64 B  along data  F of stage 0  3 times\n  f32[4,4]  " in str(found)
    assert "\n    params/0/0 is split along data and needed whole" in str(found)
    assert str(found).startswith("two_products in 2 stages on 4 devices (data 2 x model 2): ")
    assert str(ow.collectives(ow.compile(cut))) == str(found)
    with pytest.raises(ow.GraphError, match=r"Expected all-reduce alone(?s:.)*params/0/0"):
        found.expect("all-reduce")
    assert len(ow.collectives(ow.pipeline(program, 2, 3))) == 0
    with pytest.raises(ow.ArgumentError, match=r"takes a Pipeline alone: collectives\(program\)"):
        ow.collectives(cut, X)


def test_parameters_in_a_low_precision_are_kept_in_parts_too():
    program = ow.mixed_precision(ow.partition(ow.SGD(0.1).minimize(mlp, MLP, X), *FSDP))
    cut = ow.pipeline(program, 3, 3)
    step = ow.compile(cut, options=QUICK)
    casts = {v: s for s, part in cut.once.items() for v in part.outputs if v.shape == (WIDE, WIDE)}
    assert [v.dtype for v in casts] == [jnp.bfloat16] * 2  # the first is read where it is made
    assert {step.stages.lies(v, s).shard_shape(v.shape) for v, s in casts.items()} == {(2, WIDE)}
    plain = ow.compile(ow.accumulate(ow.mixed_precision(ow.SGD(0.1).minimize(mlp, MLP, X)), 3))
    state, wanted = trained(step, MLP, X, 3)[0], trained(plain, MLP, X, 3)[0]
    expect_equal(state, wanted, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("is_rolled_first", [True, False])
def test_layers_of_a_rolled_stage_are_gathered_one_by_one(is_rolled_first: bool):
    layers = [normal(WIDE, WIDE) for _ in range(24)]
    program = ow.SGD(0.1).minimize(mlp, layers, X)
    if is_rolled_first:
        cut = ow.pipeline(ow.partition(ow.roll(program), *FSDP), 2, 3)
    else:
        cut = ow.pipeline(ow.roll(ow.partition(program, *FSDP)), 2, 3)
    step = ow.compile(cut)
    (stack,) = cut.once[0].outputs
    assert stack.shape == (12, WIDE, WIDE)
    assert step.stages.lies(stack, 0).shard_shape(stack.shape) == (12, 2, WIDE)
    text = step.stages.parts[0, "F"].call.as_text()
    assert re.findall(r" = f32\[([\d,]+)\]\S* all-gather(?:-start)?\(", text) == [f"{WIDE},{WIDE}"]
    (state, out), plain = trained(step, layers, X, 3), ow.compile(program)
    wanted, seen = trained(plain, layers, X, 3)
    np.testing.assert_allclose(out.loss, seen.loss, rtol=1e-5)
    expect_equal(state, wanted, rtol=1e-4, atol=1e-6)


def test_what_time_steps_read_is_gathered_before_the_first():
    function, params, x = NETWORKS["recurrent"]
    program = ow.SGD(0.1).minimize(function, params, x, has_aux=True)
    step = ow.compile(ow.pipeline(ow.partition(program, *FSDP), 2, 4))
    for part in step.stages.parts.values():
        computations = re.split(r"\n(?=\S)", part.call.as_text())
        gathering = [text for text in computations if re.search(r" all-gather(-start)?\(", text)]
        assert [text.split()[0] for text in gathering] == ["ENTRY"]


def test_constraints_on_activations_and_gradients_stay():
    program = ow.SGD(0.1).minimize(mlp, MLP, X)
    where = {"params/0": P(None, "model"), "layer_0/tanh": P(None, "model"), "grad(params/2)": P("model")}
    cut = ow.pipeline(ow.partition(program, {"model": 2}, where), 2, 3)
    split = {(s, w.value) for (s, w), p in cut.parts.items() if any("split(" in v for v in p.variables)}
    assert split == {(0, "F"), (0, "B"), (1, "B")}
    plain = ow.compile(program)
    state, wanted = trained(ow.compile(cut), MLP, X, 3)[0], trained(plain, MLP, X, 3)[0]
    expect_equal(state, wanted, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_any_layout_is_restored_in_parts():
    program = ow.Momentum(0.1).minimize(mlp, MLP, X)
    plain = ow.compile(ow.pipeline(program, 2, 3), options=QUICK)
    shared = ow.compile(ow.pipeline(ow.partition(program, *FSDP), 2, 3), options=QUICK)
    state, _ = trained(shared, MLP, X, 2)
    with ow.Checkpoints(tempfile.mkdtemp()) as checkpoints:
        path = checkpoints.save(state, 2)
    for restored in (plain.restore(path), shared.restore(path)):
        assert all(np.array_equal(restored[name], state[name]) for name in state)
    assert held(restored)["params/2/velocity"] == (2, WIDE)
    moved, _ = shared(plain.restore(path), X)  # a State of other devices is taken over
    state, _ = shared(state, X)
    assert all(np.array_equal(moved[name], state[name]) for name in state)
    assert held(moved) == held(state)


def test_meshes_that_no_stage_can_have_are_refused():
    program = ow.SGD(0.1).minimize(mlp, MLP, X)
    with pytest.raises(ow.ArgumentError, match="data=2, and 'mlp' is partitioned over data 2, which says"):
        ow.pipeline(ow.partition(program, *FSDP), 2, 3, data=2)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    with pytest.raises(ow.ArgumentError, match=r"each stage has its own. Give .* lengths .*{'data': 2}"):
        ow.pipeline(ow.partition(program, mesh, {"*": "data"}), 2, 3)
    wide = ow.partition(program, {"data": 4, "model": 3}, {})
    with pytest.raises(ow.ArgumentError, match=r"12 rows, which 6 .* of data=4 do not divide\. Feed 24 rows"):
        ow.pipeline(wide, 2, 6)
    split = ow.partition(program, {"data": 4}, {"params/1": "data"})
    with pytest.raises(ow.ArgumentError, match=r"2 rows, which data=4 does not divide\. Feed 24 rows"):
        ow.pipeline(split, 2, 6)
    with pytest.raises(ow.ArgumentError, match="2 stages, each on 12 devices of its own, and JAX shows 8"):
        ow.compile(ow.pipeline(wide, 2, 3))
    shifted = ow.SGD(0.1).minimize(lambda params, x, y: mlp(params, x + y), MLP, X, X)
    told = ow.partition(shifted, {"data": 2, "model": 3}, {"x": "data", "y": "model"})
    whole = ow.partition(shifted, {"fsdp": 2, "model": 3}, {"params/1": "fsdp", "x": "fsdp", "y": "model"})
    with pytest.raises(
        ow.ArgumentError, match=r"'y' is float32\[4,4\], and model \(3 parts\) does not divide"
    ):
        ow.pipeline(whole, 2, 3)
    with pytest.raises(ow.ArgumentError, match="2 rows, which model=3 does not divide"):
        ow.pipeline(told, 2, 3)
