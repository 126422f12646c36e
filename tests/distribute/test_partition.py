"""A Program over a mesh: equal to one device, with its state split, through all other transforms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import onward as ow
from onward.core.meshes import specs_of
from onward.core.program import Program
from onward.execute.memory.held import MemoryShare

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 16)).astype("float32")
PARAMS = {f"w{i}": RANDOM.normal(0, 0.25, (16, 16)).astype("float32") for i in range(4)}
MESH = {"data": 2, "model": 4}
TENSOR = {"w[02]": P(None, "model"), "w[13]": P("model")}


def network(params: Any, x: Any) -> Any:
    for i, w in enumerate(params.values()):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def program() -> Program:
    return ow.Momentum(0.5).minimize(network, PARAMS, X)


@pytest.fixture(scope="module")
def tensor(program: Program) -> Program:
    return ow.partition(program, MESH, TENSOR)


@pytest.fixture(scope="module")
def alone(program: Program) -> Any:
    return trained(ow.compile(program))


@pytest.fixture(scope="module")
def step(tensor: Program) -> Any:
    return ow.compile(tensor)


def trained(step: Any, steps: int = 3, x: Any = X) -> Any:
    state = step.init(PARAMS)
    for _ in range(steps):
        state, out = step(state, x)
    return state, out


def expect_alike(found: Any, like: Any, rtol: float = 2e-5) -> None:
    (state, out), (other, known) = found, like
    np.testing.assert_allclose(out.loss, known.loss, rtol=rtol)
    for name in other:
        np.testing.assert_allclose(state[name], other[name], rtol=rtol, atol=rtol / 10)


def part(array: Any) -> tuple[int, ...]:
    return tuple(array.addressable_shards[0].data.shape)


def test_parameters_with_their_slots_are_split_and_the_numbers_those_of_one_device(
    step: Any, alone: Any
) -> None:
    found = trained(step)
    expect_alike(found, alone)
    for name in ("w0", "w0/velocity"):
        assert part(found[0][name]) == (16, 4)
    assert part(found[0]["w1"]) == (4, 16)
    assert part(found[0]["step"]) == ()


@pytest.mark.parametrize(
    ("mesh", "where", "batch", "shape"),
    [
        ({"data": 8}, {"*": "data"}, None, (2, 16)),
        ({"copies": 2, "data": 4}, {"*": "data"}, ("copies", "data"), (4, 16)),
        ({"model": 4}, {"w0": None, "x": None, "*": "model"}, None, (16, 16)),
        ({"data": 2, "model": 2}, {"w0": P("data", "model"), "w*": ("model",)}, None, (8, 8)),
    ],
    ids=["fsdp", "hsdp", "tensor", "both"],
)
def test_any_layout_gives_the_numbers_of_one_device(
    program: Program, alone: Any, mesh: Any, where: Any, batch: Any, shape: tuple[int, ...]
) -> None:
    step = ow.compile(ow.partition(program, mesh, where, batch=batch))
    found = trained(step)
    expect_alike(found, alone)
    assert part(found[0]["w0"]) == part(found[0]["w0/velocity"]) == shape


def test_an_entry_that_meets_no_parameter_is_about_activations_then_gradients(
    program: Program, alone: Any
) -> None:
    where = {**TENSOR, "layer_0/tanh": P("data", "model"), "grad(w3)": P("model")}
    split = ow.partition(program, MESH, where)
    text = str(split)
    assert "split(layer_0/tanh) = sharding_constraint(layer_0/tanh, spec=P('data', 'model'))" in text
    assert split.gradients[3][1].name == "split(grad(w3))"
    expect_alike(trained(ow.compile(split)), alone)


def test_repeated_layers_are_one_loop_over_split_stacks(program: Program, alone: Any) -> None:
    step = ow.compile(ow.roll(ow.partition(program, {"data": 4}, {"*": "data"})))
    found = trained(step)
    expect_alike(found, alone)
    stacks = [b for b in step.storage.buffers if len(b.members) > 1]
    assert {b.variable.shape for b in stacks} == {(4, 16, 16)}
    assert {part(found[0].buffers[step.storage.names.index(b.variable.name)]) for b in stacks} == {(4, 4, 16)}
    gathered = [c for c in ow.collectives(step, found[0], X) if c.kind == "all-gather"]
    assert gathered
    assert {c.times for c in gathered} == {4}


def test_rows_that_are_made_of_a_split_matrix_stay_split() -> None:
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((16, 64)), X[:4])
    text = str(ow.partition(program, {"data": 4}, {"*": "data"}))
    assert "split(dot_general) = sharding_constraint(dot_general, spec=P('data', UNCONSTRAINED))" in text


def test_fsdp_gathers_parameters_layer_by_layer_and_never_the_batch() -> None:
    def wide(params: Any, x: Any) -> Any:
        for up, down in params:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    pair = np.ones((16, 64), "float32"), np.ones((64, 16), "float32")
    program = ow.roll(ow.SGD(1e-2).minimize(wide, [pair] * 6, X))
    split = ow.partition(program, {"data": 4}, {"*": "data"})
    found = ow.collectives(split).expect("all-gather", "all-reduce")
    gathered = [(v.type, c.times) for c in found if c.kind == "all-gather" for v in c.values]
    assert sorted(gathered) == [("f32[16,64]", 6)] * 2 + [("f32[64,16]", 6)] * 2  # forward and backward
    layer = 2 * pair[0].nbytes
    gradients = 6 * layer / 4
    assert ow.memory(split).each_device[MemoryShare.TEMPORARIES] < gradients + 3 * layer < 6 * layer


@pytest.mark.parametrize(
    "then",
    [
        lambda p: ow.watch(ow.guard(ow.accumulate(p, 2)), gradients=True),
        lambda p: ow.recompute(ow.mixed_precision(p), 0.95),
    ],
    ids=["accumulate", "mixed"],
)
def test_other_transforms_come_before_it_or_after_it(
    program: Program, alone: Any, then: Callable[[Program], Program]
) -> None:
    after = then(ow.partition(program, MESH, TENSOR))
    before = ow.partition(then(program), MESH, TENSOR)
    assert after.partition is not None
    assert str(after) == str(before)
    is_mixed = any("bfloat16" in str(v.dtype) for v in after.variables.values())
    found = trained(ow.compile(after))
    assert part(found[0]["w0"]) == (16, 4)
    np.testing.assert_allclose(found[1].loss, alone[1].loss, rtol=2e-2 if is_mixed else 2e-5)


@pytest.mark.parametrize("order", [1, -1], ids=["accumulated", "split"])
def test_each_device_computes_its_part_of_a_micro_batch(order: int) -> None:
    """Also where the axis of the batch splits no parameter, so that nothing else says how examples lie."""
    x = RANDOM.normal(size=(64, 16)).astype("float32")
    program = ow.Momentum(0.5).minimize(network, PARAMS, x)
    alone = trained(ow.compile(program), x=x)
    transforms = [lambda p: ow.accumulate(p, 2), lambda p: ow.partition(p, {"data": 2}, {})]
    for transform in transforms[::order]:
        program = transform(program)
    found = ow.collectives(program)
    assert [(c.kind, c.times) for c in found if c.kind == "all-reduce"] == [("all-reduce", 2)]
    assert "all-gather" not in {c.kind for c in found}  # nobody is given the examples of others
    expect_alike(trained(ow.compile(program), x=x), alone)


def test_a_test_program_is_split_as_well(tensor: Program, step: Any, program: Program) -> None:
    state, _ = trained(step, 1)
    _, out = ow.compile(ow.for_test(tensor))(state, X)
    _, known = ow.compile(ow.for_test(program))(trained(ow.compile(program), 1)[0], X)
    np.testing.assert_allclose(out.loss, known.loss, rtol=2e-5)


def test_saved_on_one_layout_and_restored_on_another_bit_for_bit(
    step: Any, program: Program, tmp_path: Any
) -> None:
    state, _ = trained(step, 2)
    with ow.Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(state, 2)
    other = ow.compile(ow.partition(program, {"data": 8}, {"*": "data"}))
    found = other.restore(path)
    assert part(found["w0/velocity"]) == (2, 16)
    for name in state:
        np.testing.assert_array_equal(found[name], state[name])
    whole = ow.compile(program)
    expect_alike(other(found, X), whole(whole.restore(path), X))


def test_batches_of_other_lengths(step: Any, program: Program) -> None:
    expect_alike(trained(step, 2, X[:6]), trained(ow.compile(program), 2, X[:6]))
    words = r"cannot be built for it: partition: 'x' .* data \(2 parts\) does not divide its dimension 0"
    with pytest.raises(ow.ArgumentError, match=words):
        step(step.init(PARAMS), X[:5])


def test_a_mesh_of_jax_with_its_own_devices(program: Program, alone: Any) -> None:
    devices = np.array(jax.devices()[4:]).reshape(2, 2)
    found = trained(ow.compile(ow.partition(program, Mesh(devices, ("data", "model")), TENSOR)))
    assert found[0]["w0"].sharding.device_set == set(devices.flat)
    expect_alike(found, alone)


def test_a_fault_is_named(tensor: Program) -> None:
    step = ow.compile(tensor, check_finite=True)
    huge = {**PARAMS, "w1": PARAMS["w1"] * np.float32(3e38)}
    state, _ = step(step.init(huge), X)
    with pytest.raises(ow.NonFiniteError, match=r"'layer_1/dot_general'(.|\n)*test_partition.py"):
        step.expect_going(state)


def test_it_compares_equal_to_one_device(program: Program, tensor: Program) -> None:
    assert ow.compare(program, tensor, PARAMS, X).equal


def test_a_trainer_goes_on_split_and_comes_back_so(tensor: Program, alone: Any, tmp_path: Any) -> None:
    def begun() -> Any:
        return ow.Trainer(ow.Model(ow.trace(network, PARAMS, X), PARAMS), tensor, checkpoints=tmp_path)

    trainer = begun()
    history = trainer.train([X, X], epochs=1)
    again = begun()
    again.restore(tmp_path)
    out = again.update(X)
    np.testing.assert_allclose([*history["loss"], out.loss][-1], alone[1].loss, rtol=2e-5)
    assert part(again["w0"]) == part(again["w0/velocity"]) == (16, 4)


def test_the_plan_says_what_each_device_keeps(tensor: Program, step: Any) -> None:
    plan = ow.plan(tensor)
    state = step.init(PARAMS)
    fed = X.nbytes // 2
    assert plan.kept == fed + sum(x.addressable_shards[0].data.nbytes for x in state.buffers)
    assert plan.whole == X.nbytes + sum(x.nbytes for x in state.buffers)


def test_the_memory_of_each_device_is_its_parts_and_what_is_compiled(tensor: Program, step: Any) -> None:
    memory = ow.memory(tensor)
    state = step.init(PARAMS)
    compiled = step.executable(state, X).memory
    found = dict(memory.each_device)
    assert found.pop("temporaries") == compiled.temp_size_in_bytes > 0
    assert found.pop("results") == compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    assert sum(found.values()) == compiled.argument_size_in_bytes == ow.plan(tensor).kept
    assert str(memory).startswith("Each device of data 2 x model 4 takes ")
    assert "in whole arrays" in str(memory)


def test_collectives_that_were_not_foretold_are_refused(tensor: Program) -> None:
    found = ow.collectives(tensor)
    assert found.expect("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
    with pytest.raises(ow.GraphError, match=r"Expected all-to-all alone(.|\n)*test_partition.py"):
        found.expect("all-to-all")
    with pytest.raises(ow.ArgumentError, match="'sum' is not a collective"):
        found.expect("sum")


def test_wrong_arguments(program: Program, tensor: Program, tmp_path: Any) -> None:
    def split(mesh: Any, where: Any, **named: Any) -> Callable[[], Any]:
        return lambda: ow.partition(program, mesh, where, **named)

    wrong = [
        (split(8, {}), ow.ArgumentError, "expected the lengths of its axes by name"),
        (split({"data": 0}, {}), ow.ArgumentError, "with 'data': 0; expected the lengths of its axes by"),
        (split({"m": 3}, {"w0": "m"}), ow.ArgumentError, "'m' .3 parts. divides none of its dimensions"),
        (
            split({"data": 3}, {}),
            ow.ArgumentError,
            "'x' is .* does not divide its dimension 0. Make it 6",
        ),
        (split(MESH, {"w9": "data"}), ow.UnknownNameError, "nothing is named 'w9'"),
        (split(MESH, {"w0": "rows"}), ow.ArgumentError, "the mesh has the axes 'data', 'model'"),
        (split(MESH, {"w0": P("data", "data")}), ow.ArgumentError, "two dimensions over one axis"),
        (split(MESH, {"w0": P(None, None, "data")}), ow.ArgumentError, "with 2 dimensions, and"),
        (split(MESH, {"w0": 3}), ow.ArgumentError, "expected a PartitionSpec, the name of an axis"),
        (split(MESH, {"w0": P(P.UNCONSTRAINED)}), ow.ArgumentError, "expected axes of the mesh by name"),
        (split(MESH, {"w0": P(1)}), ow.ArgumentError, "splits a dimension by 1; expected axes"),
        (split(MESH, [("w0", "data")]), ow.ArgumentError, "where is a list of 1; expected a dict"),
        (split(MESH, {}, batch="rows"), ow.ArgumentError, "'x' is to be split over 'rows'"),
        (lambda: ow.partition(tensor, MESH, {}), ow.GraphError, "partitioned already"),
        (lambda: ow.partition(ow.replicate(program, 2), MESH, {}), ow.GraphError, "replicated already"),
        (lambda: ow.replicate(tensor, 2), ow.GraphError, "batch='data'"),
        (lambda: ow.split(tensor, 2), ow.GraphError, "has partition after its update"),
        (lambda: ow.compile(tensor, cores=2), ow.GraphError, "leave out cores="),
        (
            lambda: ow.compile(split({"m": 16}, {"w*": "m"})()),
            ow.ArgumentError,
            "and JAX shows 8",
        ),
    ]
    for call, error, words in wrong:
        with pytest.raises(error, match=words):
            call()


def test_a_split_step_is_not_saved_as_code(tensor: Program, step: Any, tmp_path: Any) -> None:
    with pytest.raises(ow.GraphError, match="as it was before partition"):
        ow.save(step, tmp_path / "a.model", step.init(PARAMS))


def test_the_slots_of_a_step_of_someone_else_are_split_as_well() -> None:
    tx = optax.adamw(1e-2)

    def step(params: Any, slots: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(network)(params, x)
        updates, slots = tx.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots, loss

    program = ow.partition(ow.adopt(step, PARAMS, tx.init(PARAMS), X), {"data": 8}, {"*": "data"})
    kept = [v for v in program.state if v.shape]
    assert len(kept) == 12
    assert set(specs_of(program)) == {v.name for v in kept} | {"x"}


def by_weight(params: Any, x: Any, example_weight: Any) -> Any:
    each = jnp.sum(jnp.tanh(x @ params["w0"]) ** 2, 1)
    return jnp.sum(each * example_weight) / jnp.sum(example_weight), (each, each[None] * each[:, None])


def by_weight_alone(params: Any, x: Any, example_weight: Any) -> Any:
    return by_weight(params, x, example_weight)[0], jnp.sum(x, 1)


@pytest.mark.parametrize(("traced", "steps"), [(16, 1), (13, 1), (13, 3)])
def test_a_batch_that_the_axes_do_not_divide_is_filled_up_by_its_weights(traced: int, steps: int) -> None:
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*all pairs")
        params = {"w0": RANDOM.normal(size=(16, 16))}
        x, weights = RANDOM.normal(size=(16, 16)), RANDOM.uniform(1, 2, 16)
        loss = by_weight if steps == 1 else by_weight_alone
        program = ow.SGD(0.1).minimize(loss, params, x[:traced], weights[:traced], has_aux=True)
        program = ow.partition(program, {"data": 4}, {"*": "data"})
        step = ow.compile(ow.accumulate(program, steps) if steps > 1 else program)
        state, w = step.init(params), params["w0"]
        plain = jax.value_and_grad(loss, has_aux=True)
        for rows in (16, 13, 3):
            fed = x[:rows], weights[:rows]
            state, out = step(state, *fed)
            (value, aux), gradients = plain({"w0": w}, *fed)
            w = w - 0.1 * gradients["w0"]
            np.testing.assert_allclose(out.loss, value, rtol=1e-9)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9), out.aux, aux)
            np.testing.assert_allclose(state["w0"], w, rtol=1e-9)


def test_what_filling_up_may_change_is_told_once() -> None:
    def loss(params: Any, x: Any, example_weight: Any) -> Any:
        each = jnp.sum((x @ params["w0"]) ** 2, 1)
        return jnp.mean(each * example_weight), jnp.sort(each)

    params = {"w0": PARAMS["w0"]}
    program = ow.SGD(0.1).minimize(loss, params, X, np.ones(8), has_aux=True)
    step = ow.compile(ow.partition(program, {"data": 4}, {}))
    state = step.init(params)
    with pytest.warns(UserWarning, match="the loss is divided by a number of rows.*so are the result 'sort"):
        state, _ = step(state, X[:5], np.ones(5))
    step(state, X[:5], np.ones(5))


def test_a_batch_without_weights_is_told_the_ways_out(program: Program) -> None:
    step = ow.compile(ow.partition(program, {"data": 4}, {}))
    ways = r"drop_last=True.*example_weight.*where=\{'x': None\}"
    with pytest.raises(ow.ArgumentError, match=f"Make it 4 or 8, leave a short last.*{ways}"):
        step(step.init(PARAMS), X[:5])
