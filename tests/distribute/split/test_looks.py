"""What servers see of their parts, put together, against one device: float64, moved by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.split.by_hand import ByHand, parts_of

import onward as ow
from onward.develop.watch.reading import Watched
from onward.develop.watch.statistics import SCALARS
from onward.distribute.split.joined import WHOLE

ROWS, STEPS = 8, 4
RNG = np.random.default_rng(0)
FIRST = {"b": RNG.normal(size=3), "u": RNG.normal(size=(3, 2)), "w": RNG.normal(size=(6, 3))}
BATCHES = [(RNG.normal(size=(ROWS, 6)),) for _ in range(STEPS)]
BATCHES[2][0][0] = np.nan


def loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) @ p["u"])


def watched(rows, guard):
    """All statistics of what is shared; those that need all numbers in one place, of one that is not."""
    optimizer = ow.Adam(lambda step: 0.1 / (1 + step), rules=[ow.ClipByGlobalNorm(0.1)])
    program = optimizer.minimize(loss, FIRST, np.ones((rows, 6)))
    some = ["norm", "std", "max", "ratio"]
    program = ow.watch(program, gradients=True, updates=True, statistics=some, every=2)
    program = ow.guard(program) if guard else program
    names = ["b/mean", "next(b)", "beta1", "step", "clip_by_global_norm(grad(b))"]
    own = ow.typing.Statistic("first", lambda x, over: jnp.ravel(x)[:2])
    return ow.watch(program, names, updates="b", statistics=[own, "mean"], every=1)


@pytest.mark.parametrize(("servers", "trainers", "guard"), [(2, 1, False), (3, 2, True)])
def test_servers_together_see_what_one_device_sees(servers, trainers, guard):
    with jax.enable_x64(True):
        program = watched(ROWS, guard)
        cut = ow.split(watched(ROWS // trainers, guard), servers, trainers)
        assert servers == 1 or any(s.parameter.name == "w" and not s.is_whole for s in cut.shards[-1])
        assert [s.is_whole for own in cut.shards for s in own if s.parameter.name == "b"] == [True]
        hand, step = ByHand(cut, FIRST), ow.compile(program)
        state = step.init(FIRST)
        for n, batch in enumerate(BATCHES):
            state, out = step(state, *batch)
            hand.step([{"x": part[0]} for part in parts_of(batch, trainers)])
            seen = [
                tuple((int(values[at.name]), np.asarray(values[x.name])) for at, x in part.looked)
                for part, values in zip(cut.server_parts, hand.states, strict=True)
            ]
            found = Watched([(j.cells, *j(seen)) for j in cut.joined])
            own = {"grad(b)", "grad(u)", "grad(w)", "all gradients"} if trainers == 1 else ()
            labels = [label for label in out.watched if label not in own]
            assert sorted(found) == sorted(labels)
            assert ("all updates" in labels) == (n % 2 == 0 or (guard and n == 3))
            for label in labels:
                same(found[label], out.watched[label], label)


PARTS = [slice(0, 1), slice(1, 6), slice(6, 9)]
MEASURES = tuple(dict.fromkeys([*SCALARS.values(), *(s for whole in WHOLE.values() for s in whole.of)]))


@jax.jit
def measured(x, base):
    """Every statistic of each part, and of the whole behind them."""
    return [[s(x[p], base=base[p]) for p in (*PARTS, slice(None))] for s in MEASURES]


@pytest.mark.parametrize("odd", [(0.0, 0.0), (np.inf, 1.0), (np.inf, np.nan), (1e200, 1.0)])
def test_statistics_of_parts_make_that_of_the_whole(odd):
    """All that follow from parts, of two and more, one of which has one number."""
    x, base = RNG.normal(size=(2, 9))
    x[4], x[7] = odd
    sizes = np.array([1.0, 5.0, 3.0])
    with jax.enable_x64(True), np.errstate(all="ignore"):
        found = dict(zip(MEASURES, jax.tree.map(np.float64, measured(x, base)), strict=True))
        for statistic in SCALARS.values():
            whole = WHOLE[statistic.function]
            columns, expected = [found[s][:-1] for s in whole.of], found[statistic][-1]
            rtol = 1e-6 if statistic.name in ("zeros", "nonfinite") else 1e-12  # these are float32
            np.testing.assert_allclose(whole.of_parts(sizes, *columns), expected, rtol, 1e-15)


def same(found, expected, label):
    assert sorted(found) == sorted(expected)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, 1e-9, 1e-15, err_msg=f"{label} {name}")
