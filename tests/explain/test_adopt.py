"""Steps of other libraries, adopted: every transform of them trains as the step does in plain JAX."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from jax import grad, value_and_grad
from tests.explain.adopted_programs import PUBLISHED, drawn
from tests.torture.adopt_table import cell

import onward as ow
from onward.distribute.merges import Bucketed, DiLoCo, LocalSGD

KEY, STEPS = jax.random.key(0), 2
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
X[0] = 0.0  # relu at 0, whose derivative is a choice
Y = np.sin(X.sum(1, keepdims=True))
PARAMS = {"a": jnp.asarray(X[1:5].T @ X[:6, :4].T) / 3, "b": jnp.ones((6, 1))}
pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")


@dataclass(frozen=True)
class Case:
    """A step with the state that it begins with, and from what it returns to the next state and the loss."""

    step: Callable[..., Any]
    state: tuple[Any, ...]
    parts: Callable[[Any], tuple[tuple[Any, ...], Any]]
    data: tuple[Any, ...] = (X, Y)


def mean_loss(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["a"]) @ params["b"] - y) ** 2)


def sgd(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def with_optax(rule=optax.adamw):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), rule(1e-2))

    @jax.jit
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(mean_loss)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Case(step, (PARAMS, optimizer.init(PARAMS)), lambda out: (out[:2], out[2]))


def with_an_optimizer_that_keeps_nothing():
    return with_optax(optax.sgd)


def by_hand():
    """Gradients alone, which ``jax.grad`` gives; no loss is returned."""

    def step(params, x, y):
        return sgd(params, jax.grad(mean_loss)(params, x, y))

    return Case(step, (PARAMS,), lambda out: ((out,), None))


def with_a_sum_and_a_rate():
    """A sum over examples, a learning rate that is fed, a target that no gradient flows through."""

    @jax.jit
    def step(params, slow, momentum, x, y, rate):
        def loss(params):
            fixed = jax.lax.stop_gradient(jnp.tanh(x @ params["a"]) @ slow["b"])
            return jnp.sum((jnp.tanh(x @ params["a"]) @ params["b"] - 0.5 * fixed - y) ** 2)

        value, grads = value_and_grad(loss)(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = sgd(params, momentum, rate)
        slow = jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, slow, params)
        return params, slow, momentum, {"loss": value, "norm": optax.tree.norm(grads)}

    state = (PARAMS, PARAMS, jax.tree.map(jnp.zeros_like, PARAMS))
    return Case(step, state, lambda out: (out[:3], out[3]["loss"]), (X, Y, np.float32(0.01)))


def with_flax():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(
                nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(4, use_bias=False)(x)))
            )

    class State(TrainState):
        batch_stats: Any

    network = Network()
    made = drawn(network.init, KEY, X)
    state = State.create(
        apply_fn=network.apply,
        params=made["params"],
        tx=optax.sgd(0.1, momentum=0.9),
        batch_stats=jax.tree.map(jnp.ones_like, made["batch_stats"]),
    )

    @jax.jit
    def step(state, batch):
        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, changed = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return jnp.mean((out - batch["y"]) ** 2), changed

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"]), {"loss": value}

    return Case(step, (state,), lambda out: (out[:1], out[1]["loss"]), ({"x": X, "y": Y},))


def with_equinox():
    model, optimizer = eqx.nn.MLP(4, 1, 4, 1, key=KEY), optax.sgd(0.1, momentum=0.9)

    @eqx.filter_value_and_grad
    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    @eqx.filter_jit
    def step(model, opt_state, x, y):
        value, grads = loss(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, value

    state = model, optimizer.init(eqx.filter(model, eqx.is_array))
    return Case(step, state, lambda out: (out[:2], out[2]))


def with_haiku():
    """A random key that is split and carried on, once for each micro-batch; ``optax.MultiSteps``."""
    network = hk.transform(lambda x: hk.nets.MLP([1])(x))
    params, optimizer = drawn(network.init, KEY, X), optax.MultiSteps(optax.adam(1e-2), 2)

    @jax.jit
    def step(params, opt_state, key, x, y):
        key, now = jax.random.split(key)
        value, grads = jax.value_and_grad(lambda p: jnp.mean((network.apply(p, now, x) - y) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, value

    return Case(step, (params, optimizer.init(params), KEY), lambda out: (out[:3], out[3]))


MAKERS = {
    maker.__name__: maker
    for maker in (
        with_optax,
        with_an_optimizer_that_keeps_nothing,
        by_hand,
        with_a_sum_and_a_rate,
        with_flax,
        with_equinox,
        with_haiku,
    )
}


@cache
def case(name):
    return MAKERS[name]()


@cache
def adopted(name):
    chosen = case(name)
    return ow.adopt(chosen.step, *chosen.state, *chosen.data)


def longer(data):
    """The same batch twice over."""
    return tuple(
        jax.tree.map(lambda x: np.concatenate([x, x[::-1]]) if np.ndim(x) else x, part) for part in data
    )


def plain(name, data, steps=STEPS):
    chosen = case(name)
    state, loss = chosen.state, None
    for _ in range(steps):
        state, loss = chosen.parts(chosen.step(*state, *data))
    return state, loss


def numbers(tree):
    arrays = (x for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))
    keyless = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays)
    return [np.asarray(x, np.float64) for x in keyless]


def expect_equal(program, name, data=None, rtol=2e-5):
    """Train a Program, and compare state and loss with the step's in plain JAX."""
    chosen = case(name)
    data = chosen.data if data is None else data
    step = ow.compile(program)
    state = step.init(chosen.state if len(chosen.state) > 1 else chosen.state[0])
    for _ in range(STEPS):
        state, out = step(state, *data)
    wanted, loss = plain(name, data)
    for mine, theirs in zip(numbers(state.parameters), numbers(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=rtol)
    if loss is not None:
        np.testing.assert_allclose(out.loss, loss, rtol=rtol)
    return step, state


def test_a_state_without_arrays_may_be_said_to_be_carried_on():
    chosen = case("with_an_optimizer_that_keeps_nothing")
    program = ow.adopt(chosen.step, *chosen.state, X, Y, carried=["params", "opt_state"])
    _, state = expect_equal(program, "with_an_optimizer_that_keeps_nothing")
    assert state.parameters[1] == chosen.state[1]
    with pytest.raises(ow.ArgumentError, match=r"no such argument of arrays. .*'opt_state'"):
        ow.adopt(chosen.step, *chosen.state, X, Y, carried=["params", "opt_stat"])


@pytest.mark.parametrize("name", ["by_hand", "with_a_sum_and_a_rate"])
def test_it_trains_as_before_on_batches_of_other_lengths(name):
    expect_equal(adopted(name), name, longer(case(name).data))


@pytest.mark.parametrize("name", MAKERS)
def test_devices_and_micro_batches_train_as_one(name):
    program = adopted(name)
    if name not in ("with_flax", "with_haiku"):  # statistics and keys go from micro-batch to micro-batch
        program = ow.accumulate(program, 2)
    if name == "with_optax":
        program = ow.watch(program, gradients=True, every=1)
    expect_equal(ow.guard(ow.replicate(program, 2)), name)


@pytest.mark.parametrize(
    ("transform", "rtol"),
    [
        (lambda p: ow.replicate(p, 2, Bucketed(64)), 2e-5),
        (ow.mixed_precision, 2e-2),
        (lambda p: ow.mixed_precision(p, "float16", scale=128.0), 2e-2),
    ],
    ids=["Bucketed", "bfloat16", "float16"],
)
def test_transforms(transform, rtol):
    program = transform(adopted("with_optax"))
    assert program != adopted("with_optax")
    expect_equal(program, "with_optax", rtol=rtol)


def deep_loss(params, x):
    for w in params:
        with jax.named_scope("block"):
            x = jnp.tanh(jnp.tanh(x @ w) @ w.T)
    return jnp.mean(x**2)


def test_layers_are_rolled_and_computed_again():
    params = [jnp.asarray(X[i : i + 4]) / 2 for i in range(4)]

    def step(params, x):
        loss, grads = jax.value_and_grad(deep_loss)(params, x)
        return sgd(params, grads), loss

    program = ow.adopt(step, params, X)
    rolled = ow.roll(program)
    assert len(rolled.ops) < len(program.ops)
    for other in (rolled, ow.recompute(program, scopes=["block"])):
        compiled = ow.compile(other)
        state, out = compiled(compiled.init(params), X)
        wanted, loss = step(params, X)
        np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
        for mine, theirs in zip(state.parameters, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_it_is_saved_and_goes_on(tmp_path):
    step, state = expect_equal(adopted("with_optax"), "with_optax")
    path = ow.save(step, tmp_path / "step.onward", state)
    loaded, state = ow.load_step(path)
    state, out = loaded(state, X, Y)
    np.testing.assert_allclose(out.loss, plain("with_optax", (X, Y), STEPS + 1)[1], rtol=1e-5)


def test_the_test_program_learns_nothing():
    with pytest.warns(match=r"normalizes by the batch that it is given, and does not read '.*(mean|var)'"):
        program = ow.for_test(adopted("with_flax"))
    assert not program.next_state
    assert all(op.made_by is ow.Pass.FORWARD for op in program.ops)
    assert not any("trace" in v.name for v in program.state), "what the optimizer keeps is left away"


@pytest.mark.parametrize("name", ["with_flax", "with_equinox"])
def test_as_a_decorator_it_is_called_as_before(name):
    chosen = case(name)
    step = ow.adopt(chosen.step)
    mine, theirs = (s(*chosen.state, *chosen.data) for s in (step, chosen.step))
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for x, y in zip(numbers(mine), numbers(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert step.__name__ == "step"


class Result(NamedTuple):
    params: Any
    opt_state: Any
    loss: Any


@jax.tree_util.register_dataclass
@dataclass
class Named:
    opt_state: Any
    metrics: dict[str, Any]
    params: Any


def in_order(params, opt_state, loss):
    return OrderedDict(loss=loss, params=params, opt_state=opt_state)


class Module(eqx.Module):
    loss: Any
    state: Result


RETURNED = {
    "named tuple": Result,
    "dataclass": lambda p, o, loss: Named(o, {"loss": loss, "twice": 2 * loss}, p),
    "ordered": in_order,
    "module": lambda p, o, loss: Module(loss, Result(p, o, loss**2)),
    "frozen": lambda p, o, loss: freeze({"loss": loss, "next": {"params": p, "opt_state": o}}),
}


@pytest.mark.parametrize("kind", RETURNED)
def test_what_is_returned_in_any_container_keeps_its_place(kind):
    optimizer, build = optax.adam(0.1), RETURNED[kind]

    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(mean_loss)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return build(optax.apply_updates(params, updates), opt_state, loss)

    state = PARAMS, optimizer.init(PARAMS)
    expected = step(*state, X, Y)
    found = ow.adopt(jax.jit(step))(*state, X, Y)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    program = ow.adopt(step, *state, X, Y)
    compiled = ow.compile(program)
    out = compiled(compiled.init(state), X, Y)[1]
    assert len(jax.tree.leaves(out.value)) == len(jax.tree.leaves(build(None, None, 1.0)))
    assert all(x.shape == () for x in jax.tree.leaves(out.value))


def averaged_wide(state, x):
    """A copy of the parameters in bfloat16, which is averaged in float32."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w.astype(jnp.float32)) ** 2))(state["w"])
    w = state["w"] - (0.1 * grad).astype(jnp.bfloat16)
    return {
        "w": w,
        "average": 0.9 * state["average"] + 0.1 * w.astype(jnp.float32),
        "n": state["n"] + 1,
    }, loss


def wider(w, x):
    return w - jnp.float32(0.1) * jax.grad(lambda w: jnp.mean((x @ w.astype(jnp.float32)) ** 2))(w)


def mean_in_float32(state, x):
    """Statistics of the forward pass, begun in float16."""
    loss, grad = jax.value_and_grad(loss_of)(state["w"], x)
    statistics = {"mean": 0.9 * state["statistics"]["mean"] + 0.1 * x.mean(0)}
    return {"w": state["w"] - grad, "statistics": statistics}, loss


HALF = jnp.ones(4, jnp.bfloat16)


@pytest.mark.parametrize(
    ("step", "state", "words"),
    [
        (
            averaged_wide,
            {"w": HALF, "average": HALF, "n": 0},
            r"'state/average' as bfloat16\[4\], .* as float32\[4\]",
        ),
        (wider, HALF, r"'w' as bfloat16\[4\], and returns its next value as float32\[4\].*'float32'"),
        (
            mean_in_float32,
            {"w": jnp.ones(4), "statistics": {"mean": jnp.zeros(4, "float16")}},
            r"'state/statistics/mean' as float16\[4\], .*astype\('float16'\)",
        ),
    ],
)
def test_state_that_comes_back_in_another_dtype_is_told(step, state, words):
    for call in (lambda: ow.adopt(step, state, X), lambda: ow.adopt(step)(state, X)):
        with pytest.raises(ow.ArgumentError, match=words):
            call()


RUNNING = {
    "sum": lambda number, loss: number + loss,
    "mean": lambda number, loss: 0.9 * number + 0.1 * loss,
    "last": lambda number, loss: loss,
}


@pytest.mark.parametrize("first", [0, np.int32(0), jnp.bfloat16(0)], ids=["int", "int32", "bfloat16"])
@pytest.mark.parametrize("rule", RUNNING.values(), ids=RUNNING)
def test_a_number_of_the_loss_that_begins_in_another_dtype_is_told(rule, first):
    """As state it would stay what it began with; a decorated step is given it with each call."""

    def step(state, x):
        loss, grad = jax.value_and_grad(loss_of)(state["w"], x)
        return {"w": state["w"] - grad, "running": rule(state["running"], loss)}, loss

    state = {"w": jnp.ones(4), "running": first}

    def in_a_tuple(state, x):
        state, _ = step({"w": state[0], "running": state[1]}, x)
        return state["w"], state["running"]

    words = rf"'state/running' as {jnp.asarray(first).dtype}\[\], and returns its next value as float32\[\]"
    with pytest.raises(ow.ArgumentError, match=words):
        ow.adopt(step, state, X)
    with pytest.raises(ow.ArgumentError, match=words.replace("running", "1")):
        ow.adopt(in_a_tuple, tuple(state.values()), X)


def results_beside(w, x, rate):
    grad = jax.grad(loss_of)(w, x)
    return w - rate * grad, {"gradient": grad.astype(jnp.bfloat16), "x": x.astype(jnp.float16), "n": rate > 1}


def of_images(w, batch):
    batch = {"image": batch["image"].astype(jnp.float32) / 255}
    return w - jax.grad(loss_of)(w, batch["image"]), batch


def cast_batch(w, batch):
    batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch)
    return w - jax.grad(lambda w: loss_of(w, batch[0]) + batch[1].mean())(w), batch


def masked(params, mask):
    updates = jax.tree.map(
        lambda p, m: jnp.where(m, p, 0), jax.grad(lambda p: loss_of(p["w"], X))(params), mask
    )
    return jax.tree.map(jnp.subtract, params, updates), updates


@pytest.mark.parametrize(
    ("step", "args", "state"),
    [
        (results_beside, (jnp.ones(4), X, 0.1), "w"),
        (of_images, (jnp.ones(4), {"image": np.ones((8, 4), "uint8")}), "w"),
        (cast_batch, (jnp.ones(4), (X, Y)), "w"),
        (masked, ({"w": jnp.ones(4)}, {"w": np.array([True, False, True, True])}), "params/w"),
    ],
)
def test_results_of_another_dtype_that_replace_nothing(step, args, state):
    assert [v.name for v in ow.adopt(step, *args).state] == [state]


def test_the_test_program_takes_batches_of_any_length():
    program = adopted("with_optax")
    params = case("with_optax").state[0]
    for test in (ow.for_test(program), ow.for_test(ow.accumulate(program, 2))):
        step = ow.compile(test)
        state = step.init(case("with_optax").state)
        for rows in (3, 8):
            loss = step(state, X[:rows], Y[:rows])[1].loss
            np.testing.assert_allclose(loss, mean_loss(params, X[:rows], Y[:rows]), rtol=1e-5)


def test_a_raw_key_that_nothing_draws_with_is_no_batch():
    def step(params, rng, x, y):
        loss, grads = jax.value_and_grad(mean_loss)(params, x, y)
        return sgd(params, grads), loss, rng

    key = jax.random.PRNGKey(0)
    expected = step(PARAMS, key, X, Y)[0]
    program = ow.adopt(step, PARAMS, key, X, Y, carried=["params"])
    for parts in (ow.accumulate(program, 4), ow.replicate(program, 2)):
        compiled = ow.compile(parts)
        state = compiled(compiled.init(PARAMS), key, X, Y)[0]
        for mine, theirs in zip(jax.tree.leaves(state.parameters), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_servers_want_the_rule_of_an_optimizer():
    with pytest.raises(ow.GraphError, match=r"a function of its own, .*ow.from_optax\(optimizer\)"):
        ow.split(adopted("with_optax"), 2)


def test_as_a_decorator_it_reuses_what_the_step_donates_and_looks_at_numbers():
    def step(w, x, power):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** power))(w)
        return w - (0.1 if power == 2 else 0.2) * grad, loss

    decorated = ow.adopt(jax.jit(step, donate_argnums=0, static_argnums=2))
    w = jnp.ones(4)
    for power in (2, 3):
        given = w + 0
        found = decorated(given, X, power)
        assert given.is_deleted()
        np.testing.assert_allclose(found[0], step(w, X, power)[0], rtol=1e-5)


def test_as_a_decorator_it_fixes_the_number_it_looks_at_and_not_the_one_that_counts():
    traced = []

    @partial(jax.jit, static_argnums=1)
    def step(state, power):
        traced.append(power)
        loss = (lambda w: jnp.mean((X @ w) ** 2)) if power == 2 else (lambda w: jnp.mean(X @ w))
        return {"w": state["w"] - 0.1 * jax.grad(loss)(state["w"]), "count": state["count"] + 1}

    decorated = ow.adopt(step)
    state = decorated({"w": jnp.ones(4), "count": 0}, 2)
    known = len(traced)
    for _ in range(2):
        state = decorated(state, 2)
    assert (len(traced), int(state["count"])) == (known, 3)


DIFFERENTIATED = jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))


def in_a_loop(w, xs):
    def once(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), None

    return jax.lax.scan(once, w, xs)[0]


def twice(w, x):
    first = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    second = jax.grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w)
    return w - first - second


def of_a_copy(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w.astype(jnp.bfloat16)).astype(jnp.float32)


def loss_of(w, x):
    return jnp.mean((x @ w) ** 2)


def of_micro_batches(w, x):
    return w - sum(jax.grad(loss_of)(w, part) for part in (x[:4], x[4:]))


def of_each_example(w, x):
    return w - jax.vmap(jax.grad(loss_of), (None, 0))(w, x).mean(0)


def of_one_array_twice(w, x):
    grads = jax.grad(lambda a, b: jnp.mean((x @ a) * jnp.sin(x @ b)), (0, -1))(w, w)
    return w - grads[0] - grads[1]


def on_a_condition(w, x):
    return jax.lax.cond(w[0] > 0, lambda: w - jax.grad(loss_of)(w, x), lambda: w)


def of_complex_numbers(w, x):
    return w - jax.grad(lambda w: jnp.sum((w * x[0]) ** 2), holomorphic=True)(w + 0j).real


def of_two_players(w, x):
    return w - jax.grad(loss_of)(w, x) - jax.grad(loss_of)(2 * w, x)


def of_data(w, x):
    return w + 1.0, jax.grad(lambda x: jnp.mean((x @ w) ** 2))(x)


@pytest.mark.parametrize(
    ("step", "data", "words"),
    [
        (lambda w, x: w - DIFFERENTIATED(w, x)[1], X, "no call of jax.grad or jax.value_and_grad is seen"),
        (in_a_loop, np.stack([X, X]), r"within scan \(.*test_adopt.py:\d+\).* Of a loop over steps adopt"),
        (lambda w, x: w - x.sum(0), X, "no call of jax.grad"),
        (twice, X, r"computes gradients 2 times, at .*test_adopt.py:\d+ and .*one loss of both"),
        (of_micro_batches, X, r"2 times, at \S*test_adopt.py:\d+, .*write onward.accumulate\(program, 2\)"),
        (of_two_players, X, r"2 times, at \S*test_adopt.py:\d+, .*Make a step of each"),
        (of_each_example, X, r"within a vmap or a derivative \(.*test_adopt.py:\d+\).* in the step itself"),
        (on_a_condition, X, "gradients within cond"),
        (of_complex_numbers, X, "gradients with holomorphic"),
        (of_one_array_twice, X, "for 'w' in two arguments"),
        (of_a_copy, X, r"for bfloat16\[4\] .* is not an argument, but computed"),
        (of_data, X, "differentiates its loss for 'x'"),
        (jax.pmap(by_hand().step, axis_name="i"), None, "spread over devices by shard_map or pmap itself"),
    ],
    ids=[
        *("before", "loop", "none", "twice", "micro-batches", "players", "vmap", "cond", "complex"),
        *("one array twice", "copy", "data", "pmap"),
    ],
)
def test_what_cannot_be_adopted_is_told(step, data, words):
    args = (jnp.ones(4), data)
    if data is None:
        args = jax.tree.map(lambda x: np.stack([x, x]), (PARAMS, X, Y))
    with pytest.raises(ow.GraphError, match=words):
        ow.adopt(step, *args)
    assert jax.grad.__module__.startswith("jax"), "jax.grad is what it was"


class Trainer:
    rate = 0.1

    @partial(jax.jit, static_argnums=0)
    def method(self, w, x):
        return w - self.rate * grad(loss_of)(w, x)


@jax.jit
def jitted_gradients(w, x):
    return jax.value_and_grad(loss_of)(w, x)


def of_a_jitted_function(w, x):
    value, gradient = jitted_gradients(w, x)
    return w - 0.1 * gradient, value


def toward_targets_of_its_own(w, x):
    """The targets are computed of the same parameters before, and read within the loss as well: constants."""
    targets = jnp.tanh(x[::-1] @ w)

    def loss(v):
        return jnp.mean((jnp.tanh(x @ v) - targets + 0.1 * (x @ w)) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


@pytest.mark.parametrize(
    "step", [Trainer().method, of_a_jitted_function, toward_targets_of_its_own], ids=lambda f: f.__name__
)
def test_where_and_for_what_gradients_are_computed(step):
    w = jnp.arange(4.0)
    wanted = step(w, X)
    found = ow.adopt(step)(w, X)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    np.testing.assert_allclose(jitted_gradients(w, X)[0], loss_of(w, X), rtol=1e-5)


def test_other_threads_and_failures_find_jax_grad_as_it_is():
    held = jax.grad, jax.value_and_grad, grad, value_and_grad
    is_original = []

    def step(w, x):
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(lambda: jax.grad(loss_of)(jnp.ones(4), X)).result()
        is_original.append(jax.grad is held[0])
        return w - jax.grad(loss_of)(w, x) * elsewhere

    def failing(w, x):
        if jax.grad is not held[0]:
            raise ValueError("spoiled")
        return w - jax.grad(loss_of)(w, x)

    assert ow.adopt(step, jnp.ones(4), X).gradients
    assert is_original[0]
    assert not any(is_original[1:])
    with pytest.raises(ow.TraceError, match="spoiled"):
        ow.adopt(failing, jnp.ones(4), X)
    assert (jax.grad, jax.value_and_grad, grad, value_and_grad) == held


@pytest.mark.parametrize("merge", [ow.Sharded(), LocalSGD(2), DiLoCo(2)], ids=lambda m: type(m).__name__)
def test_a_merge_that_updates_by_itself_is_refused(merge):
    with pytest.raises(
        ow.GraphError, match="makes the update itself, for which it has to know the optimizer"
    ):
        ow.replicate(adopted("with_optax"), 2, merge)


def test_what_the_loss_decides_is_decided_once_for_all_micro_batches():
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(accumulation_size=2))

    def step(w, opt_state, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        updates, opt_state = optimizer.update(grad, opt_state, w, value=loss)
        return optax.apply_updates(w, updates), opt_state, {"loss": loss, "perplexity": jnp.exp(loss)}

    given = jnp.ones(4), optimizer.init(jnp.ones(4))
    program = ow.adopt(step, *given, X)
    with pytest.raises(ow.GraphError, match=r"low_rank: the update of 'step' was adopted .*\.from_optax"):
        ow.low_rank(program, rank=1)
    compiled = ow.compile(ow.accumulate(program, 2))
    with pytest.raises(ow.ArgumentError, match="w, opt_state: expected a tuple of these 2, and an array"):
        compiled.init(given[0])
    state, _ = compiled(compiled.init(given), X)
    for mine, theirs in zip(numbers(state.parameters), numbers(step(*given, X)[:2]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_modules_that_are_changed_in_place():
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    program = ow.accumulate(ow.adopt(step, model, optimizer, X, Y), 2)
    compiled = ow.compile(program)
    state, out = compiled(compiled.init(nnx.split((model, optimizer))[1]), X, Y)
    with pytest.raises(ow.ArgumentError, match="which it would change in place"):
        ow.adopt(step)(model, optimizer, X, Y)
    loss = step(model, optimizer, X, Y)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
    for mine, theirs in zip(numbers(state.parameters), numbers(nnx.state((model, optimizer))), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


SIZES = {"small_gpt": (1,)}  # two blocks, as the table of all has them, are for loops over layers


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        ("linen_mnist", "Average x8"),
        ("small_gpt", "guard"),
        ("ppo_update", "Average x8"),
        ("deep_q_learning", "Average x8"),
    ],
)
def test_published_steps_train_as_before(name, transform):
    case = PUBLISHED[name](*SIZES.get(name, ()))
    assert cell(case, ow.adopt(case.step, *case.state, *case.data), transform) == ("=", "")


def step_with_metrics(state, x, y):
    """A rate by Polyak, and what a loop adds up of the loss and other numbers of the batch."""

    def loss(w):
        errors = jnp.square(x @ w - y)
        return jnp.mean(errors), (jnp.sum(errors), jnp.max(errors), jnp.sum(errors < 1))

    (loss, (total, largest, small)), g = value_and_grad(loss, has_aux=True)(state["w"])
    metrics = {
        "sum": state["sum"] + total,
        "average": 0.9 * state["average"] + 0.1 * loss,
        "best": jnp.minimum(state["best"], loss),
        "largest": jnp.maximum(state["largest"], largest),
        "count": state["count"] + small,
        "perplexity": jnp.exp(loss),
    }
    return {"w": state["w"] - 0.1 * loss / (jnp.sum(g**2) + 1) * g, **metrics}, loss


def test_an_update_reads_the_loss_of_all_devices():
    """Also as a sum, a running mean and others of the numbers that the forward pass makes of the batch."""
    metrics = {"sum": 0.0, "average": 0.0, "best": np.inf, "largest": 0.0, "count": 0, "perplexity": 1.0}
    state = {"w": PARAMS["a"][:, :1], **metrics}
    program = ow.adopt(step_with_metrics, state, X, Y, carried="state")
    compiled = ow.compile(ow.replicate(program, 4))
    ours, expected = compiled.init(state), state
    for _ in range(STEPS):
        ours, out = compiled(ours, X, Y)
        expected, loss = step_with_metrics(expected, X, Y)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(ours[f"state/{name}"], value, rtol=1e-5, err_msg=name)


def test_an_update_that_reads_more_than_devices_share_is_refused():
    def step(w, x, y):
        loss, errors = jnp.mean(jnp.square(x @ w - y)), jnp.abs(x @ w - y)
        return w - jnp.median(errors) * grad(lambda w: jnp.mean(jnp.square(x @ w - y)))(w), loss

    program = ow.adopt(step, PARAMS["a"][:, :1], X, Y)
    message = r"the update reads .* beside the gradients, which every device has.*ow\.partition\(program"
    with pytest.warns(match="examples"), pytest.raises(ow.GraphError, match=message):
        ow.replicate(program, 4)
