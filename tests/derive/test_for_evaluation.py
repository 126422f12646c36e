"""The Program that evaluates with averages, over the State of the training step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import onward as ow
from onward.derive import for_evaluation as module
from onward.derive.optimizers.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD

PARAMS = {"w": np.float32([1.0, -2.0, 0.5]), "b": np.float32(0.25)}
X = np.float32(np.random.default_rng(0).normal(size=(8, 3)))


def loss(p, x):
    return jnp.mean((x @ p["w"] + p["b"] - 1) ** 2)


def steps(program, params=PARAMS, count=10):
    """The last State, and the parameters after each step."""
    step = ow.compile(program, donate=False)
    state, path = step.init(params), []
    for _ in range(count):
        state, _ = step(state, X)
        path.append({k: np.asarray(state[k], np.float64) for k in ("w", "b")})
    return state, path


def mean(path):
    return {k: np.mean([p[k] for p in path], axis=0) for k in ("w", "b")}


def moving(path, decay, first=PARAMS):
    average = {k: np.asarray(v, np.float64) for k, v in first.items()}
    for p in path:
        average = {k: decay * average[k] + (1 - decay) * p[k] for k in p}
    return average


CASES = {
    "EMA": (ow.SGD(0.1, rules=[ow.EMA(0.75)]), lambda path: moving(path, 0.75)),
    "PolyakAverage": (ow.Adam(0.1, rules=[ow.rule.PolyakAverage(begin=4)]), lambda path: mean(path[4:])),
    "SWA": (ow.Momentum(0.1, rules=[ow.SWA(begin=3, every=3)]), lambda path: mean(path[5::3])),
    "SWA, not yet": (ow.Momentum(0.1, rules=[ow.SWA(begin=30)]), lambda path: path[-1]),
    "one parameter": (
        ow.SGD(0.1, rules=[ow.EMA(0.75, where="w")]),
        lambda path: {"w": moving(path, 0.75)["w"], "b": path[-1]["b"]},
    ),
    "a group": (
        ow.SGD(0.1, groups=[ow.Group("w", rules=[ow.EMA(0.75)])]),
        lambda path: {"w": moving(path, 0.75)["w"], "b": path[-1]["b"]},
    ),
    "with rules that keep nothing for it": (
        ow.SGD(
            0.1,
            rules=[ow.ClipByGlobalNorm(0.5), ow.rule.Lookahead(every=2), ow.EMA(0.75), ow.WeightDecay(0.1)],
        ),
        None,
    ),
    "the last of two": (ow.SGD(0.1, rules=[ow.EMA(0.75), ow.rule.PolyakAverage()]), mean),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_averages(name):
    optimizer, average = CASES[name]
    program = optimizer.minimize(loss, PARAMS, X)
    state, path = steps(program)
    step = ow.compile(ow.for_evaluation(program))
    unchanged, out = step(state, X)
    expected = {k: state[f"{k}/average"] for k in PARAMS} if average is None else average(path)
    np.testing.assert_allclose(out.loss, loss(expected, X), rtol=1e-5)
    assert abs(float(out.loss) / float(loss(state.parameters, X)) - 1) > 1e-4 or name == "SWA, not yet"
    for k in state:
        np.testing.assert_array_equal(unchanged[k], state[k])


@pytest.fixture(scope="module")
def averaged():
    program = ow.Adam(0.1, rules=[ow.EMA(0.75)]).minimize(loss, PARAMS, X)
    return program, steps(program)[0]


@pytest.mark.parametrize("rows", [1, 5])
def test_a_batch_of_another_length(averaged, rows):
    program, state = averaged
    step = ow.compile(ow.for_evaluation(program))
    average = {k: state[f"{k}/average"] for k in PARAMS}
    np.testing.assert_allclose(step(state, X[:rows])[1].loss, loss(average, X[:rows]), rtol=1e-5)
    assert step.traces == 1


def test_in_the_containers_of_the_parameters(averaged):
    """As ``for_evaluation`` reads them; what is not averaged is a copy, which no step spends."""
    program, state = averaged
    found = ow.averaged(program, state)
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)
    _, out = ow.compile(ow.for_evaluation(program))(state, X)
    np.testing.assert_allclose(loss(found, X), out.loss, rtol=1e-6)

    plain = ow.SGD(0.1, rules=[ow.EMA(0.75, where="w")]).minimize(loss, PARAMS, X)
    step = ow.compile(plain)
    first, _ = step(step.init(PARAMS), X)
    found, trained = ow.averaged(plain, first), np.asarray(first["b"])
    step(first, X)
    np.testing.assert_array_equal(found["b"], trained)
    with pytest.raises(ow.StateError):
        ow.averaged(plain, first)


def test_averages_are_those_of_a_program_and_its_state(averaged):
    program, state = averaged
    with pytest.raises(ow.ArgumentError, match="second argument is a State"):
        ow.averaged(program, state.parameters)
    with pytest.raises(ow.ArgumentError, match="expected a Program"):
        ow.averaged(state, program)
    with pytest.raises(ow.ArgumentError, match="trains nothing, so it tells of no averages"):
        ow.averaged(ow.for_test(program), state)


def test_its_own_beginning_are_the_parameters(averaged):
    step = ow.compile(ow.for_evaluation(averaged[0]))
    state = step.init(PARAMS)
    assert sorted(state) == ["b", "b/average", "w", "w/average"]
    np.testing.assert_allclose(step(state, X)[1].loss, loss(PARAMS, X), rtol=1e-6)


def test_without_averages_it_is_the_test_program():
    program = ow.Adam(0.1, rules=[ow.L2(0.1)]).minimize(loss, PARAMS, X)
    assert str(ow.for_evaluation(program)) == str(ow.for_test(program))


def test_without_averages_the_update_is_not_derived_again(monkeypatch):
    def derived(*given):
        raise AssertionError("the update pass was derived")

    monkeypatch.setattr(module, "updated", derived)
    program = ow.Adam(0.1, rules=[ow.L2(0.1)]).minimize(loss, PARAMS, X)
    assert module.evaluated_parameters(program).outputs == program.parameters
    assert not ow.for_evaluation(program).updates


def test_once_more_changes_nothing(averaged):
    once = ow.for_evaluation(averaged[0])
    assert str(ow.for_evaluation(once)) == str(once)


def test_on_two_devices(averaged):
    program, state = averaged
    average = {k: state[f"{k}/average"] for k in PARAMS}
    step = ow.compile(ow.replicate(ow.for_evaluation(program), 2))
    np.testing.assert_allclose(step(state, X)[1].loss, loss(average, X), rtol=1e-5)


def test_of_a_replicated_training(averaged):
    program = ow.replicate(averaged[0], 2)
    state = steps(program)[0]
    whole = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    average = {k: averaged[1][f"{k}/average"] for k in PARAMS}
    np.testing.assert_allclose(
        ow.compile(ow.for_evaluation(program))(whole, X)[1].loss, loss(average, X), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("merge", "word"), [(ow.Sharded(), "sharded"), (ow.merge.LocalSGD(2), "per replica")]
)
def test_what_devices_keep_in_parts_is_refused(averaged, merge, word):
    with pytest.raises(ow.GraphError, match=f"'./average' of EMA {word}.*Average") as refused:
        ow.for_evaluation(ow.replicate(averaged[0], 2, merge))
    assert ("restore a checkpoint with the Program as it was" in str(refused.value)) == (word == "sharded")


def test_averages_in_parts_are_whole_in_a_checkpoint(averaged, tmp_path):
    step = ow.compile(ow.replicate(averaged[0], 2, merge=ow.Sharded()))
    state, _ = step(step.init(PARAMS), X)
    with ow.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 1)
    restored = ow.averaged(averaged[0], ow.compile(averaged[0]).restore(checkpoints))
    alone = ow.compile(averaged[0])
    expected = ow.averaged(averaged[0], alone(alone.init(PARAMS), X)[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), restored, expected)


def test_the_state_of_averages_in_parts_is_refused(averaged):
    step = ow.compile(ow.replicate(averaged[0], 2, merge=ow.Sharded()))
    state, _ = step(step.init(PARAMS), X)
    with pytest.raises(ow.StateError, match=r"'w/average' is float32.*the Program whose step made it"):
        ow.averaged(averaged[0], state)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_of_low_precision(dtype):
    def wide(p, x):
        return loss({k: v.astype(jnp.float32) for k, v in p.items()}, x)

    params = {k: v.astype(dtype) for k, v in PARAMS.items()}
    program = ow.SGD(0.1, rules=[ow.EMA(0.75)]).minimize(wide, params, X)
    state, _ = steps(program, params)
    test = ow.for_evaluation(program)
    assert {v.name: str(v.dtype) for v in test.state} == {
        **dict.fromkeys(("w", "b"), dtype),
        **dict.fromkeys(("w/average", "b/average"), "float32"),
    }
    average = {k: state[f"{k}/average"].astype(dtype) for k in params}
    np.testing.assert_allclose(ow.compile(test)(state, X)[1].loss, wide(average, X), rtol=1e-6)


SCHEDULE_FREE = {"SGD": ScheduleFreeSGD(0.1, 0.75), "AdamW": ScheduleFreeAdamW(lambda t: 0.1 / (t + 1), 0.75)}


@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_optimizers_without_schedules(name):
    program = SCHEDULE_FREE[name].minimize(loss, PARAMS, X)
    state, _ = steps(program)
    best = {k: (np.asarray(state[k]) - 0.25 * np.asarray(state[f"{k}/base"])) / 0.75 for k in PARAMS}
    np.testing.assert_allclose(
        ow.compile(ow.for_evaluation(program))(state, X)[1].loss, loss(best, X), rtol=1e-5
    )


def test_a_rule_may_read_a_schedule_and_the_step():
    class Ahead(ow.ParameterRule):
        """Evaluates a part of the way to zero."""

        way: ow.Hyperparameter = 0.5

        def update(self, parameter, updated, gradient, slots):
            return updated, slots

        def evaluated(self, parameter, slots):
            return parameter * (1 - self.way) + 0.0 * self.optimizer["learning_rate"]

    program = ow.SGD(0.1, rules=[Ahead(lambda step: step / 20)]).minimize(loss, PARAMS, X)
    state, path = steps(program)
    test = ow.for_evaluation(program)
    assert {v.name for v in test.state} == {"w", "b", "step", "learning_rate"}
    half = {k: v / 2 for k, v in path[-1].items()}
    np.testing.assert_allclose(ow.compile(test)(state, X)[1].loss, loss(half, X), rtol=1e-5)


def test_dropout_drops_nothing_and_activations_give_their_names_away():
    def network():
        x = ow.layer.dropout(ow.data("x", (None, 3)), 0.5)
        hidden = checkpoint_name(x @ ow.parameter("w", (3,)), "w/average")
        return jnp.mean(hidden**2)

    program = ow.SGD(0.1, rules=[ow.EMA(0.5)]).minimize(ow.trace(network))
    step, test = ow.compile(program), ow.compile(ow.for_evaluation(program))
    state, _ = step(step.init({"w": jnp.ones(3)}), X)
    np.testing.assert_allclose(test(state, X)[1].loss, np.mean((X @ state["w/average"]) ** 2), rtol=1e-5)


def test_a_program_made_by_hand_is_refused(averaged):
    with pytest.raises(ow.RecipeError, match="not made by trace"):
        ow.for_evaluation(replace(averaged[0], recipe=None))
