"""Several rules act in the order in which they are listed, and say so."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.derive.rules import by_rule
from tests.derive.rules.around import all_around, compare

import onward as ow

CASES = {
    "ClipByValue": (ow.ClipByValue(0.5), by_rule.clip_by_value(0.5)),
    "ClipByNorm": (ow.ClipByNorm(0.75), by_rule.clip_by_norm(0.75)),
    "L2": (ow.L2(0.5), by_rule.l2(0.5)),
    "WeightDecay": (ow.WeightDecay(0.1), by_rule.decay(0.1)),
    "EMA": (ow.EMA(0.9), by_rule.ema(0.9)),
    "Cautious": (ow.rule.Cautious(0.25), by_rule.cautious(0.25)),
    "Lookahead": (ow.rule.Lookahead(0.3, every=6), by_rule.lookahead(0.3, 6)),
}
ORDERS = {
    "clip, then penalty": ["ClipByNorm", "L2"],
    "penalty, then clip": ["L2", "ClipByNorm"],
    "cautious, then decay": ["Cautious", "WeightDecay"],
    "decay, then cautious": ["WeightDecay", "Cautious"],
    "lookahead, then average": ["ClipByValue", "Lookahead", "EMA"],
    "average, then lookahead": ["EMA", "ClipByValue", "Lookahead"],
}


@pytest.fixture(scope="module")
def in_order():
    kept = ("/average", "/slow")
    return all_around(
        {name: ([CASES[n][0] for n in rules], kept, 0) for name, rules in ORDERS.items()}, "float64"
    )


def test_rules_act_in_the_order_in_which_they_are_listed(in_order):
    """Each order is as by hand, and no two are the same."""
    for name, rules in ORDERS.items():
        compare(in_order[name], *zip(*(CASES[n] for n in rules), strict=True), "float64")
    names = list(ORDERS)
    for one, other in zip(names[::2], names[1::2], strict=True):
        assert any(not np.allclose(in_order[one][k], in_order[other][k]) for k in in_order[one])


def test_the_order_is_printed():
    rules = [ow.EMA(0.9), ow.L2(0.1), ow.rule.Cautious(), ow.ClipByNorm(1.0)]
    program = ow.SGD(0.1, rules=rules).minimize(lambda w: jnp.sum(w**2), jnp.ones(2))
    expected = ["count", "l2", "clip_by_norm", "sgd", "ema", "cautious"]
    assert [t.op.type for t in program.updates] == expected
    plan = ow.SGD(0.1, rules=rules).plan(program)
    assert [rule.name for rule, _ in plan.order] == expected[1:]
    positions = [str(plan).index(f"{i}. {name}") for i, name in enumerate(expected[1:], 1)]
    assert positions == sorted(positions)
