"""What lies in memory, counted by hand for each rule, on networks small enough for that."""

import jax
import jax.numpy as jnp
import pytest

import onward as ow
from onward.core.liveness import lifetimes
from onward.core.steps import steps

N = 16
M = jnp.ones((N, N))
BYTES = 4 * N * N


def peak(program):
    lives = lifetimes(program)
    return lives.bytes[lives.peak]


def traced(function, *args):
    return ow.trace(function, *args)


def computed(function, *args):
    """The bytes at the peak beside those of what is given, in whole matrices."""
    program = traced(function, *args)
    given = sum(a.bytes for a in lifetimes(program).arrays if a.begin < 0)
    return (peak(program) - given) / BYTES


@pytest.mark.parametrize(
    ("function", "matrices"),
    [
        (lambda w: w @ w, 1),
        (lambda w: w @ w @ w @ w, 2),
        (lambda w: (w @ w) @ (w @ w + 1), 3),
        (lambda w: jnp.exp(w @ w), 1),  # over what is read for the last time
        (lambda w: jnp.exp(jnp.sort(w, 0)), 1),
        (lambda w: jnp.exp(jnp.sort(w, 0).T), 2),  # others are still read of what would be written over
        (lambda w: jnp.exp((x := jnp.sort(w, 0)) + x[:1]), 2),
        (lambda w: jnp.exp(jnp.sin(w * 2)) @ w, 2),  # a chain of arithmetic is one array
        (lambda w: (x := w @ w) @ x + jnp.exp(x), 2),
        (lambda w: (w @ w).reshape(N * N).reshape(N, N) @ w, 2),  # other views
        (lambda w: jax.lax.optimization_barrier(w @ w) @ w, 2),
        (lambda w: w @ (w + jnp.broadcast_to(w[0], (N, N))), 2),
        (lambda w: [w @ w, jnp.exp(w @ w)][0], 1),  # what nobody reads
    ],
)
def test_computed_by_hand(function, matrices):
    assert computed(function, M) == pytest.approx(matrices, abs=0.1)


@pytest.mark.parametrize("length", [2, 5, 9])
def test_a_chain_of_products_keeps_what_its_gradients_read(length):
    def loss(params, x):
        for w in params:
            x = x @ w
        return jnp.sum(x)

    program = ow.append_backward(ow.trace(loss, [M] * length, M))
    lives = lifetimes(program, [g for _, g in program.gradients])
    # What is given; what the gradients read of the forward pass, each product but the last, in whose place
    # gradients come one by one; the gradient that arrives and one that is being made; the loss.
    assert lives.bytes[lives.peak] == ((length + 1) + (length - 1) + 2) * BYTES + 4
    ends = [a for a in lives.arrays if a.end == len(lives.steps) and a.begin >= 0]
    assert sum(a.bytes for a in ends) == length * BYTES + 4  # the gradients and the loss


def test_the_next_state_lies_where_the_old_one_lay():
    program = ow.SGD(0.1).minimize(lambda w: jnp.sum(jnp.exp(w @ w)), M)
    lives = lifetimes(program)
    next_w = program.next_state[program["w"]]
    (array,) = [a for a in lives.arrays if next_w in a.variables]
    assert program["w"] in array.variables
    assert (array.begin, array.end, array.bytes) == (-1, len(lives.steps), BYTES)


def test_state_that_is_read_later_is_not_written_over():
    program = ow.SGD(0.1).minimize(lambda w: jnp.sum(w @ w), M)
    (w,) = (v for v in program.state if v.name == "w")
    late = ow.trace(lambda w: jnp.sum(w @ w), M)
    assert peak(program) >= peak(late)
    arrays = [a for a in lifetimes(program).arrays if w in a.variables]
    assert len(arrays) == 1


def test_a_loop_takes_what_its_turn_takes():
    def looped(w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w @ w), None), w, None, length=3)[0]

    lives = lifetimes(traced(looped, M))
    (inside,) = [taken for step, taken in zip(lives.steps, lives.within, strict=True) if step.kind == "scan"]
    assert inside == 2 * BYTES


def test_of_two_branches_the_larger_counts():
    def chosen(w, p):
        return jax.lax.cond(p, lambda x: x @ x @ x, lambda x: x + 1, w)

    lives = lifetimes(traced(chosen, M, jnp.array(True)))
    assert max(lives.within) == 2 * BYTES


def test_equations_of_an_op_are_steps_of_its_number():
    program = ow.append_backward(ow.trace(lambda w: jnp.sum(jax.nn.gelu(w @ w)), M))
    found = steps(program)
    assert [s.op for s in found] == sorted(s.op for s in found)
    assert {s.op for s in found} == set(range(len(program.ops)))
    made = [v for s in found for v in s.outputs]
    assert len(made) == len(set(made))
    given = {*program.inputs, *program.state, *program.constants}
    for step in found:
        unknown = [v for v in step.inputs if v not in given and v.ndim]
        assert not unknown
        given.update(step.outputs)
    assert {v for op in program.ops for v in op.outputs} <= given


def test_a_program_without_ops_holds_what_it_is_given():
    lives = lifetimes(ow.trace(lambda w: w, M))
    assert lives.steps == ()
    assert sum(a.bytes for a in lives.arrays) == BYTES


def test_what_walk_calls_alive_is_alive_here():
    """Every array of this walk is a Variable that the plain walk holds to be alive as well."""
    program = ow.append_backward(ow.trace(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), M, M))
    alive = ow.graph.liveness(program)
    lives = lifetimes(program)
    known = set(program.variables.values())
    for array in lives.arrays:
        first = array.variables[0]
        if array.begin >= 0 and first in known:
            assert first in alive[lives.steps[array.begin].op]
