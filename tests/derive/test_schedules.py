"""Every schedule at every step against its paper's closed form in plain Python floats, and against optax."""

import math
import pickle
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onward as ow
from onward.derive import schedules as schedule

STEPS = np.arange(70)
LAST = 2**31 - 1


def line(a, b, x):
    return a + (b - a) * x


def half_wave(a, b, x):
    return b + (a - b) * (1 + math.cos(math.pi * x)) / 2


def phases(n, *parts):
    """The value at step n of parts (steps, begin, end, curve), one after the other."""
    for steps, a, b, curve in parts:
        if n < steps:
            return curve(a, b, n / steps)
        n -= steps
    return b


def cycle_polynomial(n):
    whole = 20 * max(1, math.ceil(n / 20))
    return 0.1 + 0.9 * (1 - n / whole) ** 2


def sgdr(n, every, growth, rate, end):
    length, peak = every, 1.0
    while n >= length:
        n, length, peak = n - length, length * growth, peak * rate
    return half_wave(max(peak, end), end, n / length)


def triangle(n, every, up):
    place = n % every
    return place / up if place < up else (every - place) / (every - up)


def smith(n, stepsize):
    """The formula of Smith's paper."""
    cycle = math.floor(1 + n / (2 * stepsize))
    return max(0.0, 1 - abs(n / stepsize - 2 * cycle + 1))


def vaswani(n, d_model, warmup):
    return d_model**-0.5 * min((n + 1) ** -0.5, (n + 1) * warmup**-1.5)


CASES = {
    "constant": (schedule.constant(0.3), lambda n: 0.3),
    "linear, down": (schedule.linear(1.0, 0.1, steps=49), lambda n: line(1.0, 0.1, min(n / 49, 1))),
    "linear, up": (schedule.linear(0.0, 3.0, steps=7), lambda n: line(0.0, 3.0, min(n / 7, 1))),
    "polynomial": (
        schedule.polynomial(1.0, 0.1, steps=40, power=0.9),
        lambda n: 0.1 + 0.9 * (1 - min(n / 40, 1)) ** 0.9,
    ),
    "polynomial, again": (schedule.polynomial(1.0, 0.1, steps=20, power=2, cycle=True), cycle_polynomial),
    "cosine": (schedule.cosine(2.0, steps=50), lambda n: half_wave(2.0, 0.0, min(n / 50, 1))),
    "cosine, warmup": (
        schedule.cosine(2.0, steps=50, warmup=11, begin=0.5, end=0.1),
        lambda n: phases(n, (11, 0.5, 2.0, line), (39, 2.0, 0.1, half_wave)),
    ),
    "cosine, power": (
        schedule.cosine(2.0, steps=50, end=0.2, power=1.5),
        lambda n: 0.2 + 1.8 * (half_wave(1.0, 0.0, min(n / 50, 1))) ** 1.5,
    ),
    "wsd": (
        schedule.wsd(1.0, steps=60, warmup=10, decay=21),
        lambda n: phases(n, (10, 0, 1, line), (29, 1, 1, line), (21, 1, 0, line)),
    ),
    "wsd, cosine, no warmup": (
        schedule.wsd(1.0, steps=60, decay=21, end=0.1, shape="cosine"),
        lambda n: phases(n, (39, 1, 1, line), (21, 1, 0.1, half_wave)),
    ),
    "wsd, sqrt, nothing stable": (
        schedule.wsd(1.0, steps=60, warmup=20, decay=40, begin=0.2, shape="sqrt"),
        lambda n: phases(n, (20, 0.2, 1, line), (40, 1, 0, lambda a, b, x: 1 - math.sqrt(x))),
    ),
    "exponential": (schedule.exponential(2.0, rate=0.3, every=7), lambda n: 2 * 0.3 ** (n / 7)),
    "exponential, staircase": (
        schedule.exponential(2.0, rate=0.3, every=7, staircase=True),
        lambda n: 2 * 0.3 ** (n // 7),
    ),
    "exponential, end": (
        schedule.exponential(2.0, rate=0.3, every=7, end=0.5),
        lambda n: max(0.5, 2 * 0.3 ** (n / 7)),
    ),
    "exponential, growing": (
        schedule.exponential(1e-6, rate=1.5, every=1, end=10.0),
        lambda n: min(10.0, 1e-6 * 1.5**n),
    ),
    "natural_exp": (schedule.natural_exp(2.0, rate=0.5, every=3), lambda n: 2 * math.exp(-0.5 * n / 3)),
    "natural_exp, staircase": (
        schedule.natural_exp(2.0, rate=0.5, every=3, staircase=True, end=0.01),
        lambda n: max(0.01, 2 * math.exp(-0.5 * (n // 3))),
    ),
    "inverse_time": (schedule.inverse_time(2.0, rate=0.5, every=3), lambda n: 2 / (1 + 0.5 * n / 3)),
    "inverse_time, staircase": (
        schedule.inverse_time(2.0, rate=0.5, every=3, staircase=True, end=0.5),
        lambda n: max(0.5, 2 / (1 + 0.5 * (n // 3))),
    ),
    "noam": (schedule.noam(512, warmup=20, scale=2.0), lambda n: 2 * vaswani(n, 512, 20)),
    "restarts": (schedule.restarts(1.0, every=9), lambda n: sgdr(n, 9, 1, 1.0, 0.0)),
    "restarts, falling": (
        schedule.restarts(1.0, every=9, rate=0.5, end=0.2),
        lambda n: sgdr(n, 9, 1, 0.5, 0.2),
    ),
    "restarts, growing": (
        schedule.restarts(1.0, every=5, growth=2, rate=0.7, end=0.1),
        lambda n: sgdr(n, 5, 2, 0.7, 0.1),
    ),
    "one_cycle": (
        schedule.one_cycle(1.0, steps=50),
        lambda n: phases(n, (15, 0.04, 1.0, half_wave), (35, 1.0, 4e-6, half_wave)),
    ),
    "one_cycle, three lines": (
        schedule.one_cycle(1.0, steps=60, warmup=20, decay=15, begin=0.2, end=0.01, shape="linear"),
        lambda n: phases(n, (20, 0.2, 1.0, line), (25, 1.0, 0.2, line), (15, 0.2, 0.01, line)),
    ),
    "cyclic": (schedule.cyclic(0.1, 1.0, every=16), lambda n: 0.1 + 0.9 * smith(n, 8)),
    "cyclic, halved": (
        schedule.cyclic(0.1, 1.0, every=16, mode="triangular2"),
        lambda n: 0.1 + 0.9 * smith(n, 8) / 2 ** (n // 16),
    ),
    "cyclic, exp_range": (
        schedule.cyclic(0.1, 1.0, every=16, mode="exp_range", rate=0.98),
        lambda n: 0.1 + 0.9 * smith(n, 8) * 0.98**n,
    ),
    "cyclic, the other way": (
        schedule.cyclic(0.95, 0.85, every=15, warmup=4),
        lambda n: 0.95 - 0.1 * triangle(n, 15, 4),
    ),
    "warmup of a number": (schedule.warmup(0.5, steps=7), lambda n: 0.5 * min(n / 7, 1)),
    "warmup of a schedule": (
        schedule.warmup(schedule.exponential(2.0, rate=0.9), steps=7, begin=0.5),
        lambda n: 0.5 + 1.5 * n / 7 if n < 7 else 2 * 0.9 ** (n - 7),
    ),
    "piecewise": (
        schedule.piecewise([1.0, 0.1, 0.3], boundaries=[10, 11]),
        lambda n: 1.0 if n < 10 else 0.1 if n < 11 else 0.3,
    ),
    "join": (
        schedule.join([schedule.linear(0.0, 1.0, steps=5), lambda n: 1 / (n + 1), 0.25], boundaries=[8, 40]),
        lambda n: min(n / 5, 1) if n < 8 else 1 / (n - 7) if n < 40 else 0.25,
    ),
    "scaled": (3 * schedule.linear(1.0, 0.1, steps=49), lambda n: 3 * line(1.0, 0.1, min(n / 49, 1))),
}
SCHEDULES = {name: case[0] for name, case in CASES.items()}


def compiled(at, steps):
    return jax.jit(at)(jnp.asarray(steps, jnp.int32))


@cache
def at_steps(name):
    """Not compiled: operation by operation."""
    return SCHEDULES[name](STEPS)


PLACES = (0, 5, 7, 69, -1, 10**6, LAST - 1, LAST)


@cache
def at_places():
    """Of all schedules: the values at the places, by one compiled function of a step; at STEPS under vmap."""

    def values(n):
        return {name: at(n) for name, at in SCHEDULES.items()}

    one, every = (jax.jit(f) for f in (values, jax.vmap(values)))
    return [one(np.int32(n)) for n in PLACES], every(np.int32(STEPS))


def close(found, expected, rtol=3e-6, atol=1e-7):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", CASES)
def test_every_step_of_the_closed_form(name):
    reference, found = CASES[name][1], at_steps(name)
    assert found.dtype == jnp.float32
    assert found.shape == STEPS.shape
    close(found, [reference(int(n)) for n in STEPS])


@pytest.mark.parametrize("name", CASES)
def test_a_step_as_an_optimizer_gives_it_and_far_beyond(name):
    """One compiled function of an int32 scalar, also under vmap and at steps out of any range."""
    every, (singles, swept) = np.asarray(at_steps(name)), at_places()
    found = [values[name] for values in singles]
    assert {(x.dtype, x.shape) for x in found} == {(np.dtype("float32"), ())}
    close(found[:5], every[[0, 5, 7, 69, 0]], rtol=1e-6)
    assert np.all(np.isfinite(found))
    assert np.all(np.asarray(found) >= 0)
    close(swept[name], every, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.int16, np.int64, np.uint64, np.float32, np.float64, jnp.bfloat16]
)
def test_a_step_of_any_kind(dtype):
    at = schedule.linear(0.0, 64.0, steps=64)
    places = np.array([[0, 5], [7, 69]])
    np.testing.assert_array_equal(at(places.astype(dtype)), [[0, 5], [7, 64]])
    np.testing.assert_array_equal(at(jnp.asarray(places.astype(dtype))), [[0, 5], [7, 64]])


def test_steps_out_of_range_are_the_nearest():
    at = schedule.linear(0.0, 64.0, steps=64)
    assert [float(at(n)) for n in (-7, -0.5, 2.9, np.int64(3), 2**40, 1e300)] == [0, 0, 2, 3, 64, 64]
    with jax.enable_x64(True):
        assert float(at(jnp.int64(2**40))) == 64
        assert at(jnp.int64(3)).dtype == jnp.float64


@pytest.mark.parametrize("name", ["cosine, warmup", "restarts, growing", "cyclic, exp_range"])
def test_float64_with_x64(name):
    at, every = SCHEDULES[name], at_steps(name)
    with jax.enable_x64(True):
        wide = jax.jit(lambda n: at(n))(jnp.asarray(STEPS))
        assert wide.dtype == jnp.float64
        close(wide, np.asarray(every), rtol=1e-6)


END = 49
ENDS = {
    "linear": (schedule.linear(0.7, 0.1, steps=END), 0.7, 0.1),
    "polynomial": (schedule.polynomial(0.7, 0.1, steps=END, power=3), 0.7, 0.1),
    "cosine": (schedule.cosine(0.7, steps=END, warmup=7, begin=0.3, end=0.1), 0.3, 0.1),
    "wsd": (schedule.wsd(0.7, steps=END, warmup=7, decay=7, begin=0.3, end=0.1), 0.3, 0.1),
    "one_cycle": (schedule.one_cycle(0.7, steps=END, begin=0.3, end=0.1), 0.3, 0.1),
    "warmup": (schedule.warmup(0.1, steps=END, begin=0.7), 0.7, 0.1),
}


@cache
def at_ends():
    every = jax.jit(lambda n: {name: at(n) for name, (at, *_) in ENDS.items()})
    return every(np.int32([0, END, END + 1, LAST]))


@pytest.mark.parametrize("name", ENDS)
def test_both_ends_are_exact_when_compiled(name):
    at, first, last = ENDS[name]
    np.testing.assert_array_equal(at_ends()[name], np.float32([first, last, last, last]))
    if name == "wsd":
        np.testing.assert_array_equal(compiled(at, [7, 8, 14, 41, 42]), np.float32([0.7] * 5))


OPTAX = {
    "linear": (schedule.linear(1.0, 0.1, steps=40), optax.linear_schedule(1.0, 0.1, 40)),
    "polynomial": (
        schedule.polynomial(1.0, 0.1, steps=40, power=2),
        optax.polynomial_schedule(1.0, 0.1, 2, 40),
    ),
    "exponential": (
        schedule.exponential(1.0, rate=0.5, every=10, end=0.1),
        optax.exponential_decay(1.0, 10, 0.5, end_value=0.1),
    ),
    "exponential, staircase": (
        schedule.exponential(1.0, rate=0.5, every=10, staircase=True),
        optax.exponential_decay(1.0, 10, 0.5, staircase=True),
    ),
    "cosine": (schedule.cosine(2.0, steps=40, end=0.2), optax.cosine_decay_schedule(2.0, 40, 0.1)),
    "cosine, warmup": (
        schedule.cosine(2.0, steps=40, warmup=8, begin=0.1, end=0.2),
        optax.warmup_cosine_decay_schedule(0.1, 2.0, 8, 40, 0.2),
    ),
    "cosine, power": (
        schedule.cosine(2.0, steps=40, power=2),
        optax.cosine_decay_schedule(2.0, 40, exponent=2),
    ),
    "restarts": (
        schedule.restarts(1.0, every=10, growth=2, rate=0.5),
        optax.join_schedules(
            [optax.cosine_decay_schedule(0.5**k, 10 * 2**k) for k in range(3)], boundaries=[10, 30]
        ),
    ),
    "one_cycle": (schedule.one_cycle(1.0, steps=50), optax.cosine_onecycle_schedule(50, 1.0)),
    "one_cycle, linear": (
        schedule.one_cycle(1.0, steps=60, decay=9, shape="linear"),
        optax.linear_onecycle_schedule(60, 1.0),
    ),
    "warmup": (schedule.warmup(2.0, steps=8), optax.warmup_constant_schedule(0.0, 2.0, 8)),
    "warmup, exponential": (
        schedule.warmup(schedule.exponential(2.0, rate=0.5, every=10), steps=8),
        optax.warmup_exponential_decay_schedule(0.0, 2.0, 8, 10, 0.5),
    ),
    "piecewise": (
        schedule.piecewise([1.0, 0.5, 0.05], boundaries=[10, 20]),
        optax.piecewise_constant_schedule(1.0, {10: 0.5, 20: 0.1}),
    ),
    "join": (
        schedule.join([0.5, schedule.linear(1.0, steps=10)], boundaries=[20]),
        optax.join_schedules([optax.constant_schedule(0.5), optax.linear_schedule(1.0, 0.0, 10)], [20]),
    ),
}


@cache
def said():
    """By us and by optax at each of the steps."""

    def both(n):
        return {name: (ours(n), theirs(n)) for name, (ours, theirs) in OPTAX.items()}

    return jax.jit(jax.vmap(both))(np.int32(STEPS))


@pytest.mark.parametrize("name", OPTAX)
def test_optax_says_the_same(name):
    ours, theirs = said()[name]
    close(ours, theirs, atol=2e-7)


# ------------------------------------------------------------------------------------ large numbers of steps


def test_the_last_steps_of_two_billion_are_not_one():
    """A float32 position would be 1 for the last 64 steps, and equal for up to 128 in a row."""
    before_end = LAST - np.array([0, 1, 2, 100])
    close(compiled(schedule.linear(1.0, steps=LAST), before_end), np.array([0, 1, 2, 100]) / LAST, atol=0)
    close(compiled(schedule.linear(0.0, 1.0, steps=LAST), np.arange(3)), np.arange(3) / LAST, atol=0)
    expected = np.sin(np.pi / 2 * np.array([0, 1, 2, 100]) / LAST) ** 2
    close(compiled(schedule.cosine(1.0, steps=LAST), before_end), expected, atol=0)
    close(schedule.cosine(1.0, steps=LAST, warmup=LAST - 10)(LAST - 5), 0.5, atol=0)


def test_places_in_late_cycles_are_exact():
    n = LAST - np.arange(300)
    close(compiled(schedule.cyclic(0.0, 1.0, every=100), n), [smith(int(k), 50) for k in n])
    close(compiled(schedule.restarts(1.0, every=100), n), [sgdr(int(k) % 100, 100, 1, 1.0, 0.0) for k in n])
    warm = schedule.join([0.1, schedule.linear(1.0, steps=300)], boundaries=[LAST - 299])
    close(compiled(warm, n), (n - LAST + 299) / 300 * -1.0 + 1.0)


def test_a_growing_cycle_at_every_restart():
    at = schedule.restarts(1.0, every=1000, growth=3, rate=0.5)
    starts = [1000 * (3**k - 1) // 2 for k in range(14)]
    assert starts[-1] < LAST
    close(compiled(at, starts), [0.5**k for k in range(14)])
    before = np.array(starts[1:]) - 1
    close(compiled(at, before), [sgdr(int(n), 1000, 3, 0.5, 0.0) for n in before], rtol=2e-3, atol=1e-9)


def test_a_rate_close_to_one_keeps_its_digits():
    """As a float32, 0.999999 is 0.99999899: 2.7 % off after a million steps; optax is."""
    n = 10**6
    assert float(schedule.exponential(1.0, rate=0.999999)(n)) == pytest.approx(0.999999**n, rel=1e-6)
    assert float(optax.exponential_decay(1.0, 1, 0.999999)(n)) != pytest.approx(0.999999**n, rel=1e-2)


# ------------------------------------------------------------------------------------ objects


@pytest.mark.parametrize("name", CASES)
def test_equal_by_value_and_readable(name):
    at = SCHEDULES[name]
    if name != "join":  # it holds a lambda
        again = eval(repr(at), vars(schedule))
        assert again == at
        assert hash(again) == hash(at)
        assert pickle.loads(pickle.dumps(at)) == at
    assert len({at, *SCHEDULES.values()}) == len(SCHEDULES)
    with pytest.raises(AttributeError):
        at.steps = 3


def test_what_is_shown():
    assert repr(schedule.cosine(1e-3, steps=1000, warmup=100)) == "cosine(0.001, steps=1000, warmup=100)"
    assert repr(schedule.linear(1, steps=3)) == "linear(1.0, steps=3)"
    assert repr(2 * schedule.warmup(0.1, steps=5)) == "2.0 * warmup(constant(0.1), steps=5)"
    assert schedule.linear(np.float32(0.5), steps=np.int64(3)) == schedule.linear(jnp.float32(0.5), steps=3)
    assert schedule.piecewise([1, 2], boundaries=[3]) == schedule.piecewise((1.0, 2.0), boundaries=(3,))


# ------------------------------------------------------------------------------------ in a Program


def rates(optimizer, count, name="learning_rate"):
    step = ow.compile(optimizer.minimize(lambda w: w, jnp.float32(0.0)), fetch=[name])
    state, found = step.init(jnp.float32(0.0)), []
    for _ in range(count):
        state, out = step(state)
        found.append(float(out[name]))
    return found, float(state.parameters)


@pytest.mark.parametrize(
    "name", ["cosine, warmup", "wsd", "restarts, growing", "one_cycle", "cyclic, halved", "join", "noam"]
)
def test_minimize_reads_the_value_of_each_step(name):
    at, reference = CASES[name]
    found, parameter = rates(ow.SGD(at), 12)
    expected = [reference(n) for n in range(12)]
    close(found, expected)
    assert parameter == pytest.approx(-sum(expected), rel=1e-5)


def test_any_hyperparameter_can_follow_one():
    at = schedule.cyclic(0.95, 0.85, every=4)
    found, _ = rates(ow.Momentum(0.1, at), 5, "momentum")
    close(found, [0.95, 0.9, 0.85, 0.9, 0.95])


# ------------------------------------------------------------------------------------ plateau


def torch_says(values, patience, cooldown, rate):
    """ReduceLROnPlateau as its documentation states it, written for the whole list; it waits one more."""
    best, bad, cooling, value, seen = math.inf, 0, 0, 1.0, []
    for v in values:
        bad = 0 if v < best else bad + 1
        best = min(best, v)
        if cooling:
            cooling, bad = cooling - 1, 0
        if bad > patience - 1:
            value, cooling, bad = value * rate, cooldown, 0
        seen.append(value)
    return seen


@pytest.fixture(scope="module")
def step():
    return ow.compile(ow.Momentum(1.0).minimize(lambda w: w**2, jnp.float32(1.0)), donate=False)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("patience", "cooldown"), [(1, 0), (2, 0), (2, 3), (4, 1)])
def test_plateau_lowers_when_torch_does(step, mode, patience, cooldown):
    values = np.random.default_rng(patience).normal(size=60) / np.sqrt(np.arange(60) + 1)
    lower = schedule.plateau(rate=0.9, patience=patience, cooldown=cooldown, threshold=0, mode=mode)
    state, found = step.init(jnp.float32(1.0)), []
    for value in values if mode == "min" else -values:
        state = lower.update(state, value)
        found.append(float(state["learning_rate"]))
    expected = torch_says(values, patience, cooldown, 0.9)
    assert len(set(expected)) > 3
    close(found, expected)


def test_plateau_changes_a_running_training_without_compiling(step):
    lower = schedule.plateau(rate=0.5, patience=1, end=0.2)
    state, _ = step(step.init(jnp.float32(1.0)))
    compilations, found = step.compilations, []
    for _ in range(5):
        state, _ = step(state)
        state = lower.update(state, 1.0)
        found.append(float(state["learning_rate"]))
    close(found, [1.0, 0.5, 0.25, 0.2, 0.2])
    assert step.compilations == compilations


@pytest.mark.parametrize(
    ("values", "threshold", "waited"),
    [
        ([1.0, 0.95], 0.1, 1),
        ([1.0, 0.89], 0.1, 0),
        ([-1.0, -1.05], 0.1, 1),  # torch would take anything below -0.9
        ([-1.0, -0.95], 0.1, 1),
        ([-1.0, -1.11], 0.1, 0),
        ([1.0, math.nan], 0, 1),
        ([math.nan, math.inf, 5.0], 0, 0),
    ],
)
def test_what_plateau_takes_for_an_improvement(values, threshold, waited):
    lower = schedule.plateau(threshold=threshold)
    heard = lower.heard
    for value in values:
        heard = lower.after(heard, value)
    assert heard.waited == waited


def network():
    return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 2)), 1), ow.data("y", (None, 1)))


BATCHES = [(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))]


def test_plateau_as_a_callback_and_resumed():
    trainer = ow.Trainer(ow.Model(network), ow.Momentum(0.0, momentum=0.8))  # nothing is learned
    lower = schedule.plateau(patience=2, rate=0.5, name="momentum")
    seen = []
    look = lambda event: seen.append(float(trainer["momentum"])) if event.kind == "epoch" else None  # noqa: E731
    trainer.train(BATCHES, epochs=4, test=BATCHES, callbacks=[lower, look])
    close(seen, [0.8, 0.8, 0.8, 0.4])
    again = schedule.plateau(patience=2, rate=0.5, name="momentum")
    again.load_state_dict(lower.state_dict())
    trainer.train(BATCHES, epochs=2, test=BATCHES, callbacks=[again, look])
    close(seen[4:], [0.4, 0.2])
    assert again.heard.moment == "test"


def test_plateau_of_a_metric_or_a_hyperparameter_that_is_not_there():
    trainer = ow.Trainer(ow.Model(network), ow.SGD(schedule.linear(0.1, steps=9)))
    with pytest.raises(ow.UnknownNameError, match=r"plateau: .*'learning_rate'.*give the optimizer a number"):
        trainer.train(BATCHES, callbacks=[schedule.plateau()])
    trainer = ow.Trainer(ow.Model(network), ow.SGD(0.1))
    with pytest.raises(ow.ArgumentError, match=r"no metric 'tset_loss'.*loss.*No test ran"):
        trainer.train(BATCHES, callbacks=[schedule.plateau("tset_loss")])


def test_plateau_in_the_place_of_a_schedule():
    with pytest.raises(
        ow.ArgumentError, match=r"a callback that hears a metric.*callbacks=\[plateau\('loss', "
    ):
        ow.SGD(schedule.plateau("loss")).minimize(lambda w: w**2, jnp.float32(1.0))


def test_plateau_is_told_what_is_no_number(step):
    for value in ("low", None, np.ones(3)):
        with pytest.raises(ow.ArgumentError, match="expected one number"):
            schedule.plateau().update(step.init(jnp.float32(1.0)), value)


# ------------------------------------------------------------------------------------ bad input

s = schedule
BAD = {
    "negative": (lambda: s.linear(-1.0, steps=3), ["linear: begin is -1.0", "at least 0"]),
    "not finite": (lambda: s.cosine(float("nan"), steps=3), ["cosine: peak is nan", "finite"]),
    "text": (lambda: s.constant("0.1"), ["constant: value is '0.1'"]),
    "an array": (lambda: s.constant(np.ones(2)), ["value is an array of shape (2,)"]),
    "no steps": (lambda: s.linear(1.0, steps=0), ["steps is 0", "at least 1"]),
    "negative steps": (lambda: s.noam(512, warmup=-1), ["warmup is -1"]),
    "half a step": (lambda: s.linear(1.0, steps=1e3), ["steps is 1000.0", "whole number", "Write 1000."]),
    "a bool": (lambda: s.linear(1.0, steps=True), ["steps is True"]),
    "too many steps": (lambda: s.linear(1.0, steps=2**31), ["at most 2**31 - 1"]),
    "a wrong name": (lambda: s.cosine(1.0, step=3), ["no argument 'step'", "'steps'"]),
    "all warmup": (lambda: s.cosine(1.0, steps=9, warmup=9), ["warmup is 9", "part of it", "at least 10"]),
    "parts of one_cycle": (
        lambda: s.one_cycle(1.0, steps=9, warmup=5, decay=4),
        ["decay is 4", "at least 10"],
    ),
    "parts of wsd": (
        lambda: s.wsd(1.0, steps=9, warmup=5, decay=5),
        ["warmup is 5, decay is 5", "are parts", "at least 10"],
    ),
    "no decay": (lambda: s.wsd(1.0, steps=9, decay=0), ["decay is 0"]),
    "a shape": (lambda: s.wsd(1.0, steps=9, decay=3, shape="cos"), ["'cos'", "'linear', 'cosine' or 'sqrt'"]),
    "a mode": (lambda: s.cyclic(0.0, 1.0, every=9, mode="up"), ["'triangular2' or 'exp_range'"]),
    "a rate without its mode": (lambda: s.cyclic(0.0, 1.0, every=9, rate=0.9), ["mode='exp_range'"]),
    "a cycle that never falls": (lambda: s.cyclic(0.0, 1.0, every=9, warmup=9), ["at most 8"]),
    "a power of 0": (lambda: s.polynomial(1.0, steps=9, power=0), ["power is 0", "above 0"]),
    "a rate of 0": (lambda: s.exponential(1.0, rate=0.0), ["rate is 0.0", "above 0"]),
    "growth without an end": (lambda: s.exponential(1.0, rate=1.1), ["without bound", "end=10"]),
    "an end above": (lambda: s.natural_exp(1.0, rate=0.1, end=2.0), ["end is 2.0", "below begin"]),
    "an end below": (lambda: s.exponential(1.0, rate=1.1, end=0.5), ["end is 0.5", "above begin"]),
    "peaks that grow": (lambda: s.restarts(1.0, every=9, rate=1.1), ["rate is 1.1", "at most 1"]),
    "half a growth": (lambda: s.restarts(1.0, every=9, growth=1.5), ["growth is 1.5", "whole number"]),
    "boundaries that fall": (
        lambda: s.piecewise([1, 2, 3], boundaries=[5, 4]),
        ["[5, 4]", "4 comes after 5"],
    ),
    "the same boundary": (lambda: s.join([1, 2, 3], boundaries=[5, 5]), ["5 comes after 5"]),
    "a boundary of 0": (lambda: s.piecewise([1, 2], boundaries=[0]), ["a boundary is 0", "at least 1"]),
    "too many boundaries": (lambda: s.piecewise([1, 2], boundaries=[3, 4]), ["2 values and 2 boundaries"]),
    "boundaries by one number": (lambda: s.piecewise([1, 2], boundaries=3), ["boundaries is 3", "a list"]),
    "no values": (lambda: s.piecewise([], boundaries=[]), ["no values"]),
    "a negative value": (lambda: s.piecewise([1, -2], boundaries=[3]), ["a value is -2"]),
    "a join of nothing": (lambda: s.join([], boundaries=[]), ["no schedules"]),
    "a schedule that is none": (lambda: s.warmup("cosine", steps=3), ["'cosine' is not a schedule"]),
    "a class": (lambda: s.join([s.cosine], boundaries=[]), ["is not a schedule"]),
    "a negative number": (lambda: s.warmup(-0.1, steps=3), ["value is -0.1"]),
    "a negative factor": (lambda: -1 * s.constant(1.0), ["factor is -1"]),
    "plateau, rate": (lambda: s.plateau(rate=1.0), ["rate is 1.0", "below 1"]),
    "plateau, patience": (lambda: s.plateau(patience=0), ["patience is 0"]),
    "plateau, mode": (lambda: s.plateau(mode="down"), ["'min' or 'max'"]),
    "plateau, monitor": (lambda: s.plateau(0.1), ["monitor is 0.1", "'test_loss'"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, words = BAD[name]
    with pytest.raises(ow.HyperparameterError) as raised:
        call()
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("step", ["7", None, True, 1j, [None]])
def test_a_step_that_is_no_number(step):
    with pytest.raises(ow.ArgumentError, match="expected a step, int32"):
        schedule.constant(0.1)(step)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: s.constant(1e40), r"constant: .* is 1e\+40, which float32 holds as infinite"),
        (
            lambda: s.cosine(0.1, steps=10, end=1e-50),
            r"cosine: end is 1e-50, which float32 cannot",
        ),
    ],
)
def test_a_value_that_float32_changes_is_refused(make, words):
    with pytest.raises(ow.HyperparameterError, match=words):
        make()
    with jax.enable_x64(True):
        assert make()(0).dtype == np.float64


OWN = {
    "NaN": (lambda n: n * jnp.nan, "returns nan for step 0"),
    "infinite": (lambda n: 0.1 / jnp.sqrt(n), r"returns inf for step 0.*step \+ 1"),
    "negative": (lambda n: -0.1 + 0 * n, r"returns -0\.1.* for step 0"),
    "complex": (lambda n: 0.1j * n, "returns complex64 for a step; it must return one real number"),
    "yes or no": (lambda n: n > 3, "returns bool for a step"),
    "several": (lambda n: jnp.stack([n, n]), "it must return one number"),
    "a word": (lambda n: "slow", "schedule of learning_rate"),
    "too small": (lambda n: 1e-44, "cannot tell from 0"),
}


@pytest.mark.parametrize(("schedule", "message"), OWN.values(), ids=OWN)
def test_a_schedule_of_your_own_that_is_no_number(schedule, message):
    with pytest.raises(ow.OnwardError, match=message):
        ow.SGD(schedule).minimize(lambda w: w**2, jnp.float32(1.0))


def test_a_schedule_of_your_own_within_a_trace():
    @jax.jit
    def build(x):
        ow.SGD(lambda n: 0.1 / (n + 1)).minimize(lambda w: w**2, jnp.float32(1.0))
        return x

    assert build(1.0) == 1.0
