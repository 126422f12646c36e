"""A Program in pieces computes what it computes as a whole, and what repeats is compiled once."""

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow
from onward.core.lower import lower
from onward.execute.pieces import PiecewiseRun
from onward.execute.step import Step

TABLE = np.arange(6, dtype="float32").reshape(3, 2)


def loss(params, x, key):
    y = x
    for i, w in enumerate(params):
        y = jnp.tanh(y @ w) + x
        if i == 7:
            y = y + TABLE[0] * jax.random.uniform(jax.random.fold_in(key, i), y.shape)
    return jnp.mean(y**2), y


def test_values_are_those_of_the_whole_and_programs_share_what_is_compiled():
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(2, 2)).astype("float32") for _ in range(20)]
    data = rng.normal(size=(4, 2)).astype("float32"), jax.random.key(1)
    compiled, counts = {}, []
    for optimizer in (ow.Adam(0.1), ow.SGD(0.1)):
        program = optimizer.minimize(loss, params, *data, has_aux=True)
        state = Step(program, (), True, ahead=False).init(params)
        given = {v: state[v.name] for v in program.state} | dict(zip(program.inputs, data, strict=True))
        run = PiecewiseRun(program, compiled)
        pieces = run(given | dict(program.constants), lambda v: v.is_float)
        found = {v: value for values in pieces for v, value in values.items()}
        assert [*found] == [v for op in program.ops for v in op.outputs if v.is_float]
        assert [op for piece in run.pieces for op in piece.ops] == [*program.ops]
        counts.append((len(compiled), len(run.pieces)))
    (first, of), (both, of_second) = counts
    assert first < 0.7 * of
    assert both - first < of_second / 4
    values = [[given[v] for v in group] for group in (program.state, program.inputs)]
    expected = jax.jit(lower(program, [*found], at_once=True))(*values)
    for v, x in zip(found, expected, strict=True):
        np.testing.assert_allclose(found[v], x, rtol=1e-5, atol=1e-6, err_msg=v.name)
