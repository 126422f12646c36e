"""Ops that run again for the backward pass: any op may be marked so."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow

W = jnp.linspace(0.1, 1.0, 12).reshape(4, 3)
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ jnp.exp(w).T.reshape(4, 3)) ** 2)


def marked(program, kind):
    return replace(program, ops=tuple(replace(op, again=op.type == kind) for op in program.ops))


def test_what_is_marked_runs_again_with_the_ops_behind_it_that_read_nothing_else():
    plain = ow.trace(loss, W, X)
    program = ow.append_backward(marked(plain, "exp"))
    made = [op for op in program.ops if op.made_by is ow.Pass.BACKWARD]
    again = [op.type for op in made if any(v.name.startswith("again(") for v in op.outputs)]
    assert again == ["exp"], "the gradient of w reads exp(w); that of x is not asked for"
    program, (of_x,) = ow.gradients(marked(plain, "exp"), "loss", "x")
    again = [op for op in program.ops if op.made_by is ow.Pass.BACKWARD and not op.type.endswith("_grad")]
    assert [op.type for op in again] == ["ones", "exp", "transpose", "reshape"]
    step = ow.compile(program, fetch=[of_x], tune=False)
    _, out = step(step.init(W), X)
    np.testing.assert_allclose(out[of_x], jax.grad(loss, 1)(W, X), rtol=1e-6)


@jax.custom_vjp
def printed(y):
    jax.debug.print("{}", y)
    return 2 * y


printed.defvjp(lambda y: (printed(y), None), lambda _, g: (2 * g,))


def test_what_has_an_effect_does_not_run_again():
    plain = ow.trace(lambda w, x: jnp.sum(x @ printed(jnp.exp(w))), W, X)
    program, _ = ow.gradients(marked(plain, "exp"), "loss", ["w", "x"])
    assert sum(op.body.has_effects for op in program.ops) == 1
    assert "again(exp)" in program.variables
