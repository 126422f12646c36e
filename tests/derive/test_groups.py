"""Which parameters an optimizer updates in which way: groups, routes, shared hyperparameters."""

import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.derive.optimizers.muon import Muon

PARAMS = {
    "body": {"w": jnp.full((2, 3), 2.0), "b": jnp.ones(3)},
    "head": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)},
}
SLOPES = {
    "body": {"w": jnp.full((2, 3), 0.5), "b": jnp.ones(3)},
    "head": {"w": jnp.full((3, 2), -2.0), "b": jnp.full(2, 4.0)},
}


def loss(p, g):
    return sum(jnp.sum(p[i][j] * g[i][j]) for i in p for j in p[i])


def stepped(optimizer, changes=None, steps=1):
    """What became of each number of a parameter (all are alike) after some steps."""
    step = ow.compile(optimizer.minimize(loss, PARAMS, SLOPES))
    state = step.init(PARAMS).replace(changes or {})
    for _ in range(steps):
        state, _ = step(state, SLOPES)
    found = {
        f"{i}/{j}": np.asarray(p).ravel() for i, tree in state.parameters.items() for j, p in tree.items()
    }
    assert all(np.ptp(p) == 0 for p in found.values())
    return {k: float(p[0]) for k, p in found.items()}


def test_a_group_has_its_own_rate_optimizer_rules_and_may_be_frozen():
    groups = [
        ow.Group("*/b", learning_rate=0.5),
        ow.Group("head/w", ow.Momentum(0.25, 0.5)),
        ow.Group(lambda v: v.name == "body/w", rules=(), name="bare"),
    ]
    optimizer = ow.SGD(0.125, rules=[ow.L2(0.5)], groups=groups)
    assert stepped(optimizer, steps=2) == {
        "body/w": 2.0 - 2 * 0.125 * 0.5,
        "body/b": (1 - 0.5 * 1.5) - 0.5 * (1 + 0.5 * (1 - 0.5 * 1.5)),
        "head/w": 1 + 0.25 * 2 + 0.25 * 3,
        "head/b": -2.0 - 0.5 * (4 - 1.0),
    }


def test_frozen_parameters_have_neither_slots_nor_gradients_and_do_not_change():
    program = ow.Adam(0.1, groups=[ow.Group("body/*", frozen=True)]).minimize(loss, PARAMS, SLOPES)
    assert {v.name for v in program.state if v.name.endswith(("/mean", "/variance"))} == {
        f"head/{k}/{slot}" for k in "wb" for slot in ("mean", "variance")
    }
    assert {p.name for p, _ in program.gradients} == {"head/w", "head/b"}
    assert not any("body" in v.name for op in program.ops if op.made_by != "forward" for v in op.outputs)
    whole = ow.Adam(0.1).minimize(loss, PARAMS, SLOPES)
    assert len([op for op in program.ops if op.made_by == "backward"]) < len(
        [op for op in whole.ops if op.made_by == "backward"]
    )
    step = ow.compile(program)
    state, _ = step(step.init(PARAMS), SLOPES)
    for k, p in PARAMS["body"].items():
        np.testing.assert_array_equal(state.parameters["body"][k], p)


def test_hyperparameters_are_shared_unless_they_differ():
    optimizer = ow.Adam(0.1, groups=[ow.Group("*/b", learning_rate=0.2), ow.Group("head/w", ow.Adam(0.3))])
    program = optimizer.minimize(loss, PARAMS, SLOPES)
    assert [v.name for v in program.hyperparameters] == [
        *("learning_rate", "beta1", "beta2", "epsilon"),
        "b/learning_rate",
        *(f"head/w/{name}" for name in ("learning_rate", "beta1", "beta2", "epsilon")),
    ]


def test_what_groups_share_is_there_when_nothing_else_is_updated_by_it():
    optimizer = ow.Adam(
        0.1, groups=[ow.Group("body/*", learning_rate=0.2), ow.Group("head/*", learning_rate=0.3)]
    )
    program = optimizer.minimize(loss, PARAMS, SLOPES)
    names = [v.name for v in program.hyperparameters]
    assert names == ["beta1", "beta2", "epsilon", "body/learning_rate", "head/learning_rate"]
    found = stepped(optimizer)
    np.testing.assert_allclose([found["body/w"], found["head/w"]], [1.8, 1.3], rtol=1e-5)


def test_a_group_that_comes_first_shares_the_schedule():
    optimizer = ow.SGD(
        lambda step: 0.5 / (step + 1), rules=[ow.L2(1.0)], groups=[ow.Group("body/*", rules=())]
    )
    program = optimizer.minimize(loss, PARAMS, SLOPES)
    assert [t.op.type for t in program.updates].count("schedule") == 1
    assert stepped(optimizer, steps=2)["body/w"] == 2.0 - 0.5 * 0.5 - 0.25 * 0.5


def test_a_schedule_of_a_group():
    optimizer = ow.SGD(0.5, groups=[ow.Group("head/*", learning_rate=lambda step: 1.0 + step)])
    found = stepped(optimizer, steps=2)
    assert (found["body/b"], found["head/b"]) == (0.0, -4.0 * (1 + 2))


def test_one_optimizer_object_in_two_groups_has_two_rates():
    same = ow.SGD(0.5)
    optimizer = ow.SGD(0.125, groups=[ow.Group("body/b", same), ow.Group("head/b", same)])
    found = stepped(optimizer, {"head/b/learning_rate": 0.25})
    assert (found["body/b"], found["head/b"], found["head/w"]) == (0.5, -1.0, 1.25)


def test_changing_a_hyperparameter_of_a_group_compiles_nothing():
    optimizer = ow.SGD(0.5, rules=[ow.L2(0.0)], groups=[ow.Group("head/*", learning_rate=0.25)])
    step = ow.compile(optimizer.minimize(loss, PARAMS, SLOPES))
    state, _ = step(step.init(PARAMS), SLOPES)
    assert state.hyperparameters.keys() == {"learning_rate", "head/learning_rate", "l2/rate"}
    state = state.replace({"head/learning_rate": 1.0, "l2/rate": 0.5})
    before = {k: np.asarray(state[k]) for k in ("body/b", "head/b")}
    state, _ = step(state, SLOPES)
    assert step.compilations == 1
    np.testing.assert_allclose(
        state["head/b"], before["head/b"] - 1.0 * (4 + 0.5 * before["head/b"]), rtol=1e-6
    )
    np.testing.assert_allclose(
        state["body/b"], before["body/b"] - 0.5 * (1 + 0.5 * before["body/b"]), rtol=1e-6
    )


def test_a_rule_across_parameters_spans_groups_that_have_it():
    """The norm is that of the three parameters with the clip."""
    clip = ow.ClipByGlobalNorm(1.0)
    groups = [ow.Group("head/b", learning_rate=2.0), ow.Group("body/w", rules=())]
    found = stepped(ow.SGD(1.0, rules=[clip], groups=groups))
    norm = np.sqrt(3 * 1.0**2 + 6 * 2.0**2 + 2 * 4.0**2)
    assert found["body/w"] == 1.5
    np.testing.assert_allclose([found["body/b"], found["head/w"]], [1 - 1 / norm, 1 + 2 / norm], rtol=1e-6)
    np.testing.assert_allclose(found["head/b"], -2 * 4 / norm, rtol=1e-6)


@pytest.mark.parametrize(
    "where", ["*/b", ["body/b", "head/b"], lambda v: v.shape in ((3,), (2,)), ("head/*", "body/b")]
)
def test_a_rule_changes_only_what_where_picks(where):
    found = stepped(ow.SGD(0.5, rules=[ow.L2(1.0, where=where)]))
    assert (found["body/w"], found["body/b"]) == (2 - 0.25, 1 - 0.5 * 2)
    assert found["head/w"] == (1.5 if "head/*" in where else 2.0) if isinstance(where, tuple) else 2.0


def test_rules_follow_schedules():
    found = stepped(
        ow.SGD(0.5, rules=[ow.L2(lambda step: 1.0 * step), ow.WeightDecay(lambda step: 0.5)]), steps=2
    )
    w = 1.0
    for t in range(2):
        w = w - 0.5 * (1 + t * w) - 0.5 * 0.5 * w
    np.testing.assert_allclose(found["body/b"], w, rtol=1e-6)


def test_an_optimizer_that_sends_on_takes_its_rules_along():
    rule = ow.L2(0.1)
    optimizer = Muon(0.1, aside=("head*",), fallback=ow.AdamW(1e-3, rules=[rule]), rules=[rule])
    plan = optimizer.plan(ow.trace(loss, PARAMS, SLOPES))
    assert {d.parameter.name: d.by for d in plan.destinations} == {
        "body/w": "muon",
        "body/b": "adam_w",
        "head/w": "adam_w",
        "head/b": "adam_w",
    }
    assert [(r.name, len(names)) for r, names in plan.order if r.name == "l2"] == [("l2", 4)]


WRONG = {
    "an unmatched pattern": (
        lambda: ow.SGD(0.1, groups=[ow.Group("haed/*", learning_rate=1.0)]),
        ow.UnknownNameError,
        ["Group('haed/*', learning_rate=1.0)", "nothing is named 'haed/*'", "'head/b', 'head/w'"],
    ),
    "one of several unmatched": (
        lambda: ow.SGD(0.1, groups=[ow.Group(["head/w", "tail"], frozen=True)]),
        ow.UnknownNameError,
        ["nothing is named 'tail'"],
    ),
    "a predicate that picks nothing": (
        lambda: ow.SGD(0.1, groups=[ow.Group(lambda v: False, frozen=True)]),
        ow.UnknownNameError,
        ["predicate", "picks none of 4"],
    ),
    "all of them frozen": (
        lambda: ow.SGD(0.1, groups=[ow.Group("*", frozen=True)]),
        ow.LossError,
        ["groups of the optimizer freeze all parameters", "'head/w'"],
    ),
    "two groups for one": (
        lambda: ow.SGD(0.1, groups=[ow.Group("*/b", frozen=True), ow.Group("head/*", learning_rate=1.0)]),
        ow.HyperparameterError,
        ["'head/b' is in two groups", "Group('*/b', frozen=True)", "Narrow"],
    ),
    "orders that contradict": (
        lambda: ow.SGD(
            0.1,
            rules=[ow.L2(0.1), ow.ClipByNorm(1.0)],
            groups=[ow.Group("head/*", rules=[ow.ClipByNorm(1.0), ow.L2(0.1)])],
        ),
        ow.HyperparameterError,
        ["L2", "ClipByNorm", "different orders"],
    ),
    "a field that is none": (
        lambda: ow.SGD(0.1, groups=[ow.Group("*", momentum=0.1)]),
        ow.HyperparameterError,
        ["SGD has no hyperparameter 'momentum'"],
    ),
    "a value out of range": (
        lambda: ow.SGD(0.1, groups=[ow.Group("*", learning_rate=-1.0)]),
        ow.HyperparameterError,
        ["SGD: learning_rate is -1.0", "at least 0"],
    ),
    "frozen and changed": (
        lambda: ow.Group("*", frozen=True, learning_rate=0.1),
        ow.HyperparameterError,
        ["more than one of"],
    ),
    "groups in a group": (
        lambda: ow.Group("*", ow.SGD(0.1, groups=[ow.Group("a")])),
        ow.HyperparameterError,
        ["groups of its own"],
    ),
    "no optimizer": (
        lambda: ow.Group("*", ow.SGD),
        ow.HyperparameterError,
        ["SGD, a class", "expected an optimizer"],
    ),
    "a number to pick with": (lambda: ow.Group(3), ow.HyperparameterError, ["given 3", "a predicate"]),
    "nothing to pick with": (lambda: ow.Group([]), ow.HyperparameterError, ["a pattern"]),
    "no group": (lambda: ow.SGD(0.1, groups=["head/*"]), ow.HyperparameterError, ["groups holds 'head/*'"]),
    "a rule that is a class": (lambda: ow.SGD(0.1, rules=[ow.EMA]), ow.HyperparameterError, ["EMA, a class"]),
    "an optimizer as rule": (
        lambda: ow.SGD(0.1, rules=[ow.SGD(0.1)]),
        ow.HyperparameterError,
        ["rules holds a SGD", "gradient rules"],
    ),
    "a rule twice": (lambda: ow.SGD(0.1, rules=[ow.L2(1), ow.L2(1)]), ow.HyperparameterError, ["twice"]),
    "a rule for nothing": (
        lambda: ow.SGD(0.1, rules=[ow.L2(0.1, where="*/c")]),
        ow.UnknownNameError,
        ["L2", "'*/c'"],
    ),
    "a rule for another group": (
        lambda: ow.SGD(0.1, groups=[ow.Group("head/*", rules=[ow.L2(0.1, where="body/w")])]),
        ow.UnknownNameError,
        ["L2", "'body/w'", "does not update"],
    ),
    "a rule picked by a number": (
        lambda: ow.SGD(0.1, rules=[ow.L2(0.1, where=3)]),
        ow.HyperparameterError,
        ["L2", "3"],
    ),
    "a negative rate": (lambda: ow.L2(-0.1), ow.HyperparameterError, ["L2: rate is -0.1"]),
    "a rate that is not a number": (
        lambda: ow.ClipByNorm(float("nan")),
        ow.HyperparameterError,
        ["max_norm is nan"],
    ),
    "a decay of 1": (lambda: ow.EMA(1.0), ow.HyperparameterError, ["EMA: decay is 1.0", "less than 1"]),
    "a mode that is none": (
        lambda: ow.WeightDecay(0.1, "l1"),
        ow.HyperparameterError,
        ["mode is 'l1'", "'l2'"],
    ),
    "a misspelt rate": (
        lambda: ow.WeightDecay(rat=0.1, mode="l2"),
        ow.HyperparameterError,
        ["'rat'", "'rate'"],
    ),
    "half a step": (
        lambda: ow.rule.Lookahead(every=0.5),
        ow.HyperparameterError,
        ["every is 0.5", "at least 1"],
    ),
    "no step": (lambda: ow.SWA(every=0), ow.HyperparameterError, ["every is 0"]),
    "a begin before the first": (
        lambda: ow.rule.PolyakAverage(begin=-1),
        ow.HyperparameterError,
        ["begin is -1"],
    ),
    "a schedule of rows": (
        lambda: ow.SGD(0.1, rules=[ow.L2(lambda step: jnp.ones(2) * step)]),
        ow.HyperparameterError,
        ["schedule of l2/rate", "one number"],
    ),
    "a schedule of rows in a group": (
        lambda: ow.SGD(0.1, groups=[ow.Group("head/*", learning_rate=lambda step: jnp.ones(2))]),
        ow.HyperparameterError,
        ["schedule of head/learning_rate", "one number"],
    ),
}


@pytest.mark.parametrize(("make", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(make, error, words):
    with pytest.raises(error) as raised:
        make().minimize(loss, PARAMS, SLOPES)
    for word in words:
        assert word in str(raised.value)


def test_a_hyperparameter_cannot_become_wrong_at_run_time():
    step = ow.compile(ow.SGD(0.1, groups=[ow.Group("*/b", learning_rate=0.2)]).minimize(loss, PARAMS, SLOPES))
    state = step.init(PARAMS)
    with pytest.raises(ow.HyperparameterError, match="b/learning_rate is -1"):
        state.replace({"b/learning_rate": -1.0})
