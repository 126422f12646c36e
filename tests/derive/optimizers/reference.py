"""What the tests of all optimizers share: a random tree, a rule run over given gradients, losses to descend.

A reference is a function ``rule(w, g, s, t, h)`` in NumPy, of one parameter: it returns the next w, keeps
what it needs in the dict ``s`` and counts t from 1. It reads the hyperparameters from ``h``, as float64
numbers with the values of their float32 Variables.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from onward.derive.rule import at_step

SHAPES = {"scalar": (), "vector": (5,), "matrix": (3, 4), "kernel": (2, 2, 3, 2)}


def given(dtype, steps=100, shapes=SHAPES):
    """Random parameters, and gradients for that many steps; now and then a gradient has a row of zeros."""
    random = np.random.default_rng(0)
    parameters, gradients = {}, {}
    for name, shape in shapes.items():
        parameters[name] = _normal(random, shape, dtype)
        gradients[name] = _normal(random, (steps, *shape), dtype) * 10.0 ** random.uniform(-2, 1)
        if shape:
            gradients[name][2::3, 0] = 0
    return _all_as(dtype, parameters), _all_as(dtype, gradients)


def at(optimizer, step, dtype, **changed):
    """The optimizer as it is in an update op: hyperparameters of that dtype, and the step."""
    real = np.zeros((), dtype).real.dtype
    values = {**optimizer.hyperparameters, **changed}
    return at_step(optimizer, {k: jnp.float32(v).astype(real) for k, v in values.items()} | {"step": step})


def run(optimizer, parameters, gradients, **changed):
    """The parameters after each of these gradients, as one loop."""

    def advance(carry, found):
        step, gradients = found
        new = {}
        for name, (w, slots) in carry.items():
            now = at(optimizer, step, w.dtype, **changed)
            new[name] = now.update(w, gradients[name], slots)
        return new, {name: w for name, (w, _) in new.items()}

    begin = {name: (w, dict(optimizer.init(w))) for name, w in parameters.items()}
    steps = jnp.arange(len(next(iter(gradients.values()))), dtype=jnp.int32)
    return jax.lax.scan(advance, begin, (steps, gradients))[1]


def by_the_paper(rule, optimizer, parameters, gradients, **changed):
    """What ``run`` should return, in float64 or complex128."""
    h = _float64(optimizer, **changed)
    return {name: _trajectory(rule, h, w, gradients[name]) for name, w in parameters.items()}


def assert_as_in_the_paper(actual, expected, rtol):
    for name, value in expected.items():
        atol = rtol * max(1.0, np.abs(value).max(initial=0))
        np.testing.assert_allclose(actual[name], value, rtol=rtol, atol=atol, err_msg=name)


def descended(optimizer, loss, w, steps):
    """The loss at the point to evaluate at after that many steps, as a fraction of the loss at the start."""

    def advance(carry, step):
        w, slots = carry
        return at(optimizer, step, w.dtype).update(w, jax.grad(loss)(w), slots), None

    begin = w, dict(optimizer.init(w))
    (end, slots), _ = jax.lax.scan(advance, begin, jnp.arange(steps, dtype=jnp.int32))
    return loss(at(optimizer, steps, w.dtype).evaluated(end, slots)) / loss(w)


def parabola(w):
    return jnp.sum(jnp.linspace(1, 10, w.size) * w**2)


def rosenbrock(w):
    return (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2


def _normal(random, shape, dtype):
    value = np.asarray(random.normal(size=shape))
    return value + 1j * random.normal(size=shape) if np.issubdtype(dtype, np.complexfloating) else value


def _all_as(dtype, tree):
    return {name: np.asarray(value, dtype) for name, value in tree.items()}


def _float64(optimizer, **changed):
    values = {**optimizer.hyperparameters, **changed}
    return SimpleNamespace(**{name: np.float64(np.float32(v)) for name, v in values.items()})


def _trajectory(rule, h, w, gradients):
    wide = np.result_type(w.dtype, np.float64)
    w, s, seen = w.astype(wide), {}, []
    for t, g in enumerate(gradients.astype(wide), 1):
        w = rule(w, g, s, t, h)
        seen.append(w)
    return np.stack(seen)
