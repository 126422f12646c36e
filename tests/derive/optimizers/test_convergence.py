"""Every first-order optimizer reaches the minimum, with the learning rate and in the steps of this table."""

import pytest
from reference import descended, parabola, rosenbrock

import onward as ow

# The learning rate on the parabola, in 200 steps; that on Rosenbrock's function, and its steps.
TABLE = {
    ow.SGD: (0.05, 0.002, 2000),
    ow.Momentum: (0.01, 0.001, 2000),
    ow.Nesterov: (0.02, 0.001, 2000),
    ow.ASGD: (0.1, 0.002, 20000),
    ow.SignSGD: (0.01, 0.0001, 50000),
    ow.Signum: (0.01, 0.0005, 10000),
    ow.Lion: (0.01, 0.002, 2000),
    ow.Rprop: (0.01, 0.01, 2000),
    ow.Adagrad: (0.5, 0.5, 2000),
    ow.DecayedAdagrad: (0.02, 0.005, 2000),
    ow.Adadelta: (3.0, 0.05, 10000),
    ow.RMSProp: (0.02, 0.005, 2000),
    ow.Adam: (0.1, 0.1, 2000),
    ow.AdamW: (0.1, 0.1, 2000),
    ow.LazyAdam: (0.1, 0.1, 2000),
    ow.AMSGrad: (0.1, 0.1, 2000),
    ow.Adamax: (0.1, 0.5, 2000),
    ow.NAdam: (0.1, 0.02, 2000),
    ow.RAdam: (0.1, 0.002, 10000),
    ow.Yogi: (0.05, 0.1, 2000),
    ow.AdaBelief: (0.1, 0.1, 2000),
    ow.ADOPT: (0.2, 1.0, 2000),
    ow.Adan: (0.2, 0.05, 2000),
    ow.AdEMAMix: (0.1, 0.1, 2000),
    ow.MARS: (0.05, 0.01, 2000),
}


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_the_parabola(kind):
    assert descended(kind(TABLE[kind][0]), parabola, [1.0] * 10, 200) < 1e-3


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_rosenbrock(kind):
    _, rate, steps = TABLE[kind]
    optimizer = kind(rate, average_after=steps - 1000) if kind is ow.ASGD else kind(rate)
    assert descended(optimizer, rosenbrock, [-1.2, 1.0], steps) < 1e-3
