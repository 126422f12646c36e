"""Every rule around three optimizers, a hundred steps, against NumPy."""

from functools import cache

import pytest
from tests.derive.rules import by_rule
from tests.derive.rules.around import RTOL, all_around, compare

import onward as ow

CASES = {
    "ClipByValue": (ow.ClipByValue(0.5), by_rule.clip_by_value(0.5)),
    "ClipByNorm": (ow.ClipByNorm(0.75), by_rule.clip_by_norm(0.75)),
    "ClipByGlobalNorm": (ow.ClipByGlobalNorm(1.5), by_rule.clip_by_global_norm(1.5)),
    "AdaptiveClip": (ow.rule.AdaptiveClip(0.5, 0.25), by_rule.adaptive_clip(0.5, 0.25)),
    "L1": (ow.L1(0.1), by_rule.l1(0.1)),
    "L2": (ow.L2(0.1), by_rule.l2(0.1)),
    "Centralize": (ow.rule.Centralize(), by_rule.centralize()),
    "WeightDecay": (ow.WeightDecay(0.1), by_rule.decay(0.1)),
    "WeightDecay, independent": (ow.WeightDecay(0.01, "independent"), by_rule.decay(0.01, True)),
    "WeightDecay, l2": (ow.WeightDecay(0.1, "l2"), by_rule.l2(0.1)),
    "EMA": (ow.EMA(0.9), by_rule.ema(0.9)),
    "EMA, ramp": (ow.EMA(0.9, ramp=True), by_rule.ema(0.9, True)),
    "PolyakAverage": (ow.rule.PolyakAverage(begin=7), by_rule.mean_of_every(7, 1)),
    "SWA": (ow.SWA(begin=10, every=4), by_rule.mean_of_every(10, 4)),
    "Lookahead": (ow.rule.Lookahead(0.3, every=6), by_rule.lookahead(0.3, 6)),
    "Cautious": (ow.rule.Cautious(0.25), by_rule.cautious(0.25)),
}
KEPT = {
    "EMA": "/average",
    "EMA, ramp": "/average",
    "PolyakAverage": "/average",
    "SWA": "/average",
    "Lookahead": "/slow",
}


IN_BOTH = ["ClipByGlobalNorm", "EMA", "Lookahead"]  # of the others the sharper test says enough


def turn(name, dtype):
    """Over the rules each shape comes to each optimizer, and over the types of numbers for each rule."""
    return list(CASES).index(name) + ["float64", "complex128", "float32"].index(dtype)


@cache
def found(dtype):
    names = {"float32": IN_BOTH, "float64": CASES, "complex128": COMPLEX}[dtype]
    return all_around({name: ([CASES[name][0]], KEPT.get(name), turn(name, dtype)) for name in names}, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in CASES for d in RTOL if d == "float64" or n in IN_BOTH]
)
def test_a_hundred_steps_around_three_optimizers(name, dtype):
    rule, reference = CASES[name]
    if name in ("PolyakAverage", "SWA"):  # these references remember
        reference = by_rule.mean_of_every(rule.begin, getattr(rule, "every", 1))
    compare(found(dtype)[name], [rule], [reference], dtype, turn(name, dtype))


COMPLEX = [
    "ClipByValue",
    "ClipByGlobalNorm",
    "AdaptiveClip",
    "L1",
    "Centralize",
    "EMA",
    "Lookahead",
    "Cautious",
]


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters(name):
    rule, reference = CASES[name]
    compare(found("complex128")[name], [rule], [reference], "complex128", turn(name, "complex128"))
