"""What the tests of rules share: steps whose gradients are given, run beside an account of them in NumPy.

A reference of a rule takes and returns dicts over parameters, and keeps what it needs in the dict ``s``:
``rule(w, g, s, t) -> g`` before the optimizer, ``rule(w, new, g, s, t, rates) -> new`` after it, t from 1.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from tests.compiled import together, training
from tests.derive.optimizers import papers

import onward as ow
from onward.derive.rule import GradientRule

SHAPES = {"scalar": (), "vector": (5,), "matrix": (3, 4), "kernel": (2, 2, 3, 2)}
RTOL = {"float32": 1e-5, "float64": 1e-12}
OPTIMIZERS = {
    "adam": (ow.Adam(0.02, 0.9, 0.99, 1e-6), papers.adam),
    "momentum": (ow.Momentum(0.05, 0.8), papers.momentum),
    "sgd": (ow.SGD(0.1), papers.sgd),
}


def given(dtype, steps=100, turn=0):
    """Parameters for three optimizers, and gradients for so many steps, some of them long.

    Which shape comes to which optimizer changes with the turn; in three turns each comes to each.
    """
    random = np.random.default_rng(0)

    def normal(shape):
        value = np.asarray(random.normal(size=shape))
        return value + 1j * random.normal(size=shape) if np.issubdtype(dtype, np.complexfloating) else value

    optimizers = list(OPTIMIZERS)
    sizes = {f"{optimizers[(i + turn) % 3]}/{shape}": SHAPES[shape] for i, shape in enumerate(SHAPES)}
    w = {name: normal(size).astype(dtype) for name, size in sizes.items()}
    g = {name: (normal((steps, *size)) * 2).astype(dtype) for name, size in sizes.items()}
    for name in sizes:
        g[name][::3] *= 0.05
    return w, g


def dot(params, gradients):
    """The loss whose gradients are these."""
    pairs = ((p, gradients[k]) for k, p in params.items())
    return sum(jnp.sum(jnp.real(jnp.conj(g) * p)) for p, g in pairs)


def around(rules):
    """One optimizer with the rules around three."""
    (adam, _), (momentum, _), (sgd, _) = OPTIMIZERS.values()
    groups = [
        ow.Group("adam/*", with_rules(adam, rules)),
        ow.Group("momentum/*", with_rules(momentum, rules)),
    ]
    return ow.SGD(sgd.learning_rate, rules=rules, groups=groups)


def with_rules(optimizer, rules):
    return type(optimizer)(**optimizer.hyperparameters, rules=rules)


def case(optimizer, params, data, loss=dot, keep=None):
    """For ``together``: what is kept (the parameters, and slots whose name is asked for) after each step."""
    program = optimizer.minimize(loss, params, jax.tree.map(lambda x: x[0], data))
    kept = [v.name for v in program.state if keep and v.name.endswith(keep)]
    whole, *arguments = training(program, params, data, after=[*params, *kept])
    return lambda *arguments: whole(*arguments)[1], *arguments


def run(*args, **options):
    """The same, alone."""
    return together({"": case(*args, **options)})[""]


def by_hand(rules, references, params, gradients):
    """The same in float64, and what the references remember."""
    wide = np.result_type(next(iter(params.values())).dtype, np.float64)
    w = {k: v.astype(wide) for k, v in params.items()}
    kept, memory, path = {k: {} for k in w}, [{} for _ in rules], []
    rates = {k: OPTIMIZERS[k.partition("/")[0]][0].learning_rate for k in w}
    for t in range(1, 1 + len(next(iter(gradients.values())))):
        g = {k: v[t - 1].astype(wide) for k, v in gradients.items()}
        for rule, reference, s in zip(rules, references, memory, strict=True):
            if isinstance(rule, GradientRule):
                g = reference(w, g, s, t)
        new = {k: updated(k, w[k], g[k], kept[k], t) for k in w}
        for rule, reference, s in zip(rules, references, memory, strict=True):
            if not isinstance(rule, GradientRule):
                new = reference(w, new, g, s, t, rates)
        w = new
        shown = {f"{k}/{name}": v for s in memory for name, tree in s.items() for k, v in tree.items()}
        path.append({**w, **shown})
    return {k: np.stack([found[k] for found in path]) for k in path[0]}


def updated(name, w, g, s, t):
    """One parameter after its optimizer, by the paper."""
    optimizer, paper = OPTIMIZERS[name.partition("/")[0]]
    return paper(w, g, s, t, SimpleNamespace(**optimizer.hyperparameters))


def assert_close(actual, expected, rtol):
    for name, value in expected.items():
        atol = rtol * max(1.0, np.abs(value).max(initial=0))
        np.testing.assert_allclose(actual[name], value, rtol=rtol, atol=atol, err_msg=name)


def all_around(cases, dtype):
    """A hundred steps of three optimizers with rules around them, by name: (rules, what is kept, turn)."""
    with jax.enable_x64(dtype in ("float64", "complex128")):
        return together(
            {
                name: case(around(rules), *given(dtype, turn=turn), keep=keep)
                for name, (rules, keep, turn) in cases.items()
            }
        )


def compare(actual, rules, references, dtype, turn=0):
    """Those steps beside the references."""
    params, gradients = given(dtype, turn=turn)
    assert {actual[k].dtype for k in params} == {np.dtype(dtype)}
    expected = by_hand(rules, references, params, gradients)
    assert_close(actual, expected, RTOL["float32" if dtype in ("float32", "complex64") else "float64"])
