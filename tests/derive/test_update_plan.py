"""What ``optimizer.plan`` tells, and that it is what happens."""

import jax
import jax.numpy as jnp
import pytest

import onward as ow
from onward.derive.optimizers.muon import Muon

PARAMS = {
    "embed": jnp.ones((64, 128), jnp.bfloat16),
    "body": {"w": jnp.ones((64, 64)), "b": jnp.ones(64)},
    "head": jnp.ones((128, 64)),
    "old": jnp.ones(3),
}


def loss(p, x):
    return sum(jnp.sum(q.astype(jnp.float32)) * x for q in jax.tree.leaves(p))


def falling(step):
    return 1e-4 / (step + 1)


EMA = ow.EMA(0.999, where="head")
MIXED = ow.AdamW(
    1e-3,
    slot_dtype="int8",
    rules=[ow.ClipByGlobalNorm(1.0), ow.L2(0.125, where=["embed", "body/*"])],
    groups=[
        ow.Group("*/b", weight_decay=0.0),
        ow.Group("embed", learning_rate=falling, low_precision="stochastic"),
        ow.Group("head", ow.SGD(0.1, rules=[EMA])),
        ow.Group("old", frozen=True),
    ],
)
PRINTED = """\
Plan of AdamW for loss: 5 parameters, 64.3 KiB, with slots of 56.9 KiB

parameter  type          by              learning rate  decay                     keeps                                                                                                   bytes
body/b     f32[64]       adam_w (b)      0.001          0.0 decoupled, 0.125 l2   mean f32, variance f32                                                                                  512 B
body/w     f32[64,64]    adam_w          0.001          0.01 decoupled, 0.125 l2  mean u8[16,256], mean/scale f32[16], variance u8[16,256], variance/scale f32[16]                      8.1 KiB
embed      bf16[64,128]  adam_w (embed)  falling        0.01 decoupled, 0.125 l2  mean u8[32,256], mean/scale f32[32], variance u8[32,256], variance/scale f32[32], rounded at random  16.2 KiB
head       f32[128,64]   sgd (head)      0.1                                      average f32                                                                                          32.0 KiB
old        f32[3]        frozen                                                                                                                                                             0 B

1. clip_by_global_norm  max_norm=1.0, across parameters on 3
2. l2                   rate=0.125, elementwise on 3
3. adam_w               learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, weight_decay=0.0, elementwise on body/b
4. adam_w               learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, weight_decay=0.01, elementwise on body/w
5. adam_w               learning_rate=falling, beta1=0.9, beta2=0.999, epsilon=1e-08, weight_decay=0.01, elementwise on embed
6. sgd                  learning_rate=0.1, elementwise on head
7. ema                  decay=0.999, ramp=False, elementwise on head"""  # noqa: E501


@pytest.fixture(scope="module")
def programs():
    forward = ow.trace(loss, PARAMS, 1.0)
    backward = MIXED.create_backward_pass(forward)
    return {"forward": forward, "backward": backward, "full": MIXED.create_optimization_pass(backward)}


@pytest.mark.parametrize("passes", ["forward", "backward", "full"])
def test_the_printout_whatever_passes_there_are(programs, passes):
    assert [line.rstrip() for line in str(MIXED.plan(programs[passes])).splitlines()] == [
        line.rstrip() for line in PRINTED.splitlines()
    ]


def test_the_plan_is_what_happens(programs):
    plan, program = MIXED.plan(programs["forward"]), programs["full"]
    state = {v.name: v for v in program.state}
    for destination in plan.destinations:
        for name, slot in destination.slots.items():
            assert (state[name].shape, state[name].dtype) == (slot.shape, slot.dtype)
    planned = {name for d in plan.destinations for name in d.slots}
    kept = {name for name in state if name.startswith(("embed/", "body/w/", "body/b/", "head/", "old/"))}
    assert planned == kept - {v.name for v in program.hyperparameters}
    acting = [
        t.op.type
        for t in program.updates
        if t.op.type not in ("count", "schedule", "round", "narrow", "widen")
    ]
    expected = [
        kind
        for rule, names in plan.order
        for kind in [rule.name] * (1 if rule.type == ow.UpdateType.ACROSS else len(names))
    ]
    assert acting == expected


@pytest.mark.parametrize("optimizer", [ow.Adam(1e-3), ow.Adam(1e-3, low_precision="nearest")])
def test_what_becomes_of_low_precision(programs, optimizer):
    found = optimizer.plan(programs["forward"])["embed"]
    master = optimizer.low_precision == "master"
    assert ("embed/rest" in found.slots) == master
    assert found.slot_bytes == (3 if master else 2) * 4 * 64 * 128
    assert ("rounded to the nearest" in found.cells[5]) == (not master)


def test_what_is_not_trained_is_shown_as_frozen(programs):
    backward = ow.SGD(0.1).create_backward_pass(programs["forward"], parameter_list=["body/*"])
    plan = ow.SGD(0.1).plan(backward)
    assert {d.parameter.name: d.by for d in plan.destinations if d.by != "frozen"} == {
        "body/w": "sgd",
        "body/b": "sgd",
    }
    assert plan["head"].by == "frozen"


def test_the_route_of_each_parameter_is_shown():
    plan = Muon(rules=[ow.L2(0.1)]).plan(ow.trace(loss, PARAMS, 1.0))
    assert [d.by for d in plan.destinations] == ["adam_w", "muon", *["adam_w"] * 3]
    assert "fallback=AdamW," in str(plan)


def test_names_and_slots_of_one_name():
    plan = ow.SGD(0.1, rules=[ow.EMA(0.9), ow.rule.PolyakAverage()]).plan(ow.trace(loss, PARAMS, 1.0))
    program = ow.SGD(0.1, rules=[ow.EMA(0.9), ow.rule.PolyakAverage()]).minimize(ow.trace(loss, PARAMS, 1.0))
    names = {v.name for v in program.state}
    assert len(plan["head"].slots) == 2
    assert names.issuperset(plan["head"].slots)


def test_a_parameter_that_is_none(programs):
    with pytest.raises(ow.UnknownNameError, match=r"no parameter named 'haed'.*'head'"):
        MIXED.plan(programs["forward"])["haed"]


def test_a_rule_is_traced_once_however_often_a_recipe_is_taken_again():
    traced = []

    class Counted(ow.GradientRule):
        def update(self, parameter, gradient, slots):
            traced.append(gradient.shape)
            return gradient, slots

    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    program = ow.SGD(0.1, rules=[Counted()]).minimize(loss, [jnp.eye(4)] * 6, jnp.ones((2, 4)))
    assert ow.graph.rolls_of(ow.roll(program))
    assert traced == [(4, 4)]
    with jax.default_matmul_precision("highest"):
        ow.roll(program)
    assert traced == [(4, 4)] * 2


def test_a_rule_whose_list_was_changed_in_place_is_traced_again():
    class Scaled(ow.GradientRule):
        by: list[float]

        def update(self, parameter, gradient, slots):
            return gradient * self.by[0], slots

    backward = ow.append_backward(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3)))
    optimizer = ow.SGD(0.1, rules=[Scaled(by=[2.0])])
    for factor in (2.0, 5.0):
        optimizer.rules[0].by[0] = factor
        program = ow.append_update(backward, optimizer)
        (op,) = (op for op in program.ops if op.type == "scaled")
        assert op.body(jnp.ones(3))[0][0] == factor
