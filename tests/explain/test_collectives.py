"""Each exchange in a compiled step is found with its axes, its loop, its line, and a reason that is right."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.compiled import compilations

import onward as ow
from onward.core.errors import ArgumentError
from onward.explain.collectives.found import collectives_in
from onward.explain.collectives.hlo_text import CompiledText

MESH = {"data": 2, "model": 4}
SUMMED = "the dimension that the product sums over is split along"


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def layer(w, x):
    return jnp.tanh(x @ w)


LAYER = f"test_collectives.py:{layer.__code__.co_firstlineno + 1}"


def loss(ws, x):
    for w in ws:
        x = layer(w, x)
    return jnp.mean(x**2)


@jax.jit
def training(ws, x):
    value, gradients = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value


@pytest.fixture(scope="module")
def sharded(mesh):
    specs = P(None, "model"), P("model", None), P("data", None)
    arrays = (jnp.ones((16, 16)), jnp.ones((16, 16)), jnp.ones((8, 16)))
    first, second, x = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True))
    return [first, second], x


def expect_those_of_two_layers(found, product):
    """As Megatron's: a sum after the second product, and the gradients' over the batch."""
    assert found.mesh == MESH
    told = {(c.kind, c.axes, v.type, v.op, v.made_by, v.line) for c in found for v in c.values}
    assert told >= {
        ("all-reduce", ("model",), "f32[4,16]", "dot_general", "forward", LAYER),
        ("all-reduce", ("data",), "f32[4,16]", product, "backward", LAYER),
        ("all-reduce", ("data",), "f32[16,4]", product, "backward", LAYER),
    }
    products = [v for c in found for v in c.values if v.op in ("dot_general", product)]
    assert all(v.why.startswith(SUMMED) for v in products)
    reduced = [v.why for c in found for v in c.values if v.op == "reduce_sum"]
    assert reduced == ["the axis that is reduced is split along data: each device has a part of the result"]
    assert max(map(len, str(found).split("\n"))) <= 100


def test_what_xla_puts_in_for_arrays_that_lie_apart(sharded):
    expect_those_of_two_layers(ow.collectives(training, *sharded), "dot_general")


def test_in_a_step_of_a_program(sharded):
    ws, x = sharded
    step = ow.compile(ow.SGD(0.1).minimize(loss, [jnp.ones((16, 16))] * 2, jnp.ones((8, 16))))
    expect_those_of_two_layers(ow.collectives(step, step.init(ws), x), "dot_general_grad")


def test_what_is_written_and_in_a_loop(mesh):
    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"))
    def ring(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: jax.lax.ppermute(y, "model", [(0, 1), (1, 0)]), x)

    (found,) = ow.collectives(ring.lower(jnp.ones((4, 8))).compile())
    assert (found.kind, found.axes, found.times) == ("collective-permute", ("model",), 3)
    assert [(v.op, v.why) for v in found.values] == [("ppermute", "written there")]


def test_what_replicate_merges():
    program = ow.SGD(0.1).minimize(loss, [jnp.ones((4, 4))], jnp.ones((8, 4)))
    (found,) = ow.collectives(ow.replicate(program, 4))
    assert (found.kind, found.axes, found.devices, found.bytes) == ("all-reduce", ("replicas",), 4, 68)
    names = {v.op for v in found.values}
    assert names >= {"all_mean(grad(ws/0))"}
    assert {v.why for v in found.values} == {
        "the Program merges it: what the devices along replicas have is reduced to one"
    }
    assert list(ow.collectives(program)) == []


OLDER = """HloModule jit_f, num_partitions=8

ENTRY %main (p0: f32[4,16], p1: f32[8]) -> f32[16,16] {
  %p0 = f32[4,16]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}, metadata={op_name="params[\\'w\\']"}
  %copy = f32[4,16]{1,0} copy(%p0)
  %ag = (f32[4,16]{1,0}, f32[16,16]{1,0}) all-gather-start(%copy), replica_groups=[2,4]<=[8], \
metadata={op_name="jit(f)/jit(main)/dot_general" source_file="/home/ann/train.py" source_line=12}
  %done = f32[16,16]{1,0} all-gather-done(%ag)
  %p1 = f32[8]{0} parameter(1), metadata={op_name="x"}
  %neg = f32[8]{0} negate(%p1), metadata={op_name="jit(f)/neg"}
  %ar = f32[8]{0} all-reduce(%neg), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add, \
metadata={op_name="jit(f)/dot_general"}
  %rs = bf16[2]{0} reduce-scatter(%neg), replica_groups={{0,1},{2,3,4,5},{6,7}}, dimensions={0}
}
"""


def test_another_text_is_read_and_no_reason_guessed():
    gathered, reduced, scattered = collectives_in(CompiledText.of(OLDER), MESH, 8, {})
    (value,) = gathered.values
    assert (gathered.kind, gathered.bytes, gathered.axes) == ("all-gather", 1024, ("model",))
    assert (value.op, value.line) == ("dot_general", "train.py:12")
    assert value.why == "argument params[\\'w\\'] is split along model and needed whole"
    assert reduced.axes == ("data",)
    assert reduced.values[0].why == "what the devices along data have is reduced to one"
    assert scattered.axes == ()
    assert scattered.values[0].why.endswith("XLA names no op for it")


def test_what_is_no_step():
    with pytest.raises(ArgumentError, match="collectives takes a Program, a step, or a function"):
        ow.collectives(3)


def test_a_program_is_compiled_once_for_all_that_is_asked_and_is_not_held():
    program = ow.SGD(0.1).minimize(loss, [jnp.ones((8, 8))], jnp.ones((8, 8)))
    program = ow.partition(program, {"data": 8}, {"*": "data"})
    assert compilations(partial(ow.collectives, program)) == 1
    assert compilations(partial(str, ow.memory(program))) == 0
    gone = weakref.ref(program)
    del program
    gc.collect()
    assert gone() is None


def test_a_parameter_that_is_gathered_is_named_with_who_reads_it():
    x = jnp.ones((8, 8))
    program = ow.partition(ow.SGD(0.1).minimize(loss, [x], x), {"data": 8}, {"*": "data"})
    step = ow.compile(program)
    for found in (ow.collectives(program), ow.collectives(step, step.init([x]), x)):
        gathered = [v for c in found for v in c.values if c.kind == "all-gather"]
        (w,) = [v for v in gathered if v.type == "f32[8,8]"]
        assert w.line.startswith("test_collectives.py:")
        assert w.why.startswith("ws/0 is split along data and needed whole")
        assert "dot_general" in f"{w.op}; {w.why}"  # JAX 0.10 marks what is gathered as the op that reads it
        assert "reused" not in str(found)


def test_a_function_is_compiled_for_its_arguments():
    for step in (jax.jit(loss), ow.compile(ow.SGD(0.1).minimize(loss, [jnp.ones((8, 8))], jnp.ones((8, 8))))):
        with pytest.raises(ArgumentError, match=r"is compiled for its arguments, and missing a required"):
            ow.collectives(step)
