"""Steps that are not finite raise, name the op, and leave the state as it was."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.develop.check_finite import check_finite, check_of
from onward.develop.guard import guard
from onward.execute.step import Step
from onward.explain.find_nonfinite import find_nonfinite

ONE = np.ones(3, "float32")
BAD = np.array([1, 0, 2], "float32")
BATCHES = [np.linspace(1, 2, 3, dtype="float32") + i for i in range(8)]


def loss(w, x):
    return jnp.mean(jnp.log(w * x) ** 2)


PROGRAM = ow.Adam(0.1).minimize(loss, ONE, ONE)


@pytest.fixture(scope="module")
def step():
    return ow.compile(PROGRAM, check_finite=True)


def values_of(state, program=PROGRAM):
    return {v.name: np.asarray(state[v.name]) for v in program.state}


def assert_same(found, expected):
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@cache
def unchecked():
    return ow.compile(PROGRAM)


def reference(batches, params=ONE):
    """The state after these batches, from a step without a check."""
    state = unchecked().init(params)
    for batch in batches:
        state, _ = unchecked()(state, batch)
    return values_of(state)


def failing(step, state, batches):
    """The error that some call raises, and how many were made before."""
    for i, batch in enumerate(batches):
        try:
            state, _ = step(state, batch)
        except ow.NonFiniteError as error:
            return error, i
    with pytest.raises(ow.NonFiniteError) as caught:
        step.expect_going(state)
    return caught.value, len(batches)


def assert_close(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_the_error_names_the_op_and_holds_the_state_before(step, after):
    batches = [*BATCHES[:2], BAD, *BATCHES[2 : 2 + after]]
    error, made = failing(step, step.init(ONE), batches)
    assert made <= 4  # at the latest the second call after it
    assert (error.finding.type, error.finding.numbers.infinite) == ("log", 1)
    assert "test_check_finite.py" in str(error)
    expected = reference(BATCHES[:2])
    assert_close(values_of(error.state), expected)
    state, _ = step(error.state, BATCHES[2])
    step.expect_going(state)
    assert_close(values_of(state), reference(BATCHES[:3]))


def test_steps_that_are_finite_are_those_without_a_check(step):
    state = step.init(ONE)
    for batch in BATCHES:
        before = state
        state, _ = step(state, batch)
        assert before.is_spent  # it is donated
    step.expect_going(state)
    assert_close(values_of(state), reference(BATCHES))


def test_another_state_after_a_bad_step_is_not_blamed(step):
    state, _ = step(step.init(ONE), BAD)
    state = step.init(ONE)
    for batch in BATCHES[:3]:
        state, _ = step(state, batch)
    step.expect_going(state)


def test_each_of_two_states_is_judged_by_itself(step):
    bad, good = step.init(ONE), step.init(2 * ONE)
    for i, batch in enumerate([BAD, *BATCHES[:5]]):
        try:
            bad, _ = step(bad, batch)
        except ow.NonFiniteError as error:
            caught, made = error, i
            break
        good, _ = step(good, BATCHES[i])
    assert made <= 2
    assert (caught.finding.type, caught.finding.numbers.first, caught.undone) == ("log", (1,), made)
    np.testing.assert_array_equal(caught.state.parameters, ONE)
    step.expect_going(good)
    assert_close(values_of(good), reference(BATCHES[:made], params=2 * ONE))


def test_a_state_stays_to_blame_however_many_others_are_run(step):
    bad, _ = step(step.init(ONE), BAD)
    for _ in range(2):
        good = step.init(ONE)
        for batch in BATCHES[:3]:
            good, _ = step(good, batch)
    for _ in range(2):  # whoever catches the error and goes on regardless gets it again
        with pytest.raises(ow.NonFiniteError, match="'log' is the first value"):
            step.expect_going(bad)
    step.expect_going(good)


def test_states_in_threads(step):
    def trained(number):
        state, _ = step(step.init(ONE), BATCHES[0])
        for batch in [BAD if number % 2 else BATCHES[1], *BATCHES[2:4]]:
            state, _ = step(state, batch)
        step.expect_going(state)
        return state

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(trained, number) for number in range(4)]
    expected = {False: reference(BATCHES[:4]), True: reference(BATCHES[:1])}
    for number, call in enumerate(calls):
        error = call.exception()
        assert isinstance(error, ow.NonFiniteError) == bool(number % 2)
        if error is not None:
            assert error.finding.type == "log"
        assert_close(values_of(call.result() if error is None else error.state), expected[bool(number % 2)])


def test_a_copy_of_a_bad_state_raises_without_a_batch(step):
    state, _ = step(step.init(ONE), BAD)
    copy = state.copy()
    for state in (copy, copy.replace({"learning_rate": 0.5})):
        with pytest.raises(ow.NonFiniteError, match="Which batch it was is not known") as caught:
            step.expect_going(state)
        assert (caught.value.finding, caught.value.undone) == (None, 0)
    state, _ = step(caught.value.state, BATCHES[0])
    step.expect_going(state)


def test_a_state_of_a_step_without_the_check_is_taken_over(step):
    plain = unchecked()
    for _ in range(2):
        state, _ = plain(plain.init(ONE), BATCHES[0])
        state, _ = step(state, BATCHES[1])
    state, _ = step.run(state, BATCHES[2:4], steps=2)
    state, _ = step(state, BAD)
    with pytest.raises(ow.NonFiniteError, match="'log' is the first value") as caught:
        step.expect_going(state)
    assert_close(values_of(caught.value.state), reference(BATCHES[:4]))
    back, _ = plain(caught.value.state, BATCHES[4])
    assert_close(values_of(back), reference(BATCHES[:5]))
    other = ow.compile(ow.SGD(0.1).minimize(lambda v, x: jnp.sum(v * x), ONE, ONE)).init(ONE)
    with pytest.raises(ow.StateError, match="has no 'w'"):
        step(other, BATCHES[0])
    with pytest.raises(ow.StateError, match="took its buffers over"):
        step(state, BATCHES[0]) and step(state, BATCHES[0])


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_many_steps_in_one_call(step, steps):
    batches = [*BATCHES[:4], BATCHES[4], BAD, *BATCHES[5:]]

    def all_of_them():
        state, _ = step.run(step.init(ONE), batches, steps=steps)
        step.expect_going(state)

    with pytest.raises(ow.NonFiniteError) as caught:
        all_of_them()
    assert caught.value.finding.numbers.first == (1,)
    assert_close(values_of(caught.value.state), reference(BATCHES[:5]))


def test_batches_of_another_shape_and_by_name():
    x = np.ones((4, 3), "float32")
    step = ow.compile(ow.SGD(0.1).minimize(loss, ONE, x), check_finite=True)
    state, _ = step(step.init(ONE), x=x)
    state, _ = step(state, x=x[:2] - np.eye(2, 3, dtype="float32"))
    with pytest.raises(ow.NonFiniteError) as caught:
        step.expect_going(state)
    assert (caught.value.finding.numbers.size, caught.value.finding.numbers.infinite) == (6, 2)


FAULTS = {
    "gradient": (lambda w, x: jnp.sum(jnp.sqrt(w * x)), BAD, ow.SGD(0.1), "sqrt"),
    "update": (lambda w, x: jnp.sum(w * x), BAD, ow.Adam(0.1, epsilon=0.0), "adam"),
    "overflow": (lambda w, x: jnp.sum(w * x), 1e20 * ONE, ow.Adagrad(0.1), "adagrad"),
    "schedule": (lambda w, x: jnp.sum(w * x), ONE, ow.SGD(lambda step: 1.0 / abs(step - 1)), "schedule"),
    "clipped": (lambda w, x: jnp.sum(w**x), -BAD, ow.SGD(0.1, rules=[ow.ClipByValue(1.0)]), "pow"),
}


@pytest.mark.parametrize(
    ("optimizer", "is_looked_at"),
    [
        (ow.SGD(0.1), False),
        (ow.Adam(0.1), False),
        (ow.Adagrad(0.1), False),
        (ow.Lion(0.1), True),  # the sign of infinity is finite
        (ow.SGD(0.1, rules=[ow.ClipByValue(1.0)]), True),
        (ow.SGD(0.1, rules=[ow.ClipByGlobalNorm(1.0)]), True),
    ],
)
def test_a_gradient_is_looked_at_unless_the_next_state_shows_it(optimizer, is_looked_at):
    program = optimizer.minimize(loss, ONE, ONE)
    watched = {v.name for v in check_of(check_finite(program)).watched}
    assert ("grad(w)" in watched) == is_looked_at
    assert {"proposed(w)", program.loss.name} <= watched
    infinite = np.array([1, np.inf, 1], "float32")
    state = Step(program, (), True, ahead=False).init(ONE)
    update = next(op for op in program.ops if op.type == optimizer.name)
    values = [infinite if v.kind == "gradient" else state[v.name] for v in update.inputs]
    shows = not all(np.isfinite(x).all() for x in update.body(*values))
    assert shows or is_looked_at


@pytest.mark.parametrize("name", FAULTS)
def test_gradients_and_the_next_state_are_looked_at(name):
    function, x, optimizer, type_ = FAULTS[name]
    w = 0 * ONE if name == "clipped" else ONE
    program = optimizer.minimize(function, w, x)
    step = ow.compile(program, check_finite=True)
    state, _ = step(step.init(w).replace({"step": jnp.int32(1)}), x)
    with pytest.raises(ow.NonFiniteError) as caught:
        step.expect_going(state)
    finding = caught.value.finding
    assert (finding.forward or finding.op).type == type_, str(finding)
    np.testing.assert_array_equal(caught.value.state.parameters, w)
    assert int(caught.value.state["step"]) == 1


def test_the_best_value_so_far_may_be_infinite():
    def tracked(w, best, x):
        now = jnp.sum(w * x)
        return now, jnp.minimum(best, jnp.where(x[0] > 5, now, jnp.inf))

    best = jnp.float32(jnp.inf)
    program = ow.SGD(0.1).minimize(tracked, ONE, ONE, state=best)
    step = ow.compile(program, check_finite=True)
    state = step.init(ONE, best)
    for batch in (ONE, ONE):
        state, _ = step(state, batch)
    step.expect_going(state)
    assert float(state.model_state) == np.inf
    assert find_nonfinite(step, state, ONE) is None
    state, _ = step(state, np.nan * ONE)
    with pytest.raises(ow.NonFiniteError, match="The data 'x' is not finite: 3 of 3 are NaN"):
        step.expect_going(state)


def matrices(params, x):
    for w in params:
        x = x + jnp.log(jnp.abs(x @ w) + 1)
    return jnp.mean(x)


SQUARE = np.full((2, 2), 0.5, "float32")
EXAMPLES = np.ones((8, 2), "float32")


@pytest.mark.parametrize("how", ["tuned", "plain", "rolled", "accumulated", "replicated", "momentum"])
def test_it_goes_with_everything_else(how):
    params = [SQUARE] * (3 if how == "rolled" else 2)
    optimizer = ow.Adam(0.1) if how == "tuned" else ow.Momentum(0.1)
    program = optimizer.minimize(matrices, params, EXAMPLES)
    if how == "accumulated":
        program = ow.accumulate(program, 4)
    if how == "replicated":
        program = ow.replicate(program, 4)
    options = {"rolled": {"roll": True}, "plain": {"tune": False}}.get(how, {})
    step = ow.compile(program, check_finite=True, **options)
    state, _ = step(step.init(params), EXAMPLES)
    before = values_of(state, program)
    spoiled = EXAMPLES.copy()
    spoiled[3] = 0
    spoiled[5] = -np.inf
    state, _ = step(state, spoiled)
    found = "2 of 4 are infinite, the first at [1, 0]" if how == "replicated" else "2 of 16 are infinite"
    with pytest.raises(ow.NonFiniteError, match=re.escape(f"The data 'x' is not finite: {found}")) as caught:
        step.expect_going(state)
    assert caught.value.finding.device == (2 if how == "replicated" else None)
    assert_same(values_of(state, program), before)


def test_a_step_that_the_program_leaves_out_is_no_fault():
    guarded = ow.compile(guard(PROGRAM), check_finite=True)
    state, _ = guarded(guarded.init(ONE), BAD)
    guarded.expect_going(state)
    assert int(state["skipped"]) == 1

    def scaled(w, x):
        return jnp.sum((x @ w) ** 2) * 1e4

    half = ow.mixed_precision(ow.SGD(0.1).minimize(scaled, SQUARE, EXAMPLES), "float16")
    step = ow.compile(half, check_finite=True)
    before = step.init(SQUARE)
    finding = find_nonfinite(step, before, EXAMPLES)
    state, _ = step(before, EXAMPLES)
    step.expect_going(state)
    np.testing.assert_array_equal(state.parameters, SQUARE)
    assert finding is None
    assert find_nonfinite(half, step.init(SQUARE), EXAMPLES).variable.dtype == np.float16


def test_what_a_guard_lets_through_is_a_fault():
    program = guard(ow.Adam(0.1, epsilon=0.0).minimize(lambda w, x: jnp.sum(w * x), ONE, ONE))
    step = ow.compile(program, check_finite=True)
    state, _ = step(step.init(ONE), BAD)
    with pytest.raises(ow.NonFiniteError) as caught:
        step.expect_going(state)
    assert caught.value.finding.op.type == "adam"


def test_under_a_trace_the_state_tells(step):
    stacked = np.stack([*BATCHES[:2], BAD, *BATCHES[2:4]])
    state, _ = jax.jit(lambda s, xs: jax.lax.scan(lambda s, x: step(s, x), s, xs))(step.init(ONE), stacked)
    assert not bool(state["is_finite"])
    assert_close(values_of(state), reference(BATCHES[:2]))
    with pytest.raises(ow.NonFiniteError, match="Which batch it was is not known"):
        step.expect_going(state)  # no call on the host saw it


def test_a_checked_program_is_checked_once():
    once = check_finite(PROGRAM)
    assert check_finite(once) is once or len(check_finite(once).ops) == len(once.ops)
    assert check_of(PROGRAM) is None
    assert check_of(once).finite.name == "is_finite"
    with pytest.raises(ow.GraphError, match="guarded already"):
        guard(once)


def test_a_program_without_update():
    step = ow.compile(ow.trace(lambda w, x: jnp.log(w * x), ONE, ONE), check_finite=True)
    state, out = step(step.init(ONE), BAD)
    assert out.value.tolist()[0] == 0
    with pytest.raises(ow.NonFiniteError, match="'log' is the first value"):
        step.expect_going(state)


def test_a_session_raises_at_the_next_run():
    target = check_finite(PROGRAM).updates
    session = ow.Session()
    session["w"] = ONE
    session.run(target, {"x": BAD})

    def twice():
        for _ in range(2):
            session.run(target, {"x": ONE})

    with pytest.raises(ow.NonFiniteError, match="'log' is the first value"):
        twice()
    np.testing.assert_array_equal(session["w"], ONE)


def network():
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 1))
    return jnp.mean(jnp.log(jnp.abs(ow.layer.fc(x, 1)) * x[:, :1]) ** 2 + y)


def test_a_trainer_goes_on_from_the_state_before():
    x, y = np.eye(4, 3, dtype="float32") + 1, np.ones((4, 1), "float32")
    trainer = ow.Trainer(ow.Model(network), ow.SGD(0.01), check_finite=True)
    trainer.train([(x, y)] * 2, progress=False)
    before = np.asarray(trainer["fc_0/w"])
    with pytest.raises(ow.NonFiniteError, match="'log' is the first value"):
        trainer.train([(0 * x, y), (x, y), (x, y)], progress=False)
    np.testing.assert_array_equal(trainer["fc_0/w"], before)
    assert (trainer.step, int(trainer["step"])) == (2, 2)
    trainer.update(x, y)
    trainer.expect_going()
    assert (trainer.step, int(trainer["step"])) == (3, 3)
    assert not np.array_equal(trainer["fc_0/w"], before)
    with pytest.raises(ow.NonFiniteError):
        ow.train(network, [(0 * x, y)], optimizer=ow.SGD(0.01), check_finite=True, progress=False)


def test_bad_input():
    with pytest.raises(ow.ArgumentError, match="check_finite is 'yes'; expected True or False"):
        ow.compile(PROGRAM, check_finite="yes")
