"""Every first-order optimizer reaches the minimum, with the learning rate and in the steps of this table."""

from functools import cache, partial

import numpy as np
import pytest
from tests.compiled import together
from tests.derive.optimizers.reference import descended, parabola, rosenbrock

import onward as ow

# The learning rate on the parabola, in 200 steps; that on Rosenbrock's function, and its steps.
TABLE = {
    ow.SGD: (0.05, 0.002, 2000),
    ow.Momentum: (0.01, 0.001, 2000),
    ow.Nesterov: (0.02, 0.001, 2000),
    ow.optimizer.ASGD: (0.1, 0.002, 20000),
    ow.optimizer.SignSGD: (0.01, 0.0001, 50000),
    ow.optimizer.Signum: (0.01, 0.0005, 10000),
    ow.Lion: (0.01, 0.002, 2000),
    ow.optimizer.Rprop: (0.01, 0.01, 2000),
    ow.Adagrad: (0.5, 0.5, 2000),
    ow.optimizer.DecayedAdagrad: (0.02, 0.005, 2000),
    ow.optimizer.Adadelta: (3.0, 0.05, 10000),
    ow.RMSProp: (0.02, 0.005, 2000),
    ow.Adam: (0.1, 0.1, 2000),
    ow.AdamW: (0.1, 0.1, 2000),
    ow.optimizer.LazyAdam: (0.1, 0.1, 2000),
    ow.optimizer.AMSGrad: (0.1, 0.1, 2000),
    ow.optimizer.Adamax: (0.1, 0.5, 2000),
    ow.optimizer.NAdam: (0.1, 0.02, 2000),
    ow.optimizer.RAdam: (0.1, 0.002, 10000),
    ow.optimizer.Yogi: (0.05, 0.1, 2000),
    ow.optimizer.AdaBelief: (0.1, 0.1, 2000),
    ow.optimizer.ADOPT: (0.2, 1.0, 2000),
    ow.optimizer.Adan: (0.2, 0.05, 2000),
    ow.optimizer.AdEMAMix: (0.1, 0.1, 2000),
    ow.optimizer.MARS: (0.05, 0.01, 2000),
}


@cache
def losses():
    """At the end, as a fraction of the start, by (kind, loss)."""

    def case(optimizer, loss, start, steps):
        return partial(descended, optimizer, loss, steps=steps), np.float32(start)

    bowls = {(kind, "parabola"): case(kind(row[0]), parabola, [1] * 10, 200) for kind, row in TABLE.items()}
    valleys = {
        (kind, "rosenbrock"): case(through_the_valley(kind), rosenbrock, [-1.2, 1], steps)
        for kind, (_, _, steps) in TABLE.items()
    }
    return together(bowls | valleys)


def through_the_valley(kind):
    _, rate, steps = TABLE[kind]
    return kind(rate, average_after=steps - 1000) if kind is ow.optimizer.ASGD else kind(rate)


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_the_parabola(kind):
    assert losses()[kind, "parabola"] < 1e-3


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_rosenbrock(kind):
    assert losses()[kind, "rosenbrock"] < 1e-3
