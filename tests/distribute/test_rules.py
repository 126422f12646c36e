"""Rules around an optimizer on one device, on two, and cut for two servers: equal, or refused by name."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import together, training
from tests.distribute.split.by_hand import ByHand

import onward as ow

PARAMS = {"w": np.random.default_rng(0).normal(size=(6, 4)).astype("float32"), "s": np.float32(2)}
X = np.random.default_rng(1).normal(size=(8, 6)).astype("float32")
HALF = np.concatenate([X[:4], X[:4]])
RULES = {
    "ClipByValue": ow.ClipByValue(0.02),
    "ClipByNorm": ow.ClipByNorm(0.1),
    "ClipByGlobalNorm": ow.ClipByGlobalNorm(0.1),
    "AdaptiveClip": ow.rule.AdaptiveClip(0.1),
    "L2": ow.L2(0.1),
    "Centralize": ow.rule.Centralize(),
    "Noise": ow.rule.Noise(0.01),
    "SAM": ow.SAM(0.1),
    "WeightDecay": ow.WeightDecay(0.1, where=["w"]),
    "EMA": ow.EMA(0.5),
    "Lookahead": ow.rule.Lookahead(0.5, every=2),
    "Cautious": ow.rule.Cautious(),
}
WHOLE = {"Cautious"}  # after the update, and further than number by number
KEEPING = {"EMA", "Lookahead", "Cautious"}  # beside the slot of an optimizer, or against where it goes


def loss(p, x):
    return jnp.mean((x @ p["w"]) ** 2) * p["s"]


def program_of(name):
    optimizer = ow.Momentum if name in KEEPING else ow.SGD
    return optimizer(0.1, rules=[RULES[name]]).minimize(loss, PARAMS, X)


def three_steps(programs, x):
    """The state of each of these Programs after three steps, all compiled as one."""
    cases = {name: training(program, PARAMS, np.stack([x] * 3)) for name, program in programs.items()}
    return {name: state for name, (state, _) in together(cases).items()}


@cache
def alone():
    return three_steps({name: program_of(name) for name in RULES}, X)


# Average and LocalSGD know nothing of the rules, so one of each kind stands for it: number by number, by
# matrix, across parameters, with random numbers, with the loss, with slots, before the update and after it.
ON_TWO = "AdaptiveClip", "ClipByGlobalNorm", "Noise", "SAM", "WeightDecay", "EMA", "Lookahead", "Cautious"
LOCAL = "ClipByNorm", "ClipByGlobalNorm", "Noise", "L2", "Lookahead", "Cautious"


@cache
def on_two():
    return three_steps({name: ow.replicate(program_of(name), 2) for name in ON_TWO}, X)


@cache
def by_halves():
    return three_steps({n: ow.replicate(program_of(n), 2, ow.Sharded()) for n in RULES if n not in WHOLE}, X)


@cache
def local():
    """Two devices with the same half of a batch, and one with both."""
    programs = {name: program_of(name) for name in LOCAL}
    spread = {n: ow.replicate(p, 2, ow.merge.LocalSGD(every=3)) for n, p in programs.items()}
    return three_steps(spread, HALF), three_steps(programs, HALF)


def equal(state, expected, names=PARAMS):
    for name in names:
        np.testing.assert_allclose(state[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_devices_are_as_one(name):
    equal(on_two()[name], alone()[name], alone()[name])


@pytest.mark.parametrize("name", RULES)
def test_two_devices_that_update_a_half_each_are_as_one(name):
    if name in WHOLE:
        with pytest.raises(ow.GraphError, match=f"{name} looks at them per matrix"):
            ow.replicate(program_of(name), 2, ow.Sharded())
        return
    equal(by_halves()[name], alone()[name])


def test_local_updates_evaluate_no_loss_again():
    with pytest.raises(ow.GraphError, match=r"SAM evaluates the loss .*every device trains parameters"):
        ow.replicate(program_of("SAM"), 2, ow.merge.LocalSGD(every=3))


@pytest.mark.parametrize("name", LOCAL)
def test_local_updates_follow_the_rules_on_each_device(name):
    """Of two devices with the same half of a batch, each one's own way is that of one device with both."""
    found, expected = local()
    equal(found[name], expected[name])


REFUSED = {"SAM": "SAM evaluates the loss in its update, and servers have no data"}


@pytest.mark.parametrize("name", RULES)
def test_two_servers_are_as_one_device(name):
    if name in REFUSED:
        with pytest.raises(ow.GraphError, match=REFUSED[name]):
            ow.split(program_of(name), 2)
        return
    servers = ByHand(ow.split(program_of(name), 2), PARAMS)
    for _ in range(3):
        servers.step([{"x": X}])
    equal(servers.parameters(), alone()[name])


@pytest.mark.parametrize("merge", [ow.Average(), ow.Sharded()], ids=["average", "sharded"])
def test_master_weights_on_two_devices_are_as_on_one(merge):
    def wide(w, x):
        return jnp.mean((x @ w.astype(jnp.float32)) ** 2)

    w = jnp.linspace(1, 2, 6).astype(jnp.bfloat16)
    program = ow.Adam(0.01, rules=[ow.L2(0.1), ow.EMA(0.5)]).minimize(wide, w, X)
    found = []
    for one in (program, ow.replicate(program, 2, merge)):
        step = ow.compile(one)
        state = step.init(w)
        for _ in range(5):
            state, _ = step(state, X)
        found.append(
            {name: np.asarray(state[name], np.float32).ravel()[:6] for name in ("w", "w/rest", "w/average")}
        )
    for whole in found:
        whole["master"] = whole["w"] + whole["w/rest"]
    for name in ("master", "w/average"):
        np.testing.assert_allclose(found[1][name], found[0][name], rtol=1e-4)
