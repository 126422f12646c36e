"""The rules of the graph: one broken Program for each rule."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import onward as ow
from onward.core.jaxprs.body import body_of

PROGRAM = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(jnp.sin(w) * x), jnp.ones(3), jnp.ones(3))
SIN = next(op for op in PROGRAM.ops if op.type == "sin")
VECTOR, SCALAR = jnp.ones(3), jnp.ones(())


def with_op(old, new):
    return replace(PROGRAM, ops=tuple(new if op is old else op for op in PROGRAM.ops))


def variable(name="new", shape=(3,)):
    return ow.Variable(name, shape, PROGRAM["w"].dtype)


BROKEN = {
    "two values": (replace(PROGRAM, ops=(*PROGRAM.ops, SIN)), "'sin' a value a second time"),
    "one name twice": (
        with_op(SIN, replace(SIN, outputs=(variable("w"), *SIN.outputs[1:]))),
        "the name 'w' a second time",
    ),
    "read too early": (replace(PROGRAM, ops=PROGRAM.ops[::-1]), "before anything gives it a value"),
    "a foreign input": (with_op(SIN, replace(SIN, inputs=(variable(),))), "reads 'new' before"),
    "an input of another type": (
        with_op(SIN, replace(SIN, body=body_of(lambda x: [x] * len(SIN.outputs), SCALAR))),
        "input 'w' of op .* is float32.3., its body has float32..",
    ),
    "too few outputs": (
        with_op(SIN, replace(SIN, body=body_of(lambda x: [], VECTOR))),
        "outputs, its body has 0",
    ),
    "a state of another type": (
        replace(PROGRAM, next_state={PROGRAM["w"]: PROGRAM["reduce_sum"]}),
        "what replaces 'w' .float32.3.. is 'reduce_sum'",
    ),
    "a state from nowhere": (
        replace(PROGRAM, next_state={PROGRAM["w"]: variable()}),
        "next_state reads 'new'",
    ),
    "no state": (replace(PROGRAM, next_state={PROGRAM["x"]: PROGRAM["w"]}), "'x', which is not state"),
    "a gradient of another type": (
        replace(PROGRAM, gradients=((PROGRAM["w"], PROGRAM["reduce_sum"]),)),
        "the gradient of 'w'",
    ),
    "an output from nowhere": (replace(PROGRAM, outputs=(variable(),)), "the outputs reads 'new'"),
    "an initializer of no state": (
        replace(
            PROGRAM,
            initializers=(ow.Op("ones", (), (variable(),), body_of(lambda: [jnp.ones(3)])),),
        ),
        "which are not state",
    ),
}


@pytest.mark.parametrize(("program", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_program_is_refused(program, message):
    with pytest.raises(ow.GraphError, match=message):
        ow.check(program)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("half"), r"float32\[3\], and half \(2 parts\) does not divide its dimension 0"),
        (P(None, "half"), "with 1 dimensions"),
        (P("model"), "split over 'model', and the mesh has the axes 'half'"),
    ],
)
def test_arrays_that_their_mesh_cannot_split_are_refused(spec, message):
    split = ow.partition(PROGRAM, {"half": 2}, {"w": None})
    how = replace(split.partition, specs={"w": spec})
    with pytest.raises(ow.ArgumentError, match=message):
        ow.check(replace(split, partition=how))


def test_a_whole_program_passes():
    assert ow.check(PROGRAM) is PROGRAM


def test_a_transform_ends_in_check():
    @ow.transform
    def careless(program):
        return replace(program, ops=program.ops[1:])

    with pytest.raises(ow.GraphError):
        careless(PROGRAM)


def test_a_transform_of_the_users_own_is_replayed_at_another_shape():
    calls = []

    @ow.transform
    def twice(program, factor=2.0):
        calls.append(program.inputs[0].shape)
        doubled = ow.Variable("doubled", (), program.loss.dtype)
        op = ow.Op("double", (program.loss,), (doubled,), body_of(lambda x: [x * factor], SCALAR))
        return replace(program, ops=(*program.ops, op), outputs=(*program.outputs, doubled))

    program = twice(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(()), jnp.ones(3)), factor=3.0)
    step = ow.compile(program)
    state = step.init(jnp.ones(()))
    assert [float(step(state, jnp.ones(n))[1]["doubled"]) for n in (3, 5)] == [9.0, 15.0]
    assert calls == [(3,), (5,)]
