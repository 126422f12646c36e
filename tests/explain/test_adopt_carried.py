"""The results of an adopted step that are next values of its arguments: by place, name and ``carried=``."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onward as ow

KEYS = jax.random.split(jax.random.key(0), 3)
X, Y, W = (jax.random.normal(key, shape) for key, shape in zip(KEYS, ((8, 4), (8,), (4,)), strict=True))
ZERO, STEPS = jnp.zeros(4), 3
pytestmark = pytest.mark.usefixtures("earlier_objects_frozen")


def mean_square(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def found(w, x, y):
    return jax.value_and_grad(mean_square)(w, x, y)


def nesterov(x_k, y_k, x, y):
    """Two sequences, each of which begins at the other."""
    v, g = found(y_k, x, y)
    new = y_k - 0.05 * g
    return new, new + 0.5 * (new - x_k), v


def delayed(w, g, x, y):
    """Moves by the gradient of the step before."""
    v, now = found(w, x, y)
    return w - 0.05 * g, now, v


def proximal(w, centre, x, y):
    """One step from a fixed centre."""
    v, g = found(w, x, y)
    return centre - 0.05 * g, centre, v


def leap(now, before, x, y):
    v, g = found(now, x, y)
    return before - 0.05 * g, now, v


def follow_the_leader(w, z, x, y):
    """Parameters made of the sum of all gradients."""
    v, g = found(w, x, y)
    z = z + g
    return jnp.where(jnp.abs(z) < 0.1, 0, -0.05 * z), z, v


def lagged(q, target, x, y):
    """A target that is the network of the step before."""
    v, g = jax.value_and_grad(lambda q: mean_square(q, x, y) + jnp.sum((q - target) ** 2))(q)
    return q - 0.05 * g, q, v


def double(a, b, x, y):
    """Two networks that swap roles."""
    v, g = jax.value_and_grad(lambda a: mean_square(a, x, y) + jnp.sum((a - b) ** 2))(a)
    return b, a - 0.05 * g, v


def last_metrics(w, metrics, x, y):
    v, g = found(w, x, y)
    return w - jnp.where(v < metrics["loss"], 0.1, 0.01) * g, {"loss": v}, v


POSITIONAL = {
    nesterov: (W, W),
    delayed: (W, ZERO),
    proximal: (W, 2 * W),
    leap: (W, W / 2),
    follow_the_leader: (W, ZERO),
    lagged: (W, 2 * W),
    double: (W, 2 * W),
    last_metrics: (W, {"loss": jnp.float32(jnp.inf)}),
}
IDS = [step.__name__ for step in POSITIONAL]


def names_of(step):
    return [*step.__code__.co_varnames[:2]]


def expect_equal(step, state, carried=None):
    """Adopt a step, and compare its training with that of the jitted step."""
    compiled = ow.compile(ow.adopt(step, *state, X, Y, carried=carried))
    ours = compiled.init(state if len(state) > 1 else state[0])
    jitted, theirs = jax.jit(step), state
    for _ in range(STEPS):
        ours, out = compiled(ours, X, Y)
        *theirs, loss = jitted(*theirs, X, Y)
    pairs = zip(jax.tree.leaves(ours.parameters), jax.tree.leaves(theirs), strict=True)
    for mine, other in pairs:
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)


@pytest.mark.parametrize("step", POSITIONAL, ids=IDS)
@pytest.mark.parametrize("look", [ow.adopt, ow.inspect])
def test_place_and_dependence_that_contradict_each_other_are_asked_about(look, step):
    first, second = names_of(step)
    with pytest.raises(ow.ArgumentError, match=rf"carried=\['{first}', '{second}'\] if"):
        look(step, *POSITIONAL[step], X, Y)


@pytest.mark.parametrize("step", POSITIONAL, ids=IDS)
def test_who_names_the_arguments_is_believed(step):
    expect_equal(step, POSITIONAL[step], names_of(step))


def in_a_dict(step):
    names = names_of(step)

    def of_dict(s, x, y):
        *new, v = step(*(s[name] for name in names), x, y)
        return dict(zip(names, new, strict=True)), v

    return of_dict


class Two(NamedTuple):
    first: Any
    second: Any


def in_a_named_tuple(step):
    def of_two(s, x, y):
        first, second, v = step(*s, x, y)
        return Two(first, second), v

    return of_two


CONTAINED = [nesterov, delayed, proximal, leap, follow_the_leader]


@pytest.mark.parametrize("step", CONTAINED, ids=[step.__name__ for step in CONTAINED])
def test_a_container_that_comes_back_with_its_keys_is_replaced_part_by_part(step):
    values = POSITIONAL[step]
    expect_equal(in_a_dict(step), (dict(zip(names_of(step), values, strict=True)),))
    program = ow.adopt(in_a_named_tuple(step), Two(*values), X, Y, carried=["s"])
    assert [v.name for v in program.state] == ["s/first", "s/second"]


def test_a_container_may_be_named():
    expect_equal(in_a_dict(delayed), ({"w": W, "g": ZERO},), "s")


@pytest.mark.parametrize("step", [nesterov, delayed, double], ids=["nesterov", "delayed", "double"])
def test_as_a_decorator_the_results_keep_their_places(step):
    adopted, jitted = ow.adopt(step), jax.jit(step)
    ours = theirs = POSITIONAL[step]
    for _ in range(STEPS):
        (*ours, mine), (*theirs, other) = adopted(*ours, X, Y), jitted(*theirs, X, Y)
    np.testing.assert_allclose(jnp.stack(ours), jnp.stack(theirs), rtol=1e-5)
    np.testing.assert_allclose(mine, other, rtol=1e-5)


RULES = {
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "optimistic": lambda: optax.optimistic_gradient_descent(0.1),
}


@pytest.mark.parametrize("carried", [None, ["params", "opt_state"]], ids=["found", "named"])
@pytest.mark.parametrize("rule", RULES)
def test_a_state_that_is_not_made_of_the_state_before_is_carried_on(rule, carried):
    optimizer = RULES[rule]()

    def step(params, opt_state, x, y):
        v, g = found(params, x, y)
        updates, opt_state = optimizer.update(g, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, v

    expect_equal(step, (W, optimizer.init(W)), carried)


def last_loss(w, last, x, y):
    """A rate that depends on whether the loss fell."""
    v, g = found(w, x, y)
    return w - jnp.where(v < last, 0.1, 0.01) * g, v


def test_the_last_loss_is_carried_on_if_that_is_said():
    compiled = ow.compile(ow.adopt(last_loss, W, jnp.float32(9), X, Y))
    with pytest.raises(ow.ArgumentError, match=r"w alone is carried on, .* name all that is: ow\.adopt"):
        compiled.init((W, jnp.float32(9)))
    program = ow.adopt(last_loss, W, jnp.float32(9), X, Y, carried=["w", "last"])
    compiled = ow.compile(program)
    ours, theirs = compiled.init((W, jnp.float32(9))), (W, jnp.float32(9))
    for _ in range(STEPS):
        ours, theirs = compiled(ours, X, Y)[0], last_loss(*theirs, X, Y)
    for mine, other in zip(ours.parameters, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


def loss_first(step):
    def turned(first, second, x, y):
        *new, v = step(first, second, x, y)
        return v, *new

    return turned


def test_results_behind_the_loss_count_in_their_order():
    program = ow.adopt(loss_first(follow_the_leader), W, ZERO, X, Y, carried=["first", "second"])
    assert [v.name for v in program.parameters] == ["first"]
    assert len(program.next_state) == 2


def test_three_behind_the_loss_are_no_contradiction():
    """Each result stands in the place of the argument before."""

    def step(a, b, c, x, y):
        v, g = found(a, x, y)
        total = a + b + c - 0.1 * g
        return v, a + 0.1 * total, b + 0.2 * total, c + 0.3 * total

    program = ow.adopt(step, W, 2 * W, 3 * W, X, Y)
    compiled = ow.compile(program)
    state, _ = compiled(compiled.init((W, 2 * W, 3 * W)), X, Y)
    np.testing.assert_allclose(state.parameters, step(W, 2 * W, 3 * W, X, Y)[1:], rtol=1e-5)


def test_roles_that_swap_behind_the_loss():
    step = loss_first(double)
    program = ow.adopt(step, W, 2 * W, X, Y, carried=["first", "second"])
    compiled = ow.compile(program)
    state, _ = compiled(compiled.init((W, 2 * W)), X, Y)
    np.testing.assert_allclose(state.parameters, step(W, 2 * W, X, Y)[1:], rtol=1e-5)


def test_a_state_behind_the_loss_is_found():
    optimizer = RULES["zero_nans"]()

    def step(params, opt_state, x, y):
        v, g = found(params, x, y)
        updates, opt_state = optimizer.update(g, opt_state, params)
        return v, optax.apply_updates(params, updates), opt_state

    program = ow.adopt(step, W, optimizer.init(W), X, Y)
    assert {v.name for v in program.next_state} == {"params", "opt_state/0/found_nan"}


def test_next_values_the_other_way_around_are_told_of():
    step = loss_first(nesterov)
    with pytest.warns(UserWarning, match=r"other way around .* Return every result in the place"):
        ow.adopt(step, W, W, X, Y)
    with pytest.raises(ow.ArgumentError, match=r"other way around .* Return every result in the place"):
        ow.adopt(step, W, W, X, Y, carried=["first", "second"])


def test_results_in_a_dict_have_the_names_of_their_arguments():
    def step(w, m, x, y):
        v, g = found(w, x, y)
        m = 0.9 * m + g
        return {"loss": v, "m": m, "w": w - 0.1 * m}

    def swapped(w, m, x, y):
        new = step(w, m, x, y)
        return {**new, "m": new["w"], "w": new["m"]}

    assert {v.name for v in ow.adopt(step, W, ZERO, X, Y).next_state} == {"w", "m"}
    with pytest.raises(ow.ArgumentError, match="in the place of its argument"):
        ow.adopt(swapped, W, ZERO, X, Y)


def test_several_that_are_kept_back_are_asked_about_at_once():
    def step(w, before, long_before, x, y):
        v, g = found(w, x, y)
        return w - 0.1 * g + 0.1 * (before - long_before), w, before, v

    with pytest.raises(ow.ArgumentError, match=r"carried=\['w', 'before', 'long_before'\] if all are\."):
        ow.adopt(step, W, W, W, X, Y)


def gradients_beside(params, x, y):
    v, g = found(params["w"], x, y)
    return {"w": params["w"] - 0.1 * g}, {"w": g}, v


def batch_comes_back(w, batch, y):
    v, g = found(w, batch["x"], y)
    return w - 0.1 * g, batch, v


def norm_in_the_place_of_the_rate(w, rate, x, y):
    v, g = found(w, x, y)
    return w - rate * g, jnp.linalg.norm(g), v


@pytest.mark.parametrize(
    ("step", "args", "state"),
    [
        (gradients_beside, ({"w": W}, X, Y), "params/w"),
        (batch_comes_back, (W, {"x": X}, Y), "w"),
        (norm_in_the_place_of_the_rate, (W, 0.1, X, Y), "w"),
    ],
)
def test_results_that_only_look_alike_replace_nothing(step, args, state):
    assert [v.name for v in ow.adopt(step, *args).state] == [state]


def momentum(w, m, x, y):
    v, g = found(w, x, y)
    m = 0.9 * m + g
    return v, g, w - 0.05 * m, m


BESIDE = {
    "a gradient first": lambda v, g, w, m: (g, w, m, v),
    "a gradient first, in a tuple": lambda v, g, w, m: ((g, w, m), v),
    "an update first": lambda v, g, w, m: (0.05 * m, w, m, v),
    "an update last": lambda v, g, w, m: (w, m, v, 0.05 * m),
    "an update among metrics": lambda v, g, w, m: (w, m, {"loss": v, "update": 0.05 * m}),
    "a norm among metrics": lambda v, g, w, m: (w, m, {"loss": v, "w": w / jnp.linalg.norm(w)}),
    "metrics of that name first": lambda v, g, w, m: ({"w": abs(w), "m": g, "loss": v}, (w, m)),
    "metrics of that name between": lambda v, g, w, m: (w, {"m": 2 * m, "loss": v}, m),
}


@pytest.mark.parametrize("carried", [None, ["w", "m"]], ids=["found", "said"])
@pytest.mark.parametrize("returned", BESIDE.values(), ids=BESIDE)
def test_results_beside_the_next_values_are_not_taken_for_them(returned, carried):
    """Made of the next values they are results, wherever they stand, whatever they are called."""

    def step(w, m, x, y):
        return returned(*momentum(w, m, x, y))

    compiled = ow.compile(ow.adopt(step, W, ZERO, X, Y, carried=carried))
    ours, w, m = compiled.init((W, ZERO)), W, ZERO
    for _ in range(STEPS):
        ours, _ = compiled(ours, X, Y)
        _, _, w, m = jax.jit(momentum)(w, m, X, Y)
    np.testing.assert_allclose(ours["w"], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours["m"], m, rtol=1e-5, atol=1e-6)


def test_of_parameters_alone_the_last_is_meant_that_is_made_of_the_argument_itself():
    def step(w, x, y):
        v, g = found(w, x, y)
        update = -0.05 * (g + 0.1 * w)
        return update, w + update, v, (w + update) / 2

    compiled = ow.compile(ow.adopt(step, W, X, Y))
    state, _ = compiled(compiled.init(W), X, Y)
    np.testing.assert_allclose(state["w"], step(W, X, Y)[1], rtol=1e-6)
