"""What the tests of several optimizers share: a random tree, its gradients, and ways to run a rule on it."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tests.compiled import together

import onward as ow
from onward.derive.rule import at_step

STEPS = 100
SHAPES = ((), (3,), (4, 3), (2, 2, 3, 2))
PRECISIONS = {"float32": 1e-5, "float64": 1e-12}


def tree(seed=0):
    """A scalar, a vector, a matrix and a convolution kernel, none of them near zero."""
    random = np.random.default_rng(seed)
    return [random.choice([-1.0, 1.0], shape) * random.uniform(0.5, 1.5, shape) for shape in SHAPES]


def gradients(steps=STEPS, seed=1):
    """Random gradients of that tree, with a direction in common, and the first row of the matrix at rest."""
    random = np.random.default_rng(seed)
    made = [random.normal(0.3, 1.0, (steps, *shape)) for shape in SHAPES]
    made[2][:, 0] = 0
    return made


def float32s(*numbers):
    """Hyperparameters as they are kept."""
    return tuple(float(np.float32(n)) for n in numbers)


def at(optimizer, step, dtype, changed):
    """The optimizer as it is in an update op: numbers of the real dtype of the parameters, the step."""

    def value(name, number):
        number = changed.get(name, number)
        return jnp.asarray(number(step) if callable(number) else number, jnp.float32).astype(dtype)

    values = {name: value(name, number) for name, number in optimizer.hyperparameters.items()}
    return at_step(optimizer, values | {"step": step})


def update(optimizer, parameters, found, slots):
    """One step of all parameters, together or one by one."""
    if optimizer.type is ow.UpdateType.ACROSS:
        return optimizer.update(tuple(parameters), tuple(found), tuple(slots))
    pairs = [optimizer.update(p, g, s) for p, g, s in zip(parameters, found, slots, strict=True)]
    return tuple(p for p, _ in pairs), tuple(s for _, s in pairs)


def run(optimizer, parameters, found):
    """``trajectory``, compiled."""
    return together({"": (partial(trajectory, optimizer), tuple(parameters), tuple(found))})[""]


def trajectory(optimizer, parameters, found, changed=None):
    """The parameters, and the weights to evaluate, after each step of given gradients; one scan.

    Args:
        optimizer: the rule.
        parameters: arrays of any dtype.
        found: for each parameter its gradients, one for each step.
        changed: hyperparameters in place of the optimizer's own.
    """
    dtype = jnp.result_type(*(jnp.abs(p).dtype for p in parameters))

    def step(carry, given):
        now, gs = given
        here = at(optimizer, now, dtype, changed or {})
        new, slots = update(here, *carry[:1], gs, carry[1])
        slots = [
            {k: jnp.asarray(s[k]).astype(v.dtype) for k, v in old.items()}
            for s, old in zip(slots, carry[1], strict=True)
        ]
        if type(optimizer).evaluated is ow.Optimizer.evaluated:
            return (new, slots), (new, ())
        best = tuple(here.evaluated(p, s) for p, s in zip(new, slots, strict=True))
        return (new, slots), (new, best)

    start = (tuple(parameters), [dict(optimizer.init(p)) for p in parameters])
    steps = jnp.arange(len(found[0]), dtype=jnp.int32)
    moved, best = jax.lax.scan(step, start, (steps, tuple(found)))[1]
    return moved, best or moved


def trajectory_of_peer(peer, parameters, found):
    """The parameters after each step of an optax rule, and its last state."""

    def step(carry, gs):
        w, slots = carry
        change, slots = peer.update(gs, slots, w)
        w = optax.apply_updates(w, change)
        return (w, slots), w

    (_, slots), path = jax.lax.scan(step, (parameters, peer.init(parameters)), found)
    return path, slots


def compare_with_peer(optimizer, peer, steps=10, rtol=2e-5, first=0):
    """Compare the first steps with an optax rule, for the parameters from this one on.

    Returns our weights to evaluate, the parameters and the last state of the peer.
    """
    parameters, found = (rounded(arrays[first:], "float32") for arrays in (tree(), gradients()))
    found = [g[:steps] for g in found]
    ours, theirs = partial(trajectory, optimizer), partial(trajectory_of_peer, peer)
    both = together({"ours": (ours, parameters, found), "theirs": (theirs, parameters, found)})
    (moved, best), (path, slots) = both.values()
    for mine, theirs in zip(moved, path, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=rtol)
    return best, path, slots


def hundred_steps(optimizers):
    """A function of the precision, that runs all of these, by name, together, and remembers what they did."""

    @cache
    def of_all(precision):
        with jax.enable_x64(precision == "float64"):
            given = [rounded(arrays, precision) for arrays in (tree(), gradients())]
            return together({name: (partial(trajectory, o), *given) for name, o in optimizers.items()})

    return of_all


def check(found, expected, precision, evaluated=None):
    """Compare a hundred steps of a rule with those of a reference in float64.

    Relative to the number, and to the largest of its parameter at the same step, that at least 1.
    """
    moved, best = found
    for paths, theirs in ((moved, expected), (best, evaluated or expected)):
        for mine, wanted in zip(paths, map(np.stack, theirs), strict=True):
            assert mine.dtype == precision
            largest = np.abs(wanted).max(axis=tuple(range(1, wanted.ndim)), keepdims=True)
            error = np.abs(np.float64(mine) - wanted) / (np.abs(wanted) + np.maximum(largest, 1))
            assert error.max() < PRECISIONS[precision], f"{error.max():.1e}"


def given(precision):
    """Parameters and gradients as the reference gets them: rounded as the rule's are, then in float64."""
    parameters, found = (
        [np.asarray(a, np.float64) for a in rounded(arrays, precision)] for arrays in (tree(), gradients())
    )
    return parameters, found


def rounded(arrays, precision):
    return [np.asarray(a, precision) for a in arrays]


def one_by_one(rule, precision):
    """The trajectory of every parameter by itself under ``rule(w, g, slots, t) -> w``."""
    parameters, found = given(precision)
    return [follow(rule, w, g) for w, g in zip(parameters, found, strict=True)]


def follow(rule, w, gs):
    """The trajectory of one parameter."""
    slots, path = {}, []
    for t, g in enumerate(gs, 1):
        w = rule(w, g, slots, t)
        path.append(w)
    return path


def descended(optimizer, loss, start, steps):
    """The losses at the start, and of the weights to evaluate after so many steps along the gradient."""

    def step(carry, now):
        (w,), slots = carry
        here = at(optimizer, now, jnp.abs(w).dtype, {})
        uphill = jnp.conj(jax.grad(loss)(w))
        new, slots = update(here, (w,), (uphill,), slots)
        return (new, tuple(dict(s) for s in slots)), None

    carry = ((start,), (dict(optimizer.init(start)),))
    ((w,), (slots,)), _ = jax.lax.scan(step, carry, jnp.arange(steps, dtype=jnp.int32))
    end = at(optimizer, steps - 1, jnp.abs(start).dtype, {})
    return loss(start), loss(end.evaluated(w, slots))
