"""What devices compute together of sums and statistics over the batch, against one device."""

import re
import warnings
from functools import cache

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.compiled import together

import onward as ow
from onward.execute.step import Step

ROWS, DEVICES = 8, 4
RNG = np.random.default_rng(0)
X = (RNG.normal(size=(ROWS, 3)) * np.arange(1, ROWS + 1)[:, None]).astype("float32")
Y = RNG.integers(0, 3, ROWS).astype("int32")
MASK = np.array([1, 0, 1, 1, 1, 0, 0, 1], "float32")
W = RNG.normal(size=(3, 3)).astype("float32")


def errors(w, x):
    return ((x @ w) ** 2).mean(1)


def standardized(w, x):
    h = x @ w
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)


def whitened(w, x):
    h = x @ w
    h = h - h.mean(0)
    return h @ jnp.linalg.inv(h.T @ h / (len(h) - 1) + jnp.eye(3))


def twins(w, x):
    """Two views in one batch, taken apart again."""
    first, second = jnp.split(jnp.tanh(jnp.concatenate([x, 2 * x]) @ w), 2)
    return ((first - second) ** 2).sum(1)


def along_time(w, x):
    """A loop over an axis that is none of the batch."""
    steps = jnp.moveaxis(jnp.broadcast_to(x[:, None], (len(x), 2, 3)), 1, 0)
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros_like(x), steps)[0].sum(1)


def added_up_along_time(each):
    """A loop over an axis that is none of the batch, which adds up what the examples give."""

    def loss(w, x, y, m):
        steps = jnp.stack([x, 2 * x, jnp.sin(x)])
        return jax.lax.scan(lambda total, x: (total + each(errors(w, x)), None), 0.0, steps)[0]

    return loss


@jax.custom_vjp
def squared(h):
    return jnp.sum(h**2)


squared.defvjp(lambda h: (squared(h), h), lambda h, g: (2 * h * g,))


LOSSES = {
    "a sum": lambda w, x, y, m: errors(w, x).sum(),
    "a sum and a penalty": lambda w, x, y, m: errors(w, x).sum() + (w**2).sum(),
    "a sum and a mean": lambda w, x, y, m: errors(w, x).sum() + errors(2 * w, x).mean(),
    "a mean and a penalty": lambda w, x, y, m: errors(w, x).mean() + (w**2).sum(),
    "a mean of a hand": lambda w, x, y, m: (errors(w, x) / x.shape[0]).sum(),
    "a mean in its own way": lambda w, x, y, m: jnp.ones(len(x)) @ errors(w, x) * (1 / len(x)),
    "a root of a mean": lambda w, x, y, m: jnp.sqrt(errors(w, x).mean()),
    "a norm": lambda w, x, y, m: jnp.linalg.norm(x @ w),
    "a log of a sum": lambda w, x, y, m: jnp.log(errors(w, x).sum()),
    "by mask": lambda w, x, y, m: (m * errors(w, x)).sum() / m.sum(),
    "by count": lambda w, x, y, m: (m * errors(w, x)).sum() / jnp.maximum((m > 0).sum(), 1),
    "where": lambda w, x, y, m: jnp.mean(errors(w, x), where=m > 0),
    "filled in by a mean": lambda w, x, y, m: jnp.where(m[:, None] > 0, x @ w, (x @ w).mean() ** 3).mean(),
    "by equal shares": lambda w, x, y, m: (jnp.full(len(x), 1 / len(x)) * errors(w, x)).sum(),
    "unbiased": lambda w, x, y, m: (x @ w).var(0, ddof=1).sum(),
    "standardized": lambda w, x, y, m: (standardized(w, x) ** 3).mean(),
    "standardized, summed": lambda w, x, y, m: (standardized(w, x) ** 3).sum(),
    "by second moments": lambda w, x, y, m: (x @ w / jnp.sqrt(((x @ w) ** 2).mean(0) + 1)).mean(),
    "by sums": lambda w, x, y, m: (x @ w / (1 + jnp.abs(x @ w).sum(0))).sum() ** 2,
    "whitened": lambda w, x, y, m: (whitened(w, x) ** 2).mean(),
    "largest": lambda w, x, y, m: errors(w, x).max() - 2 * errors(w, x).min(),
    "by the largest": lambda w, x, y, m: (x @ w / jnp.abs(x @ w).max(0)).sum(),
    "softmax over examples": lambda w, x, y, m: (jax.nn.softmax(x @ w / 9, 0) * x).sum(),
    "logsumexp": lambda w, x, y, m: jax.nn.logsumexp(x @ w),
    "product of means": lambda w, x, y, m: errors(w, x).mean() * (x @ w).sum(),
    "correlation": lambda w, x, y, m: jnp.corrcoef((x @ w)[:, 0], m)[0, 1],
    "labels": lambda w, x, y, m: -jnp.log(jax.nn.softmax(x @ w)[jnp.arange(len(y)), y]).mean(),
    "one hot": lambda w, x, y, m: -(jax.nn.one_hot(y, 3) * jax.nn.log_softmax(x @ w)).sum(),
    "twins": lambda w, x, y, m: twins(w, x).mean(),
    "laid flat": lambda w, x, y, m: jnp.sum(jnp.sin(x @ w).reshape(-1)) / x.size,
    "along time": lambda w, x, y, m: along_time(w, x).sum(),
    "sums along time": added_up_along_time(jnp.sum),
    "means along time": added_up_along_time(jnp.mean),
    "a sum that is computed again": lambda w, x, y, m: jax.checkpoint(lambda w: errors(w, x).sum())(w),
    "a sum with a rule": lambda w, x, y, m: squared(x @ w),
    "a sum in a branch": lambda w, x, y, m: jax.lax.cond(
        w[0, 0] > 0, lambda: errors(w, x).sum(), lambda: 2 * errors(w, x).sum()
    ),
    "in a branch that a mean decides": lambda w, x, y, m: jax.lax.cond(
        errors(w, x).mean() > errors(w, x[:, ::-1]).mean(),
        lambda: errors(w, x).sum(),
        lambda: errors(3 * w, x).sum(),
    ),
    "one after the other, by map": lambda w, x, y, m: jax.lax.map(lambda x: jnp.sum(x @ w) ** 2, x).sum(),
    "segments": lambda w, x, y, m: (jax.ops.segment_sum(errors(w, x), y, 3) ** 2).sum(),
    "for each by vmap": lambda w, x, y, m: jax.vmap(lambda x, m: m * jnp.sum(x @ w) ** 2)(x, m).sum(),
    "mean by vmap": lambda w, x, y, m: jax.vmap(
        lambda x: jnp.sum((x @ w - jax.lax.pmean(x @ w, "b")) ** 2), axis_name="b"
    )(x).mean(),
}
MEANS = {"a mean and a penalty", "a mean of a hand", "a mean in its own way", "labels", "twins", "laid flat"}


def of(loss, **options):
    return ow.SGD(0.1).minimize(loss, W, X, Y, MASK, **options)


@cache
def references():
    """Loss and gradient of every case by jax.grad, of the whole batch."""
    return together({name: (jax.value_and_grad(loss), W, X, Y, MASK) for name, loss in LOSSES.items()})


def stepped(programs, *data, params=W):
    """The loss and the gradient of each of these Programs by its step, all compiled as one."""
    cases = {}
    for name, program in programs.items():
        step = Step(program, (), donate=False, ahead=False)
        cases[name] = (step, step.init(params), *data)
    found = together(
        {name: (lambda *args, run=run: told(*run(*args)), *args) for name, (run, *args) in cases.items()}
    )
    return {name: (loss, (params - after) / 0.1) for name, (loss, after) in found.items()}


def told(state, out):
    return out.loss, state.parameters


@pytest.fixture(scope="module")
def trained():
    """Loss and gradient of every case on many devices, and the Programs."""
    spread = {name: ow.replicate(of(loss), DEVICES) for name, loss in LOSSES.items()}
    return spread, stepped(spread, X, Y, MASK)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_whole_batch(trained, name):
    loss, gradient = references()[name]
    np.testing.assert_allclose(trained[1][name][0], loss, 2e-5)
    np.testing.assert_allclose(trained[1][name][1], gradient, 2e-4, 2e-4 * np.abs(gradient).max())


def test_a_mean_stays_as_it_is(trained):
    """No op and no collective but those that merge the loss and the gradient."""
    for name in MEANS:
        added = [op.type for op in trained[0][name].ops if op.made_by == "collective" or op.type == "scale"]
        assert added == ["all_mean", "all_mean"], name


def test_other_results_and_what_is_carried(trained):
    """Sums that are returned beside the loss, and those that a model counts in floats and in integers."""

    def loss(w, state, x, y, m):
        found = {
            "top": errors(w, x).max(),
            "least": (y + 3).astype("uint8").min(),
            "any": jnp.any(y > 1),
            "all": jnp.all(x < 0),
            "above": errors(w, x).mean() > 1,
            "sum": errors(w, x).sum(),
            "root": jnp.sqrt(errors(w, x).mean()),
            "hits": (y > 0).sum(),
        }
        following = {
            "seen": state["seen"] + m.sum(),
            "most": state["most"] + (m > 0).sum(),
            "one": state["one"] + 1,
        }
        return errors(w, x).mean(), (following, found)

    state = {"seen": np.float32(2), "most": np.int32(3), "one": np.int32(0)}
    program = ow.SGD(0.1).minimize(loss, W, X, Y, MASK, state=state, has_aux=True)
    step = ow.compile(ow.replicate(program, DEVICES))
    after, out = step(step.init(W, state), X, Y, MASK)
    expected, (following, found) = jax.jit(loss)(W, state, X, Y, MASK)
    np.testing.assert_allclose(out.loss, expected, 1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), out.aux, found)
    for name, value in following.items():
        np.testing.assert_allclose(after[f"state/{name}"], value, 1e-6)


def test_every_device_by_its_own_statistics():
    """``sync_batch_norm=False``: only what does not come back to the examples is that of the whole batch."""

    def loss(w, x, y, m):
        return jnp.sqrt((standardized(w, x) ** 3).mean() ** 2 + 1) * m.mean()

    step = ow.compile(ow.replicate(of(loss), DEVICES, sync_batch_norm=False))
    _, out = step(step.init(W), X, Y, MASK)
    each = jax.jit(jax.vmap(lambda x: (standardized(W, x) ** 3).mean()))(X.reshape(DEVICES, -1, 3))
    parts = np.mean(each)
    np.testing.assert_allclose(out.loss, np.sqrt(parts**2 + 1) * MASK.mean(), 1e-5)


def test_a_merge_by_sum_takes_sums_as_they_are():
    step = ow.compile(ow.replicate(of(LOSSES["a sum"]), DEVICES, ow.Sum()))
    state, out = step(step.init(W), X, Y, MASK)
    loss, gradient = references()["a sum"]
    np.testing.assert_allclose(out.loss, loss, 1e-5)
    np.testing.assert_allclose((W - np.asarray(state.parameters)) / 0.1, gradient, 1e-4, 1e-4)


# ---------------------------------------------------------------- what no merging makes right


def contrastive(w, x):
    similar = (x @ w) @ (x @ w).T
    return -jnp.diag(jax.nn.log_softmax(similar)).mean()


def pairwise(w, x):
    score = (x @ w).sum(1)
    return jax.nn.relu(1 - (score[:, None] - score[None])).mean()


def normalized_twice(w, x):
    """A loop over layers, each of which normalizes by the batch."""

    def layer(h, w):
        h = h @ w
        return h - h.mean(0), None

    return (jax.lax.scan(layer, x, jnp.stack([w, w]))[0] ** 3).mean()


def with_rule(forward, backward):
    """A function whose gradient for its first argument is made so, of the gradient and what it read."""

    @jax.custom_vjp
    def ruled(*read):
        return forward(*read)

    ruled.defvjp(lambda *read: (forward(*read), read), lambda read, g: backward(g, *read))
    return ruled


def with_tangent(rule):
    @jax.custom_jvp
    def ruled(z):
        return z

    ruled.defjvp(lambda read, tangents: (read[0], rule(*read, *tangents)))
    return ruled


def product_by(rows, weights):
    """A product with a derivative rule of its own, and a number that its gradients are divided by."""
    return with_rule(jnp.matmul, lambda g, x, w: (g @ w.T / rows(g), x.T @ g / weights(g)))


def entropy_by(divisor):
    """A cross-entropy, averaged, with a derivative rule of its own."""

    def forward(z, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1).mean()

    def backward(g, z, y):
        return g * (jax.nn.softmax(z) - jax.nn.one_hot(y, 3)) / divisor(y), None

    return with_rule(forward, backward)


def alone(x):
    return 1


def among(z, compared):
    """The mean of what each example, by itself, is compared to of all."""
    return jax.lax.map(lambda a: compared(a, z), z).mean()


def by_numbers_of_the_data(w, x):
    mean, deviation = x.mean(0), x.std(0)
    return jax.lax.map(lambda a: (((a - mean) / deviation) @ w).sum() ** 2, x).mean()


def in_a_loop(turn, h):
    """A loop of which it shows only when it runs how many turns it takes."""
    turns = jnp.int32(h.size) // h.size + 1
    return jax.lax.fori_loop(0, turns, lambda i, h: turn(h), jax.lax.stop_gradient(h))


def after_a_loop(w, x):
    h = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w + x), None), jnp.zeros(x.shape), None, 2)[0]
    return ((h[: len(x) // 2] - h[len(x) // 2 :]) ** 2).mean()


def of_two_results(w, x):
    """Rows and their mean, by a rule that forgets the mean and divides by a length."""
    rule = with_rule(lambda x, w: (x @ w, (x @ w).mean()), lambda g, x, w: (g[0] @ w.T, x.T @ g[0] / len(x)))
    rows, mean = rule(x, w)
    return (rows**2).mean() + mean


def of_a_mean_and_rows(w, x):
    rule = with_rule(lambda z: (z.mean(), 2 * z), lambda g, z: (g[0] * jnp.ones_like(z) / z.size + 2 * g[1],))
    mean, rows = rule(x @ w)
    return mean + (rows**2).mean()


CENTRED = with_rule(lambda z: z, lambda g, z: (g - g.mean(0),))


def by_an_end_that_is_read(w, x):
    i, after = jnp.arange(len(x)), jnp.arange(len(x)) + 1
    return (errors(w, x)[jnp.where(i < 0, after, i)] * jnp.take(x[:, 0], after, mode="clip")).mean()


TABLE = jnp.linspace(0, 1, 64)
SEES_OTHERS = {
    "contrastive, by map": (
        lambda w, x: among(x @ w, lambda a, z: jax.nn.logsumexp(z @ a) - a @ a),
        "reads more of the batch than one example",
    ),
    "all with all, in turns": (
        lambda w, x: jnp.tanh(jax.lax.map(lambda a: x @ w @ a, x @ w)).mean(),
        "reads more of the batch than one example",
    ),
    "neighbours, by map": (
        lambda w, x: among(x @ w, lambda a, z: jnp.sort(((z - a) ** 2).sum(1))[:2].sum()),
        "reads more of the batch than one example",
    ),
    "by number, by map": (
        lambda w, x: jax.lax.map(
            lambda i: (((x @ w)[i] - (x @ w)[(i + 1) % len(x)]) ** 2).sum(), jnp.arange(len(x))
        ).mean(),
        "counts the examples from 0 within",
    ),
    "contrastive, computed again": (
        lambda w, x: jax.checkpoint(lambda z: among(z, lambda a, z: jax.nn.logsumexp(z @ a)))(x @ w),
        "reads more of the batch than one example in a turn within",
    ),
    "a table of truths": (
        lambda w, x: jnp.where(np.arange(len(x)) < 4, errors(w, x), 0.0).mean(),
        "counts the examples",
    ),
    "numbered, in a product": (lambda w, x: jnp.arange(len(x)) * 1.0 @ errors(w, x), "counts the examples"),
    "first of them, asked for": (
        lambda w, x: jnp.where(jnp.arange(len(x)) < 2, errors(w, x), 0.0).mean(),
        "counts the examples",
    ),
    "numbered, in a sum": (
        lambda w, x: errors(w, x).mean() * jnp.arange(len(x)).sum(),
        "counts the examples",
    ),
    "added where they stand": (
        lambda w, x: (jnp.zeros(64).at[jnp.arange(len(x))].add(errors(w, x)) * np.arange(64.0)).sum(),
        "counts the examples",
    ),
    "laid into a table": (
        lambda w, x: (jnp.zeros(64).at[: len(x)].add(errors(w, x)) * np.arange(64.0)).sum(),
        "takes some of the examples",
    ),
    "targets of halves": (
        lambda w, x: (
            ((x @ w)[:, 0] - jnp.concatenate([jnp.ones(len(x) // 2), jnp.zeros(len(x) // 2)])) ** 2
        ).mean(),
        "takes some of the examples",
    ),
    "targets that are repeated": (
        lambda w, x: (((x @ w)[:, 0] - jnp.repeat(jnp.array([1.0, 0.0]), len(x) // 2)) ** 2).mean(),
        "takes some of the examples",
    ),
    "halves, after a loop": (after_a_loop, "takes some of the examples"),
    "sorted in a loop": (
        lambda w, x: (x @ w * in_a_loop(lambda h: jnp.sort(h, 0), x @ w)).mean(),
        "runs along the examples within",
    ),
    "a loop of as many turns": (
        lambda w, x: errors(w, x).mean() * jax.lax.fori_loop(0, len(x), lambda i, c: c + 1.0, 0.0),
        "as many turns as the batch is long",
    ),
    "by a function with a rule, computed again": (
        lambda w, x: jax.checkpoint(
            with_rule(lambda z: jnp.cumsum(z, 0), lambda g, z: (jnp.cumsum(g[::-1], 0)[::-1],))
        )(x @ w).mean(),
        "along the examples within",
    ),
    "a rule of another length": (
        lambda w, x: (
            with_rule(lambda z: z, lambda g, z: (g * 2.0 if len(g) == len(X) else g + 0.0,))(x @ w) ** 2
        ).mean(),
        "rule of its own, of other ops",
    ),
    "a rule of two results": (of_two_results, "rule of its own that reads a number"),
    "a rule of the loss": (
        lambda w, x: with_rule(lambda loss: loss, lambda g, loss: (g * loss,))(errors(w, x).mean()),
        "rule of its own that reads a statistic",
    ),
    "a rule that centres": (lambda w, x: (CENTRED(x @ w) ** 2).mean(), "rule of its own that reads a stat"),
    "a rule that centres, in a loop": (
        lambda w, x: (jax.lax.scan(lambda h, w: (CENTRED(jnp.tanh(h @ w)), None), x, w[None])[0] ** 2).mean(),
        "rule of its own that reads a statistic",
    ),
    "a rule of a statistic": (
        lambda w, x: (with_rule(lambda z: z, lambda g, z: (g * z.mean(0),))(x @ w) ** 2).mean(),
        "rule of its own that reads a statistic",
    ),
    "a rule that sums up": (
        lambda w, x: (with_rule(lambda z: z, lambda g, z: (jnp.cumsum(g, 0),))(x @ w) ** 2).mean(),
        "rule of its own, in which 'cumsum' runs along the examples",
    ),
    "tangents that are centred": (
        lambda w, x: (with_tangent(lambda z, t: t - t.mean(0))(x @ w) ** 2).mean(),
        "rule of its own that reads a statistic",
    ),
    "a mean over rows in a rule": (
        lambda w, x: (product_by(alone, len)(x, w) ** 2).mean(),
        "rule of its own that reads a number",
    ),
    "rows over a mean in a rule": (
        lambda w, x: (product_by(len, alone)(jnp.tanh(x @ w), w) ** 2).mean(),
        "rule of its own that reads a number",
    ),
    "a mean whose rule sums": (
        lambda w, x: entropy_by(alone)(x @ w, x.argmax(1)),
        "rule of its own that reads a number",
    ),
    "a number within": (
        lambda w, x: jax.checkpoint(lambda h: h - jnp.log(float(len(h))))(x @ w).mean(),
        "reads a number of examples within",
    ),
    "a number in a branch": (
        lambda w, x: jax.lax.cond(w.sum() > -9, lambda h: jnp.tanh(h) * len(h), lambda h: h, x @ w).mean(),
        "may let examples see each other",
    ),
    "a power": (lambda w, x: (x @ w).mean() + w[0, 0] ** len(x), "reads a number of examples"),
    "a place by a number": (lambda w, x: (x @ w).mean() + w[len(x) // 8, 0], "reads a number of examples"),
    "a window by a number": (
        lambda w, x: jax.lax.reduce_window(x @ w, 0.0, jax.lax.add, (1, len(x) // 2), (1, 1), "SAME").mean(),
        "reads a number of examples",
    ),
    "the one before": (lambda w, x: (errors(w, x)[jnp.arange(-1, len(x) - 1)] * x[:, 0]).mean(), "from 0"),
    "the next by map": (
        lambda w, x: jax.lax.map(lambda i: x[i + 1] @ w * x[i], jnp.arange(len(x))).mean(),
        "counts the examples from 0 within",
    ),
    "the next is added to": (
        lambda w, x: (jnp.zeros(len(x)).at[jnp.arange(len(x)) + 1].add(errors(w, x)) * x[:, 0]).mean(),
        "from 0",
    ),
    "some their own": (
        lambda w, x: (errors(w, x)[jnp.where(x[:, 0] > 0, jnp.arange(len(x)), 0)] * x[:, 1]).mean(),
        "counts the examples from 0",
    ),
    "in turn by number": (
        lambda w, x: (
            jnp.tile(errors(w, x), 2)[jnp.arange(2 * len(x)).reshape(2, -1).T.ravel()] * jnp.tile(x[:, 0], 2)
        ).mean(),
        "counts the examples from 0",
    ),
    "a product of twins": (
        lambda w, x: jnp.vdot(jnp.repeat(errors(w, x), 2), jnp.concatenate([x[:, 0], x[:, 1]])),
        "pairs examples that do not belong together",
    ),
    "sums of twins": (
        lambda w, x: jnp.tanh(
            jax.ops.segment_sum(jnp.repeat(errors(w, x), 2), jnp.tile(x.argmax(1), 2), 3)
        ).sum(),
        "pairs examples that do not belong together",
    ),
    "a table as long as the batch": (
        lambda w, x: (errors(w, x) * TABLE[: len(x)]).mean(),
        "the same for all",
    ),
    "padded to the batch": (
        lambda w, x: (errors(w, x) * jnp.pad(w[0, :1], (0, len(x) - 1))).mean(),
        "takes a number for each example",
    ),
    "looked up by number": (lambda w, x: (errors(w, x) * TABLE[jnp.arange(len(x))]).mean(), "from 0"),
    "numbers for all": (
        lambda w, x: (errors(w, x) * jax.random.uniform(jax.random.key(0), (64,))[: len(x)]).mean(),
        "takes a number for each example",
    ),
    "a share added up by a loop": (
        lambda w, x: (
            errors(w, x).mean() + w.sum() * jax.lax.scan(lambda c, _: (c + 1 / len(x), None), 0.0, x)[0]
        ),
        "reads a number of examples within",
    ),
    "a carry without a gradient": (
        lambda w, x: jax.lax.scan(lambda c, x: (jax.lax.stop_gradient(c) + (x @ w).sum(), None), 0.0, x)[0],
        "one after the other",
    ),
    "pairs by their number": (
        lambda w, x: jax.lax.scan(
            lambda c, t: (c + t[0] * t[1].sum(), None),
            0.0,
            (jnp.arange(len(x) // 2), errors(w, x).reshape(-1, 2)),
        )[0],
        "counts the examples from 0",
    ),
    "laid out by a branch": (
        lambda w, x: jnp.vdot(
            jax.lax.cond(w[0, 0] > 5, lambda e: jnp.tile(e, 2), lambda e: jnp.repeat(e, 2), errors(w, x)),
            jnp.tile(x[:, 0], 2),
        ),
        "may let examples see each other",
    ),
    "laid out by turns": (
        lambda w, x: jnp.vdot(
            jax.lax.fori_loop(0, 3, lambda _, e: e.reshape(2, -1).T.ravel(), jnp.tile(errors(w, x), 2)),
            jnp.tile(x[:, 0], 2),
        ),
        "may let examples see each other",
    ),
    "an end that is read as well": (by_an_end_that_is_read, "counts the examples from 0"),
    "dilated by a number": (
        lambda w, x: jax.lax.conv_general_dilated(
            x[:, None].repeat(4, 2), w[None, :1], (1,), "SAME", rhs_dilation=(len(x) // 2,)
        ).mean(),
        "reads a number of examples",
    ),
    "half a mask": (
        lambda w, x: (errors(w, x) * jnp.concatenate([jnp.ones(len(x)), jnp.zeros(len(x))])[::2]).mean(),
        "takes some of the examples",
    ),
    "turned by a linear function": (
        lambda w, x: (
            jax.custom_derivatives.linear_call(lambda _, h: h[::-1], lambda _, h: h[::-1], (), x @ w) * x
        ).mean(),
        "runs along the examples within",
    ),
    "solved in turn": (
        lambda w, x: (
            jax.lax.custom_linear_solve(
                lambda h: 2 * h[::-1], x @ w, lambda _, h: h[::-1] / 2, symmetric=True
            )
            * x
        ).mean(),
        "runs along the examples within",
    ),
    "contrastive": (contrastive, "makes an array of all pairs of examples"),
    "pairwise": (pairwise, "makes an array of all pairs of examples"),
    "sorted": (lambda w, x: (jnp.sort((x @ w).sum(1)) * jnp.arange(len(x))).mean(), "along the examples"),
    "summed up": (lambda w, x: jnp.tanh(jnp.cumsum(x @ w, 0)).mean(), "along the examples"),
    "one by one": (
        lambda w, x: jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), jnp.zeros(3), x)[1].mean(),
        "one after the other",
    ),
    "summed up by a loop": (
        lambda w, x: jax.lax.scan(lambda total, x: (total + x @ w, total), jnp.zeros(3), x)[1].mean(),
        "one after the other",
    ),
    "added by a loop to what is there": (
        lambda w, x: jax.lax.scan(lambda total, x: (total + x @ w, None), jnp.ones(3), x)[0].sum(),
        "one after the other",
    ),
    "doubled by a loop": (
        lambda w, x: jax.lax.scan(lambda total, x: (total + total + x @ w, None), jnp.zeros(3), x)[0].sum(),
        "one after the other",
    ),
    "numbered": (lambda w, x: (errors(w, x) * jnp.arange(len(x))).mean(), "counts the examples"),
    "by a table": (lambda w, x: (errors(w, x) * np.linspace(0, 1, len(x))).mean(), "counts the examples"),
    "differences": (lambda w, x: (jnp.diff(x @ w, axis=0) ** 2).mean(), "some of the examples"),
    "reversed": (lambda w, x: (jnp.tanh(x @ w) * (x @ w)[::-1]).mean(), "along the examples"),
    "first": (lambda w, x: jnp.tanh(x @ w).mean() + (x @ w)[0].sum(), "takes some of the examples"),
    "place": (lambda w, x: (x @ w).mean() * (x @ w)[:, 0].argmax(), "takes some of the examples"),
    "groups that lie over two copies": (
        lambda w, x: jnp.tile(x @ w, (2, 1)).reshape(-1, 4, 3).max(1).mean(),
        "moves numbers of one example",
    ),
    "groups behind all": (
        lambda w, x: (
            jnp.concatenate([x @ w, (x @ w).reshape(-1, 2, 3).max(1)]).reshape(-1, 3, 3).max(1).mean()
        ),
        "pairs examples that do not",
    ),
    "two orders, by map": (
        lambda w, x: jax.lax.map(
            lambda a: a[0] @ a[1], (jnp.concatenate([x, x]), jnp.repeat(x @ w, 2, 0))
        ).mean(),
        "pairs examples that do not",
    ),
    "first half by number": (lambda w, x: (x @ w)[jnp.arange(len(x) // 2)].mean(), "finds examples by"),
    "first half by number, by map": (
        lambda w, x: jax.lax.map(lambda i: (x @ w)[i], jnp.arange(len(x) // 2)).mean(),
        "counts the examples from 0",
    ),
    "of pairs and of all": (lambda w, x: ((x @ w)[::2] * (x @ w)[: len(x) // 2]).mean(), "some of the exam"),
    "one of a pair": (
        lambda w, x: ((x @ w)[: len(x) - 1 : 2] * (x @ w)[3::2].sum()).mean(),
        "some of the exam",
    ),
    "halves": (
        lambda w, x: jnp.tanh((x @ w)[: len(x) // 2] - x[len(x) // 2 :]).mean(),
        "some of the examples",
    ),
    "turned": (lambda w, x: jnp.tanh(x.reshape(3, -1).T @ w).mean(), "moves numbers of one example"),
    "edges": (lambda w, x: jnp.tanh((x @ w)[x.argsort(1)[:, 0] * 2]).mean(), "finds examples by numbers"),
    "in a loop": (normalized_twice, "computes a statistic of the examples within"),
    "spectrum": (lambda w, x: jnp.abs(jnp.fft.fft(x @ w, axis=0)).mean(), "runs along the examples"),
    "smoothed": (
        lambda w, x: jnp.convolve((x @ w)[:, 0], W[0, :2], mode="same").mean(),
        "runs along the examples",
    ),
    "windows": (
        lambda w, x: jax.lax.reduce_window(x @ w, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME").std(),
        "runs along the examples",
    ),
    "hardest half": (
        lambda w, x: jax.lax.top_k(errors(w, x), len(x) // 2)[0].mean(),
        "runs along the examples",
    ),
    "before it": (lambda w, x: (jnp.tri(len(x)) @ errors(w, x)).mean(), "makes an array of all pairs"),
    "by a matrix": (lambda w, x: (np.tri(len(x)) @ errors(w, x)).mean(), "counts the examples"),
    "by ones": (lambda w, x: jnp.tanh(np.ones((len(x), len(x))) @ errors(w, x)).mean(), "counts the exam"),
    "a table of its own": (lambda w, x: errors(w, x) @ jnp.linspace(0, 1, len(x)), "some of the examples"),
    "split": (lambda w, x: jnp.prod(jnp.stack(jnp.split(x @ w, 2)), 0).mean(), "some of the examp"),
    "a half at a place": (
        lambda w, x: jax.lax.dynamic_slice_in_dim(x @ w, 0, len(x) // 2).mean(),
        "some of the examples",
    ),
    "shifted": (
        lambda w, x: (x @ w * jax.lax.pad(x @ w, 0.0, ((1, -1, 0), (0, 0, 0)))).mean(),
        "some of the examples",
    ),
    "some overwritten": (
        lambda w, x: (jax.lax.dynamic_update_slice(x @ w, jnp.zeros((2, 3)), (0, 0)) ** 2).mean(),
        "some of the examples",
    ),
    "one overwritten": (lambda w, x: ((x @ w).at[0].set(0) ** 2).mean(), "finds examples by"),
    "added where data says": (
        lambda w, x: (jnp.zeros(len(x)).at[jnp.argmax(x, 1)].add(errors(w, x)) ** 2).mean(),
        "finds examples by",
    ),
    "along them, computed again": (
        lambda w, x: jax.checkpoint(lambda h: jnp.tanh(jnp.cumsum(h, 0)))(x @ w).mean(),
        "runs along the examples within",
    ),
}


@jax.custom_vjp
def until_small(w, x):
    return jax.lax.while_loop(lambda h: (h**2).sum() > 0.1, lambda h: 0.5 * jnp.tanh(h @ w), x)


until_small.defvjp(
    lambda w, x: (until_small(w, x), (w, x)), lambda saved, g: (g.sum() * saved[0], g * saved[1])
)


KEEPS_APART = {
    "groups by map": lambda w, x: jax.lax.map(lambda x: jnp.tanh(x @ w).sum(), x, batch_size=2).mean(),
    "pairs": lambda w, x: (jax.nn.softmax((x @ w).reshape(-1, 2, 3), 1)[:, 0] ** 2).mean(),
    "one and the other": lambda w, x: ((x @ w)[::2] * jnp.tanh(x @ w)[1::2]).mean(),
    "pairs, apart again": lambda w, x: (jnp.sort((x @ w).reshape(-1, 2, 3), 1).reshape(len(x), 3) * x).mean(),
    "added up by a loop": lambda w, x: (
        jax.lax.scan(lambda c, x: ((c[0] + jnp.tanh(x @ w).sum(), c[1] + 1), x), (0.0, 0), x)[0][0] / len(x)
    ),
    "taken off by a loop": lambda w, x: (
        jax.lax.scan(lambda c, x: (c - jnp.tanh(x @ w)[0], None), 0.0, x)[0] / len(x)
    ),
    "features in turn": lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: c + errors(w, x) @ x[:, i], 0.0),
    "chosen by the length": lambda w, x: jnp.mean(
        jax.lax.cond(len(x) > 1, lambda e: 2 * e, lambda e: e, errors(w, x))
    ),
    "by ridge regression": lambda w, x: (
        jnp.linalg.solve(x.T @ x / len(x) + jnp.eye(3), x.T @ x[:, 0] / len(x)).sum() + (x @ w).mean()
    ),
    "each by map": lambda w, x: jax.lax.map(lambda x: jnp.tanh(x @ w).sum(), x).mean(),
    "each by its number, by map": lambda w, x: jax.lax.map(
        lambda i: ((x[i] @ w) ** 2).sum() * x[i, 0], jnp.arange(len(x))
    ).mean(),
    "to a table, by map": lambda w, x: jax.lax.map(lambda a: ((w - a) ** 2).sum(1).min(), x @ w).mean(),
    "by numbers of the data, by map": by_numbers_of_the_data,
    "a table of the batch's length": lambda w, x: jnp.sum(np.full(len(x), 1 / len(x)) * errors(w, x)),
    "a rule of numbers alone": lambda w, x: (
        errors(w, x).mean()
        + 0.0 * with_rule(lambda z: z.argmax(1), lambda g, z: (jnp.zeros_like(z),))(x @ w).sum()
    ),
    "a rule that leaves targets": lambda w, x: with_rule(
        lambda z, y: ((z - y) ** 2).mean(), lambda g, z, y: (2 * g * (z - y) / z.size, None)
    )(x @ w, x),
    "a rule of a mean and of rows": of_a_mean_and_rows,
    "a loop until": lambda w, x: (x @ w * in_a_loop(lambda h: jnp.tanh(2 * h), x @ w)).mean(),
    "rules of JAX": lambda w, x: (jax.nn.relu(x @ w) * jax.nn.softmax(x @ w) + jax.nn.silu(x @ w)).mean(),
    "a product with a rule": lambda w, x: (product_by(alone, alone)(x, w) ** 2).mean(),
    "a mean with a rule": lambda w, x: entropy_by(len)(x @ w, x.argmax(1)),
    "a rule, in a loop": lambda w, x: (
        jax.lax.scan(lambda h, w: (product_by(alone, alone)(h, w), None), x, w[None])[0] ** 2
    ).mean(),
    "a rule for each": lambda w, x: jax.vmap(lambda x: (product_by(alone, alone)(x[None], w) ** 2).sum())(
        x
    ).mean(),
    "on a device": lambda w, x: jnp.mean(jax.device_put(x) @ w),
    "behind a barrier": lambda w, x: jnp.multiply(*jax.lax.optimization_barrier((x @ w, w.sum(0)))).mean(),
    "a number of what is the same": lambda w, x: (
        (x @ w).mean() + jax.checkpoint(lambda w: (w**2).sum() / len(x))(w)
    ),
    "a branch of each": lambda w, x: jax.lax.cond(
        w.sum() > -9, lambda h: jnp.tanh(h), lambda h: jnp.zeros_like(h), x @ w
    ).mean(),
    "until each is small": lambda w, x: jax.vmap(until_small, (None, 0))(w, x).mean(),
    "an equation each": lambda w, x: jnp.linalg.solve(
        jax.vmap(jnp.diag)(1 + (x @ w) ** 2) + 0.1, x[..., None]
    ).mean(),
    "one equation": lambda w, x: jnp.linalg.solve(w @ w.T + jnp.eye(3), x.T).mean(),
    "solved by iteration": lambda w, x: jax.vmap(
        lambda b: jax.scipy.sparse.linalg.cg(lambda v: w.T @ (w @ v) + v, b, maxiter=9)[0]
    )(x).mean(),
    "spectrum of each": lambda w, x: jnp.abs(jnp.fft.fft(x @ w, axis=1)).mean(),
    "smoothed each": lambda w, x: jax.vmap(lambda h: jnp.convolve(h, W[0], mode="same"))(x @ w).mean(),
    "by a kernel each": lambda w, x: jax.vmap(lambda h, x: jnp.convolve(h, x, mode="same"))(x @ w, x).mean(),
    "windows of each": lambda w, x: jax.lax.reduce_window(
        x @ w, 0.0, jax.lax.add, (1, 2), (1, 1), "SAME"
    ).mean(),
    "largest of each": lambda w, x: jax.lax.top_k(x @ w, 2)[0].mean(),
    "sorted each": lambda w, x: (jnp.sort(x @ w, 1)[:, 0]).mean(),
    "summed up each": lambda w, x: jnp.tanh(jnp.cumsum(x @ w, 1)).mean(),
    "factors": lambda w, x: jnp.linalg.cholesky((x @ w)[:, :, None] * (x @ w)[:, None] + jnp.eye(3)).mean(),
    "solved each": lambda w, x: jax.vmap(jnp.linalg.solve)(
        (x @ w)[:, :, None] * x[:, None] + jnp.eye(3), x
    ).mean(),
    "one matrix for all": lambda w, x: jax.scipy.linalg.solve_triangular(
        jnp.tril(w) + 9 * jnp.eye(3), x.T, lower=True
    ).mean(),
    "own label": lambda w, x: (x @ w)[jnp.arange(len(x)), jnp.argmax(x, 1)].mean(),
    "without its own": lambda w, x: ((x @ w).at[jnp.arange(len(x)), jnp.argmax(x, 1)].set(0) ** 2).mean(),
    "written into each": lambda w, x: jax.vmap(
        lambda h, i: jax.lax.dynamic_update_slice(h, jnp.zeros(1), (i,)) ** 2
    )(x @ w, jnp.argmax(x, 1)).mean(),
    "padded each": lambda w, x: (jnp.pad(x @ w, ((0, 0), (1, 2))) ** 2).mean(),
    "bits": lambda w, x: (x @ w).mean() * (jax.lax.bitcast_convert_type(x, jnp.int32) > 0).mean(),
    "beside ones": lambda w, x: (
        jnp.concatenate([x, jnp.ones((len(x), 1))], 1) @ jnp.ones((4, 3)) * (x @ w)
    ).mean(),
}


@pytest.mark.parametrize("name", SEES_OTHERS)
def test_examples_that_see_each_other_are_warned_of(name):
    loss, why = SEES_OTHERS[name]
    program = ow.SGD(0.1).minimize(loss, W, X)
    with pytest.warns(UserWarning, match=rf"test_whole_batch.py:\d+.* {why}.* 4 devices sees only its own"):
        ow.replicate(program, DEVICES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ow.replicate(program, DEVICES, sync_batch_norm=False)


@pytest.mark.parametrize(
    "name",
    [
        *("contrastive", "edges", "reversed", "spectrum", "split", "one overwritten"),
        *(name for name in SEES_OTHERS if " map" in name or " rule" in name or "tangents" in name),
    ],
)
def test_micro_batches_whose_examples_need_others_are_warned_of(name):
    loss, why = SEES_OTHERS[name]
    program = ow.SGD(0.1).minimize(loss, W, X)
    with pytest.warns(
        UserWarning, match=rf"test_whole_batch.py:\d+.* {why}.* 4 micro-batches has only its own"
    ):
        ow.accumulate(program, 4)
    ow.accumulate(program, 4, is_sum=False)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", KEEPS_APART)
def test_examples_that_are_computed_apart(name):
    """On devices and in micro-batches, without a warning."""
    loss = KEEPS_APART[name]
    program = ow.SGD(0.1).minimize(loss, W, X)
    made = {"devices": ow.replicate(program, DEVICES), "micro-batches": ow.accumulate(program, DEVICES)}
    value, gradient = jax.jit(jax.value_and_grad(loss))(W, X)
    for found in stepped(made, X).values():
        np.testing.assert_allclose(found[0], value, 2e-5)
        np.testing.assert_allclose(found[1], gradient, 2e-4, 2e-4 * np.abs(gradient).max())


HALF = {
    "first": lambda r: r[::2].mean(),
    "second": lambda r: r[1::2].mean(),
    "in checkpoint": jax.checkpoint(lambda r: r[::2].mean()),
    "in checkpoint twice": jax.checkpoint(jax.checkpoint(lambda r: r[::2].mean())),
    "in a loop": lambda r: jax.lax.scan(lambda c, t: (c, t * r[::2].mean()), 0, jnp.ones(3))[1].sum(),
    "in a branch": lambda r: jax.lax.cond(True, lambda r: r[::2].mean(), lambda r: r[1::2].mean(), r),
}


@pytest.mark.parametrize("name", HALF)
def test_parts_of_one_example_have_no_pairs(name):
    program = ow.SGD(0.1).minimize(lambda w, x: HALF[name](x @ w), W, X)
    with pytest.warns(UserWarning, match="takes some of the examples.* 8 micro-batches has only its own"):
        ow.accumulate(program, ROWS)
    with pytest.warns(UserWarning, match="takes some of the examples.* 8 devices sees only its own"):
        ow.replicate(program, ROWS)


def test_results_that_nobody_takes_are_not_warned_of():
    def loss(w, x):
        jnp.sort(x, 0)
        return jnp.mean(x @ w)

    ow.replicate(ow.SGD(0.1).minimize(loss, W, X), DEVICES)


# ---------------------------------------------------------------- results over examples

ROWS_OF = {
    "concatenated": (lambda r: jnp.concatenate([r, r]), "several times"),
    "two joined": (lambda r: jnp.concatenate([r, 2 * r]), "several times"),
    "tiled": (lambda r: jnp.tile(r, 3), "several times"),
    "stacked, flat": (lambda r: jnp.stack([r, 2 * r]).reshape(-1), "several times"),
    "reversed": (lambda r: r[::-1], "along the examples"),
    "summed up": (jnp.cumsum, "along the examples"),
    "numbers": (lambda r: jnp.arange(len(r)), "counts them from 0"),
    "both by map": (lambda r: jax.lax.map(jnp.sin, jnp.concatenate([r, r])), "several times"),
    "beside zeros": (lambda r: jnp.concatenate([r, jnp.zeros(len(r))]), "several times"),
}
IN_ORDER = {
    "as they are": lambda r: r,
    "twice each": lambda r: jnp.repeat(r, 2),
    "stacked behind": lambda r: jnp.stack([r, 2 * r], 1),
    "flat": lambda r: jnp.stack([r, 2 * r], 1).reshape(-1),
    "one of each pair": lambda r: r.reshape(-1, 2).max(1),
    "by map": lambda r: jax.lax.map(jnp.sin, r, batch_size=2),
    "half of two": lambda r: jnp.concatenate([r, 2 * r])[: len(r)],
    "ones": lambda r: jnp.ones((len(r), 2)),
    "a table": lambda r: np.ones(len(r), "float32"),
    "nothing of each": lambda r: r[:, None][:, :0],
    "nothing": lambda r: jnp.zeros((len(r), 0)),
}


def returning(rows):
    def loss(w, x):
        return errors(w, x).mean(), rows(errors(w, x))

    return ow.SGD(0.1).minimize(loss, W, X, has_aux=True)


def test_rows_that_are_divided_by_their_number_are_warned_of():
    program = returning(lambda r: r / len(r))
    with pytest.warns(UserWarning, match="divided by how many there are, and each of 2 micro-batches"):
        ow.accumulate(program, 2)
    step = ow.compile(ow.replicate(program, 2))
    np.testing.assert_allclose(step(step.init(W), X)[1].aux, errors(W, X) / ROWS, 1e-5)


SPREAD = {"devices": lambda p: ow.replicate(p, 2), "micro-batches": lambda p: ow.accumulate(p, 2)}


@pytest.mark.parametrize("how", SPREAD)
@pytest.mark.parametrize("name", ROWS_OF)
def test_results_in_another_order_are_warned_of(name, how):
    rows, why = ROWS_OF[name]
    with pytest.warns(UserWarning, match=why):
        SPREAD[how](returning(rows))


def test_results_that_hold_the_examples_along_another_axis():
    program = returning(lambda r: jnp.stack([r, 2 * r]))
    with pytest.warns(UserWarning, match=r"'.*' \(float32\[2,\d+\] on each of 2 devices\) .* another axis"):
        ow.replicate(program, 2)
    ow.replicate(program, 2, sync_batch_norm=False)
    step = ow.compile(ow.accumulate(program, 2))
    _, out = step(step.init(W), X)
    np.testing.assert_allclose(out.aux, jnp.stack([errors(W, X), 2 * errors(W, X)]), 1e-5)


@pytest.mark.parametrize("how", SPREAD)
def test_results_in_the_order_of_the_examples(how):
    program = returning(lambda r: {name: rows(r) for name, rows in IN_ORDER.items()})
    step = ow.compile(SPREAD[how](program))
    _, out = step(step.init(W), X)
    expected = {name: rows(errors(W, X)) for name, rows in IN_ORDER.items()}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), out.aux, expected)


# ---------------------------------------------------------------- micro-batches


BENT = {  # by statistics of activations, which no micro-batch has of the others
    "a root of a mean", "a norm", "a log of a sum", "filled in by a mean", "unbiased", "standardized",
    "standardized, summed", "by second moments", "by sums", "whitened", "largest", "by the largest",
    "softmax over examples", "logsumexp", "product of means", "correlation", "segments", "mean by vmap",
    "in a branch that a mean decides",
}  # fmt: skip


@pytest.fixture(scope="module")
def in_parts():
    """What is said of each loss in micro-batches, and loss and gradient of those of which nothing is."""
    said, programs = {}, {}
    for name, loss in LOSSES.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            programs[name] = ow.accumulate(of(loss), 4)
        said[name] = [str(w.message) for w in caught]
    return said, stepped({name: p for name, p in programs.items() if not said[name]}, X, Y, MASK)


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_make_the_loss_of_the_whole_batch_or_are_warned_of(in_parts, name):
    said, found = in_parts
    if name in BENT:
        assert said[name], name
        assert re.search(r"(neither a mean over examples nor a sum|only its own)", said[name][0])
        assert re.search(r"at test_whole_batch.py:\d+", said[name][0])
    else:
        loss, gradient = references()[name]
        np.testing.assert_allclose(found[name][0], loss, 2e-5)
        np.testing.assert_allclose(found[name][1], gradient, 2e-4, 2e-4 * np.abs(gradient).max())


@pytest.mark.parametrize("name", ["a sum", "by mask"])
@pytest.mark.parametrize("order", ["accumulated first", "replicated first"])
def test_micro_batches_of_a_sum_on_devices(order, name):
    program = of(LOSSES[name])
    if order == "accumulated first":
        program = ow.replicate(ow.accumulate(program, 2), 2)
    else:
        program = ow.accumulate(ow.replicate(program, 2), 2)
    step = ow.compile(program)
    state, out = step(step.init(W), X, Y, MASK)
    loss, gradient = references()[name]
    np.testing.assert_allclose(out.loss, loss, 1e-5)
    np.testing.assert_allclose((W - np.asarray(state.parameters)) / 0.1, gradient, 1e-4, 1e-4)


@pytest.mark.parametrize("devices", [1, 2])
def test_sums_beside_the_loss_in_micro_batches(devices):
    def loss(w, x):
        return errors(w, x).mean(), {"sum": errors(w, x).sum(), "mean": (x @ w).mean()}

    program = ow.SGD(0.1).minimize(loss, W, X, has_aux=True)
    step = ow.compile(ow.accumulate(ow.replicate(program, 2) if devices > 1 else program, 2))
    _, out = step(step.init(W), X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), out.aux, loss(W, X)[1])


@pytest.mark.parametrize("name", ["a root of a mean", "by the largest"])
def test_micro_batches_that_are_meant_as_they_are(name):
    ow.accumulate(of(LOSSES[name]), 4, is_sum=False)


def test_a_number_that_is_added_to_labels_and_numbers_that_are_nearly_alike_are_not_taken_for_the_same():
    def shifted(w, x):
        return jnp.mean(errors(w, x) * (jnp.argmax(x, 1) + len(x)))

    def nearly(w, x):
        return jnp.mean(errors(w, x)) * np.float32(1 + len(x) * 2**-22)

    with jax.enable_x64(True):
        given = np.float64(W), np.float64(X)
        exact = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(errors(w, x)) * (1 + len(x) * 1e-9), *given)
        with pytest.warns(UserWarning, match="neither a mean over examples nor a sum"):
            ow.accumulate(exact, 4)
    for loss in (shifted, nearly):
        program = ow.SGD(0.1).minimize(loss, W, X)
        with pytest.warns(UserWarning, match="neither a mean over examples nor a sum"):
            ow.accumulate(program, 4)
        step = ow.compile(ow.replicate(program, DEVICES))
        np.testing.assert_allclose(step(step.init(W), X)[1].loss, jax.jit(loss)(W, X), 5e-7)


def test_a_number_that_counts_the_batch_otherwise_than_a_mean_does_is_warned_of():
    for scale in (len, lambda x: 1 / len(x) ** 2, lambda x: len(x) ** -0.5):
        program = ow.trace(lambda w, x, scale=scale: (x @ w).sum() * scale(x), W, X)
        program = ow.SGD(0.1).minimize(program)
        with pytest.warns(UserWarning, match="neither a mean over examples nor a sum: 'mul'"):
            ow.accumulate(program, 4)
    ow.accumulate(ow.SGD(0.1).minimize(lambda w, x: (x @ w).mean() * len(x), W, X), 4)


# ---------------------------------------------------------------- batch normalization of other libraries


def of_linen():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))

    net = Net()
    variables = jax.jit(net.init)(jax.random.key(0), X)

    def loss(p, s, x):
        y, changed = net.apply({"params": p, "batch_stats": s}, x, mutable=["batch_stats"])
        return jnp.mean((y - x[:, :1]) ** 2), changed["batch_stats"]

    return loss, variables["params"], variables["batch_stats"]


def of_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.first(x))

    graph, parameters, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(p, s, x):
        net = nnx.merge(graph, p, s)
        return jnp.mean((net(x) - x[:, :1]) ** 2), nnx.split(net, nnx.Param, ...)[2]

    return loss, parameters, rest


def of_haiku():
    def network(x):
        return hk.BatchNorm(True, True, 0.9)(hk.Linear(4)(x), is_training=True)

    net = hk.transform_with_state(network)

    def loss(p, s, x):
        y, s = net.apply(p, s, None, x)
        return jnp.mean((y - x[:, :1]) ** 2), s

    return loss, *jax.jit(net.init)(jax.random.PRNGKey(0), X)


def of_equinox(mode):
    class Net(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.first = eqx.nn.Linear(3, 4, key=key)
            self.norm = eqx.nn.BatchNorm(4, "batch", mode=mode)

        def __call__(self, x, s):
            return self.norm(self.first(x), s)

    net, state = eqx.nn.make_with_state(Net)(jax.random.PRNGKey(0))

    def loss(net, s, x):
        y, s = jax.vmap(net, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, s)
        return jnp.mean((y - x[:, :1]) ** 2), s

    return loss, net, state


NETWORKS = {
    "linen": of_linen,
    "nnx": of_nnx,
    "haiku": of_haiku,
    "equinox, ema": lambda: of_equinox("ema"),
    "equinox, batch": lambda: of_equinox("batch"),
}


@pytest.mark.parametrize("library", NETWORKS)
def test_batch_normalization_of_a_library_is_by_the_whole_batch(library):
    loss, parameters, state = NETWORKS[library]()
    program = ow.SGD(0.01).minimize(loss, parameters, X, state=state)
    found = []
    for each in (program, ow.replicate(program, DEVICES)):
        step = ow.compile(each)
        after = step.init(parameters, state)
        for _ in range(3):
            after, out = step(after, X)
        carried = jax.tree.leaves((after.parameters, after.model_state))
        found.append([out.loss, *(x for x in carried if isinstance(x, jax.Array))])
    for one, many in zip(*found, strict=True):
        np.testing.assert_allclose(many, one, 1e-4, 1e-5)


def test_a_function_that_is_another_one_for_a_part_is_warned_of():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w)) if len(x) > 4 else jnp.mean(x @ w)

    program = ow.SGD(0.1).minimize(loss, W, X)
    with pytest.warns(UserWarning, match=r"another graph .* from 'tanh' at .*test_whole_batch.py:\d+"):
        step = ow.compile(ow.replicate(program, DEVICES))
    _, out = step(step.init(W), X)
    np.testing.assert_allclose(out.loss, np.mean(X @ W), 1e-5)


def of_label(w, x, y):
    """For one example JAX leaves out the axis that it takes a label along."""
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], 1)[:, 0]


OF_ONE_EACH = {
    "mean": lambda e, weight: jnp.mean(e),
    "sum": lambda e, weight: jnp.sum(e),
    "sum of products": lambda e, weight: jnp.sum(e * weight),
    "mean of products": lambda e, weight: jnp.mean(e * weight),
    "by weight": lambda e, weight: jnp.sum(e * weight) / jnp.sum(weight),
    "each by its share": lambda e, weight: jnp.sum(e * (weight / weight.sum())),
    "by a root": lambda e, weight: jnp.mean(jnp.tanh(weight * (e - e.mean()) / jnp.sqrt(jnp.mean(e**2)))),
    "by the largest": lambda e, weight: jnp.mean(e) / jnp.max(e),
}


@pytest.mark.parametrize("name", OF_ONE_EACH)
@pytest.mark.parametrize("weight", ["weight", "example_weight"])
def test_devices_with_one_example_each_are_told_by_two(name, weight):
    def loss(w, x, y, weight):
        e = of_label(w, x, y)
        return OF_ONE_EACH[name](e, weight), {"sum": e.sum(), "largest": e.max(), "each": e}

    def named(w, x, y, example_weight):
        return loss(w, x, y, example_weight)

    data = X[:DEVICES], Y[:DEVICES], np.arange(1, 1 + DEVICES, dtype="float32")
    program = ow.SGD(0.1).minimize(named if weight == "example_weight" else loss, W, *data, has_aux=True)
    step = ow.compile(ow.replicate(program, DEVICES))
    state, out = step(step.init(W), *data)
    (value, aux), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(W, *data)
    np.testing.assert_allclose(out.loss, value, 1e-5)
    np.testing.assert_allclose(state.parameters, W - 0.1 * gradient, 1e-5, 1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5), out.aux, aux)


@pytest.mark.parametrize("weight", ["weight", "example_weight"])
@pytest.mark.parametrize("order", ["accumulated first", "replicated first"])
def test_one_example_each_of_a_micro_batch(order, weight):
    def loss(w, x, y, weight):
        return OF_ONE_EACH["by weight"](of_label(w, x, y), weight)

    def named(w, x, y, example_weight):
        return loss(w, x, y, example_weight)

    data = X, Y, np.arange(1, 1 + ROWS, dtype="float32")
    program = ow.SGD(0.1).minimize(named if weight == "example_weight" else loss, W, *data)
    if order == "accumulated first":
        program = ow.replicate(ow.accumulate(program, 2), DEVICES)
    else:
        program = ow.accumulate(ow.replicate(program, DEVICES), 2)
    step = ow.compile(program)
    state, out = step(step.init(W), *data)
    value, gradient = jax.jit(jax.value_and_grad(loss))(W, *data)
    np.testing.assert_allclose(out.loss, value, 1e-5)
    np.testing.assert_allclose(state.parameters, W - 0.1 * gradient, 1e-5, 1e-6)


OF_ONE_ALONE = {
    "another op": lambda e, x: e + 0 if len(x) == 1 else e,
    "another number": lambda e, x: e * (3 if len(x) == 1 else 2),
    "half as large a number": lambda e, x: e * (1 if len(x) == 1 else 2),
    "another power": lambda e, x: e ** (2 if len(x) == 1 else 4),
    "another number within": lambda e, x: jax.checkpoint(lambda e: e * (3 if len(x) == 1 else 2))(e),
    "another direction": lambda e, x: e * jax.lax.cumsum(x, 1, reverse=len(x) == 1)[:, 0].sum(),
    "an axis that is left out": lambda e, x: e * (jnp.squeeze(x).sum(0) * jnp.arange(3.0)).sum(),
    "by the square of their number": lambda e, x: jnp.sqrt(e) / (len(x) ** 2 + 1),
}


@pytest.mark.parametrize("name", OF_ONE_ALONE)
def test_one_example_each_of_another_graph_is_warned_of(name):
    def loss(w, x, y):
        return OF_ONE_ALONE[name](jnp.sum(of_label(w, x, y) * x[:, 0]) / jnp.sum(x[:, 0] ** 2), x)

    program = ow.SGD(0.1).minimize(loss, W, X[:DEVICES], Y[:DEVICES])
    with pytest.warns(UserWarning, match="each device takes one example at a time, .* Let each take two"):
        ow.replicate(program, DEVICES)


def test_one_example_each_that_is_filled_up_is_warned_of():
    def loss(w, x, y, example_weight):
        return jnp.mean(of_label(w, x, y) * example_weight)

    data = X[:DEVICES], Y[:DEVICES], np.ones(DEVICES, "float32")
    step = ow.compile(ow.replicate(ow.SGD(0.1).minimize(loss, W, *data), DEVICES))
    with pytest.warns(
        UserWarning, match="3 examples are filled up .* the loss is divided by a number of rows"
    ):
        step(step.init(W), *(x[:3] for x in data))


# ---------------------------------------------------------------- numbers of the whole batch


COUNTED = {
    "shape": lambda e, y: jnp.array([len(e), 3]),
    "third": lambda e, y: jnp.int32(len(e)) // 3,
    "share": lambda e, y: 100 * jnp.sum(y > 0) // len(e),
    "times": lambda e, y: jnp.sum(y > 0) * len(e),
    "times a constant": lambda e, y: jnp.sum(y > 0) * np.array([len(e), len(e)], "int32"),
    "left": lambda e, y: len(e) - jnp.sum(y > 0),
    "root of what is left": lambda e, y: jnp.sqrt(1.0 * (len(e) - 1 - jnp.sum(y > 0))),
    "and one": lambda e, y: jnp.sum(y > 0) + 1,
    "majority": lambda e, y: jnp.sum(y > 0) > len(e) // 2,
    "at least half": lambda e, y: jnp.maximum(jnp.sum(y > 0), len(e) // 2),
    "ones": lambda e, y: jnp.sum(jnp.ones(len(e), int)),
    "few bits": lambda e, y: jnp.sum(jnp.full(len(e), 40, "uint8"), dtype="uint8"),
    "a constant": lambda e, y: e.mean() * jnp.asarray(np.array([1.0, len(e) - 1, 3], "float32")),
    "a constant of ones own": lambda e, y: np.array([len(e) / 2, 1], "float32"),
    "half of the classes": lambda e, y: jnp.bincount(y, length=3) // 2,
}


@pytest.mark.parametrize("how", ["devices", "micro-batches", "both"])
def test_numbers_that_count_the_whole_batch(how):
    def loss(w, x, y, m):
        e = errors(w, x * np.array([1, len(x) - 1, 3], "float32"))
        return e.mean(), {name: made(e, y) for name, made in COUNTED.items()}

    program = ow.SGD(0.1).minimize(loss, W, X, Y, MASK, has_aux=True)
    made = {
        "devices": lambda: ow.replicate(program, DEVICES),
        "micro-batches": lambda: ow.accumulate(program, DEVICES),
        "both": lambda: ow.accumulate(ow.replicate(program, 2), 2),
    }
    step = ow.compile(made[how]())
    _, out = step(step.init(W), X, Y, MASK)
    value, told = jax.jit(loss)(W, X, Y, MASK)
    np.testing.assert_allclose(out.loss, value, 1e-5)
    for name, x in told.items():
        assert (out.aux[name].shape, out.aux[name].dtype) == (x.shape, x.dtype), name
        np.testing.assert_allclose(out.aux[name], x, 1e-5, err_msg=name)


# ---------------------------------------------------------------- random numbers


def with_bias(w, x, key):
    """With an op that JAX leaves out for one example."""
    first, second = jax.random.split(key)
    kept, projection = jax.random.uniform(second, x.shape) * x, jax.random.normal(first, (3, 3))
    bias = jnp.broadcast_to(w[:1], x.shape)
    return jnp.mean((kept @ projection @ w + bias) ** 2), {"kept": kept, "projection": projection}


def with_noise(w, x, key):
    first, second = jax.random.split(key)
    projection = jax.random.normal(first, (3, 3))
    kept = jax.random.uniform(second, x.shape)
    return jnp.mean((x * kept @ projection @ w) ** 2), {"kept": kept * x, "projection": projection}


def of_each(w, x, key):
    keys = jax.random.split(key, len(x))
    kept = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
    return jnp.mean((x * kept @ w) ** 2), {"kept": kept * x}


def computed_again(w, x, key):
    kept = jax.checkpoint(lambda x: x * jax.random.uniform(key, x.shape))(x)
    return jnp.mean((kept @ w) ** 2), {"kept": kept}


@pytest.mark.parametrize("how", ["devices", "micro-batches", "both", "both, devices last"])
@pytest.mark.parametrize("loss", [with_noise, of_each, computed_again])
def test_examples_draw_numbers_of_their_own_and_the_network_those_of_all(loss, how):
    x, key = np.ones((ROWS, 3), "float32"), jax.random.key(3)
    program = ow.SGD(0.1).minimize(loss, W, x, key, has_aux=True)
    made = {
        "devices": lambda: ow.replicate(program, DEVICES),
        "micro-batches": lambda: ow.accumulate(program, DEVICES),
        "both": lambda: ow.accumulate(ow.replicate(program, 2), 2),
        "both, devices last": lambda: ow.replicate(ow.accumulate(program, 2), 2),
    }
    step = ow.compile(made[how]())
    state, out = step(step.init(W), x, key)
    kept = np.asarray(out.aux["kept"])
    assert len({part.tobytes() for part in kept.reshape(DEVICES, -1)}) == DEVICES
    projection = with_noise(W, x, key)[1]["projection"] if loss is with_noise else np.eye(3)
    np.testing.assert_allclose(out.aux.get("projection", np.eye(3)), projection, 1e-6)

    def with_these(w):
        return jnp.mean((kept @ projection @ w) ** 2)

    np.testing.assert_allclose(out.loss, with_these(W), 1e-5)
    np.testing.assert_allclose(state.parameters, W - 0.1 * jax.grad(with_these)(W), 1e-4, 1e-5)


@pytest.mark.parametrize("how", ["devices", "micro-batches"])
def test_one_example_a_part_draws_its_own_too(how):
    x, key = np.ones((DEVICES, 3), "float32"), jax.random.key(3)
    program = ow.SGD(0.1).minimize(with_bias, W, x, key, has_aux=True)
    step = ow.compile({"devices": ow.replicate, "micro-batches": ow.accumulate}[how](program, DEVICES))
    _, out = step(step.init(W), x, key)
    assert len({row.tobytes() for row in np.asarray(out.aux["kept"])}) == DEVICES
    np.testing.assert_allclose(out.aux["projection"], with_bias(W, x, key)[1]["projection"], 1e-6)


@pytest.mark.parametrize("how", ["devices", "micro-batches"])
def test_keys_that_come_with_the_examples_are_theirs(how):
    def loss(w, x, keys):
        kept = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
        return jnp.mean((x * kept @ w) ** 2), kept

    keys = jax.random.split(jax.random.key(3), ROWS)
    program = ow.SGD(0.1).minimize(loss, W, X, keys, has_aux=True)
    step = ow.compile({"devices": ow.replicate, "micro-batches": ow.accumulate}[how](program, DEVICES))
    _, out = step(step.init(W), X, keys)
    value, kept = loss(W, X, keys)
    np.testing.assert_array_equal(out.aux, kept)
    np.testing.assert_allclose(out.loss, value, 1e-5)


def test_stages_draw_as_micro_batches_do():
    def loss(w, x, key):
        first, second = jax.random.split(key)
        kept = jax.random.uniform(first, x.shape)
        h = jnp.tanh(x * kept @ w[0])
        return jnp.mean((h * jax.random.uniform(second, h.shape) @ w[1]) ** 2), kept

    x, key, w = np.ones((ROWS, 3), "float32"), jax.random.key(3), (W, W)
    program = ow.SGD(0.1).minimize(loss, w, x, key, has_aux=True)
    found = []
    for made in (ow.accumulate(program, 4), ow.pipeline(program, 2, 4)):
        step = ow.compile(made)
        state, out = step(step.init(w), x, key)
        found.append((out.loss, *state.parameters, out.aux))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)
    assert len({part.tobytes() for part in np.asarray(found[1][-1]).reshape(4, -1)}) == 4


def test_what_each_example_has_of_a_sum_over_all():
    def loss(w, x):
        e = errors(w, x)
        whole = {"of all": e / jnp.sum(e), "softmax": jax.nn.softmax(e), "times": e * jnp.sum(e)}
        return jnp.mean(e), whole | {"rows": jnp.arange(3) * jnp.ones_like(x) / jnp.sum(x**2)}

    program = ow.SGD(0.1).minimize(loss, W, X, has_aux=True)
    step = ow.compile(ow.replicate(program, DEVICES))
    _, out = step(step.init(W), X)
    for name, value in loss(W, X)[1].items():
        np.testing.assert_allclose(out.aux[name], value, 1e-5, err_msg=name)
