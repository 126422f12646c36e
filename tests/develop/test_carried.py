"""State of the forward pass in micro-batches: that of the whole batch, or a warning names it."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 3))
PARAMS = {"w": RANDOM.normal(size=(3, 3)), "v": RANDOM.normal(size=3)}
CODES = RANDOM.normal(size=(4, 3))
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def made(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"]) @ p["v"]


def square(p: Any, x: Any) -> Any:
    return jnp.mean(made(p, x) ** 2)


def target(p: Any, s: Any, x: Any) -> Any:
    return jnp.mean((made(p, x) - made(s, x) + 1) ** 2), jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, s, p)


def by_its_average(p: Any, s: Any, x: Any) -> Any:
    loss = square(p, x)
    return loss / (s + 1), 0.9 * s + 0.1 * jax.lax.stop_gradient(loss)


def codebook(p: Any, s: Any, x: Any) -> Any:
    """The centres are quotients of two sums over examples that are carried on."""
    h = jnp.tanh(x @ p["w"])
    nearest = jnp.argmin(((h[:, None] - s["codes"]) ** 2).sum(-1), 1)
    chosen = jax.nn.one_hot(nearest, 4, dtype=h.dtype)
    count, total = 0.9 * s["count"] + 0.1 * chosen.sum(0), 0.9 * s["total"] + 0.1 * chosen.T @ h
    loss = jnp.mean((h - s["codes"][nearest]) ** 2) + jnp.mean(h @ p["v"])
    return loss, {"count": count, "total": total, "codes": total / count[:, None]}


def whitened(p: Any, s: Any, x: Any) -> Any:
    loss = square(p, (x - s["mean"]) / jnp.sqrt(s["var"]))
    return loss, {"mean": 0.9 * s["mean"] + 0.1 * x.mean(0), "var": 0.9 * s["var"] + 0.1 * x.var(0, ddof=1)}


def corrected(p: Any, s: Any, x: Any) -> Any:
    count = s["count"] + 1
    average = 0.9 * s["average"] + 0.1 * square(p, x)
    return square(p, x) / count, {"count": count, "average": average, "seen": average / (1 - 0.9**count)}


def with_next(state: Callable[..., Any], loss: Callable[..., Any] = lambda p, s, x: square(p, x)) -> Any:
    return lambda p, s, x: (loss(p, s, x), state(p, s, x))


CASES: dict[str, tuple[Callable[..., Any], Any]] = {
    "steps": (with_next(lambda p, s, x: s + 1, lambda p, s, x: square(p, x) * jnp.minimum(s / 4, 1)), 0),
    "decay": (with_next(lambda p, s, x: s * 0.5, lambda p, s, x: square(p, x) * s), 1.0),
    "every other step": (
        with_next(lambda p, s, x: ~s, lambda p, s, x: square(p, jnp.where(s, x, -2 * x))),
        True,
    ),
    "exchanged": (
        with_next(lambda p, s, x: {"a": s["b"], "b": s["a"] + 1}, lambda p, s, x: square(p, x) * s["a"]),
        {"a": 1.0, "b": 2.0},
    ),
    "of parameters": (target, PARAMS),
    "of data": (
        with_next(lambda p, s, x: 0.9 * s + 0.1 * x.mean(0), lambda p, s, x: square(p, x - s)),
        np.zeros(3),
    ),
    "average of the loss": (by_its_average, 1.0),
    "positive so far": (
        with_next(lambda p, s, x: s + jnp.sum(made(p, x) > 0), lambda p, s, x: square(p, x) * (1 + s / 9)),
        0,
    ),
    "examples so far": (with_next(lambda p, s, x: s + len(x), lambda p, s, x: square(p, x) / (1 + s)), 0),
    "sum so far": (
        with_next(lambda p, s, x: s + made(p, x).sum(), lambda p, s, x: square(p, x) / (1 + s**2)),
        0.0,
    ),
    "largest so far": (
        with_next(lambda p, s, x: jnp.maximum(s, made(p, x).max()), lambda p, s, x: square(p, x) + 0 * s),
        -9.0,
    ),
    "root of a mean": (
        with_next(lambda p, s, x: 0.9 * s + 0.1 * jnp.sqrt(square(p, x)), lambda p, s, x: square(p, x) / s),
        1.0,
    ),
    "best so far": (with_next(lambda p, s, x: jnp.minimum(square(p, x), s)), 9.0),
    "codebook": (codebook, {"count": np.ones(4), "total": CODES, "codes": CODES}),
    "whitened": (whitened, {"mean": np.zeros(3), "var": np.ones(3)}),
    "corrected": (corrected, {"count": 0.0, "average": 0.0, "seen": 0.0}),
}
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "micro-batches": lambda program: ow.accumulate(program, 4),
    "on devices": lambda program: ow.replicate(ow.accumulate(program, 2), 2),
    "stages": lambda program: ow.pipeline(program, 2, 2, data=2),
}


def steps_of(program: Any, state: Any, count: int = 3) -> tuple[list[float], Any]:
    """The losses of some steps, and the State after them."""
    step = ow.compile(program, options=QUICK)
    now, losses = step.init(PARAMS, state), []
    for _ in range(count):
        now, out = step(now, X)
        losses.append(float(out.loss))
    return losses, now


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_that_of_the_whole_batch(layout: str, case: str):
    loss, state = CASES[case]
    with jax.enable_x64(True):
        program = ow.Momentum(0.1).minimize(loss, PARAMS, X, state=state)
        wanted, found = steps_of(program, state), steps_of(LAYOUTS[layout](program), state)
        np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=1e-10)
        for name in wanted[1]:
            np.testing.assert_allclose(found[1][name], wanted[1][name], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.filterwarnings("ignore:.*as batch normalization does", "ignore:.*the loss is neither")
def test_state_beside_batch_normalization_is_that_of_the_whole_batch():
    """Its own statistics, mean and variance of one array, are those of one micro-batch after the other."""

    def loss(p: Any, s: Any, x: Any) -> Any:
        h = x @ p["w"]
        mean, var = h.mean(0), h.var(0)
        normal = (h - mean) / jnp.sqrt(var + 1e-5)
        return jnp.mean((normal @ p["v"] - 1) ** 2), {
            "mean": 0.9 * s["mean"] + 0.1 * mean,
            "var": 0.9 * s["var"] + 0.1 * var,
            "size": 0.9 * s["size"] + 0.1 * jnp.mean(jnp.abs(h)),
            "steps": s["steps"] + 1,
        }

    state = {"mean": np.zeros(3), "var": np.ones(3), "size": 0.0, "steps": 0}
    program = ow.SGD(0.1).minimize(loss, PARAMS, X, state=state)
    step = ow.compile(ow.accumulate(program, 4), options=QUICK)
    now, _ = step(step.init(PARAMS, state), X)
    wanted = state
    for part in X.reshape(4, 4, 3):
        _, wanted = loss(PARAMS, wanted, part)
    _, whole = loss(PARAMS, state, X)
    for name in state:
        of = wanted if name in ("mean", "var") else whole
        np.testing.assert_allclose(now.model_state[name], of[name], rtol=1e-5, err_msg=name)


def test_state_beside_a_loss_that_is_a_sum():
    """In either order, and where it is said by hand."""

    def loss(p: Any, s: Any, x: Any) -> Any:
        return jnp.sum(made(p, x) ** 2), 0.9 * s + 0.1 * square(p, x)

    with jax.enable_x64(True):
        program = ow.SGD(0.01).minimize(loss, PARAMS, X, state=1.0)
        wanted, _ = steps_of(program, 1.0)
        for parts in (
            ow.accumulate(program, 4, is_sum=True),
            ow.accumulate(ow.replicate(program, 2, merge=ow.merge.Sum()), 2),
            ow.replicate(ow.accumulate(program, 2), 2, merge=ow.merge.Sum()),
        ):
            found, state = steps_of(parts, 1.0)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
            np.testing.assert_allclose(state.model_state, steps_of(program, 1.0)[1].model_state, atol=1e-10)


MOVED = {
    "mean": (False, lambda s, h: 0.9 * s + 0.1 * jnp.mean(h), True),
    "sum of means": (False, lambda s, h: s + jnp.mean(h), True),
    "sum": (False, lambda s, h: s + jnp.sum(h), False),
    "sum that the loss reads": (True, lambda s, h: s + jnp.sum(h), True),
}


@pytest.mark.filterwarnings("ignore:.*computes a statistic of the examples within")
@pytest.mark.parametrize("kind", MOVED)
def test_state_beside_weights_of_which_nothing_is_known_is_named(kind: str):
    is_read, moved, is_named = MOVED[kind]

    def loss(p: Any, s: Any, x: Any, example_weight: Any) -> Any:
        def mean(scale: Any) -> Any:
            return scale * (made(p, x) ** 2 @ example_weight) / jnp.sum(example_weight)

        kept = jax.lax.cond(p["v"][0] >= 0, lambda: mean(s if is_read else 1.0), lambda: mean(2.0))
        return kept, moved(s, made(p, x))

    program = ow.SGD(0.1).minimize(loss, PARAMS, X, np.ones(16), state=1.0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ow.accumulate(program, 4)
    named = [str(w.message) for w in found if "how the state 's' of the whole batch" in str(w.message)]
    assert len(named) == is_named


def root_of_next(p: Any, s: Any, x: Any) -> Any:
    following = 0.9 * s + 0.1 * jnp.sqrt(jax.lax.stop_gradient(square(p, x)))
    return square(p, x) / following, following


@pytest.mark.filterwarnings("ignore:.*the loss is neither a mean")
def test_state_of_which_nothing_is_known_is_named_and_a_pipeline_refuses_it():
    program = ow.SGD(0.1).minimize(root_of_next, PARAMS, X, state=1.0)
    with pytest.warns(UserWarning, match=r"how the state 's' .*is not known \('sqrt' at .*test_carried"):
        step = ow.compile(ow.accumulate(program, 4), options=QUICK)
    state, _ = step(step.init(PARAMS, 1.0), X)
    moved = 1.0
    for part in X.reshape(4, 4, 3):
        moved = 0.9 * moved + 0.1 * np.sqrt(np.mean((np.tanh(part @ PARAMS["w"]) @ PARAMS["v"]) ** 2))
    np.testing.assert_allclose(state.model_state, moved, rtol=1e-6)
    with (
        pytest.warns(UserWarning, match="how the state"),
        pytest.raises(ow.GraphError, match="hands 's' on from one micro-batch to the next"),
    ):
        ow.pipeline(program, 2, 4)
    ow.accumulate(program, 4, is_sum=False)


def test_state_that_reads_the_number_of_examples_in_a_way_of_its_own_is_named():
    def loss(p: Any, s: Any, x: Any) -> Any:
        h = made(p, x)
        return jnp.mean(h**2), s + jnp.mean(h * np.sqrt(len(x)))

    program = ow.SGD(0.1).minimize(loss, PARAMS, X, state=1.0)
    with pytest.warns(UserWarning, match="how the state 's' of the whole batch .*is not known .*'mul' at"):
        ow.accumulate(program, 4)


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_micro_batches_draw_numbers_of_their_own_with_a_count_of_steps(layout: str):
    """And an average of numbers that are drawn for no example is that of the whole batch."""

    def loss(p: Any, s: Any, x: Any) -> Any:
        key, following = jax.random.split(s["key"])
        drawn = jax.random.uniform(jax.random.fold_in(jax.random.key(3), s["steps"]), (len(x),))
        rate = 0.9 * s["rate"] + 0.1 * jnp.mean(jax.random.bernoulli(key, 0.5, (1000,)))
        state = {"key": following, "rate": rate, "steps": s["steps"] + 1}
        return jnp.mean(made(p, x) ** 2 * drawn), (state, drawn)

    state = {"key": jax.random.key(0), "rate": 0.0, "steps": 0}
    program = ow.SGD(0.1).minimize(loss, PARAMS, X, state=state, has_aux=True)
    step = ow.compile(LAYOUTS.get(layout, lambda alone: alone)(program), options=QUICK)
    now, drawn = step.init(PARAMS, state), []
    for i in range(2):
        now, out = step(now, X)
        drawn += [float(x) for x in out.aux]
        if i == 0:
            _, (following, _) = loss(PARAMS, state, X)
            np.testing.assert_allclose(now.model_state["rate"], following["rate"], rtol=1e-6)
    assert len(set(drawn)) == 2 * len(X)
    assert int(now.model_state["steps"]) == 2


def test_a_buffer_of_an_adopted_step_whose_rows_differ_is_named() -> None:
    def step(w: Any, buffer: Any, at: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        buffer = buffer.at[at + jnp.arange(len(x))].set(x)
        return w - 0.1 * gradient, buffer, at + len(x)

    adopted = ow.adopt(step, PARAMS["v"], jnp.zeros((32, 3)), jnp.int32(0), X)
    with pytest.warns(
        UserWarning, match="counts the examples from 0, .* The state 'buffer' differs from that"
    ):
        ow.accumulate(adopted, 4)
