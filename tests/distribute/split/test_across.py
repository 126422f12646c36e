"""Gradient rules that look across parameters of several servers, moved by hand, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.split.by_hand import compared

import onward as ow

RNG = np.random.default_rng(0)
PARAMS = {"table": RNG.normal(size=(50, 5)), "w": RNG.normal(size=(5, 3)), "b": np.zeros(3)}
DATA = RNG.integers(0, 50, size=(12, 2)), RNG.normal(size=(12, 3))
CLIP = ow.ClipByGlobalNorm(0.05)
CHANGED = [ow.ClipByValue(0.05), CLIP]
APART = [
    ow.ClipByGlobalNorm(0.05, where=["w", "b"]),
    ow.ClipByGlobalNorm(0.02, where="table"),
    ow.rule.Noise(0.01, where=["b", "table"]),
]


class Least(ow.GradientRule):
    """Looks across parameters, and does not say what it needs of those elsewhere."""

    type = ow.UpdateType.ACROSS

    def update(self, parameter, gradient, slots, hyperparameters):
        least = jnp.min(jnp.stack([jnp.max(abs(g)) for g in gradient]))
        return tuple(jnp.clip(g, -least, least) for g in gradient), slots


class Half(ow.ClipByGlobalNorm):
    """Changes ``update`` alone, so what its parent does with a part of the gradients is not what it does."""

    def update(self, parameter, gradient, slots, hyperparameters):
        return tuple(g / 2 for g in gradient), slots


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def loss(p, i, y):
    return jnp.mean((jnp.tanh(p["table"][i].sum(1) @ p["w"] + p["b"]) - y) ** 2)


def minimized(rules, rows=12, **options):
    return ow.SGD(0.05, rules=rules, **options).minimize(loss, PARAMS, *(x[:rows] for x in DATA))


@pytest.mark.parametrize(
    ("rules", "servers", "trainers", "exchanges"),
    [
        ([CLIP], 3, 1, False),
        ([CLIP], 2, 2, True),
        (CHANGED, 2, 1, True),
        (APART, 3, 2, True),
    ],
)
def test_sums_over_all_servers_are_those_of_one_device(rules, servers, trainers, exchanges, double):
    cut = ow.split(minimized(rules, 12 // trainers), servers, trainers)
    assert cut.exchanges == exchanges
    assert cut.tables
    compared(cut, minimized(rules), PARAMS, [DATA] * 2, trainers, 1e-12, 1e-14)


def test_micro_batches_guards_and_maximized_parameters_change_nothing(double):
    """The norm is that of the merged gradients, whatever is done before them and after."""

    def program(rows):
        made = minimized([CLIP], rows, groups=[ow.Group("b", maximize=True)])
        return ow.guard(ow.accumulate(made, 2))

    compared(ow.split(program(6), 2, 2), program(12), PARAMS, [DATA], 2, 1e-12, 1e-14)


def test_a_norm_whose_square_overflows_is_that_of_one_device():
    def steep(w, x):
        return jnp.mean(x @ w) * 1e30

    w, x = np.ones((6, 1), np.float32), RNG.normal(size=(4, 6)).astype(np.float32)
    sgd = ow.SGD(1.0, rules=[ow.ClipByGlobalNorm(1.0)])
    whole, half = (sgd.minimize(steep, w, x[:rows]) for rows in (4, 2))
    compared(ow.split(half, 2, 2), whole, w, [(x,)], 2, 1e-5)


def test_what_is_seen_in_the_programs():
    first, second = ow.split(minimized([CLIP], 6), 2, 2).server_parts
    words = [[op.type for op in p.ops] for p in (first.program, second.measuring, second.program)]
    assert words[0][:5] == ["recv", "count", "sums", "add", "clip_by_global_norm"]
    assert words[1:] == [["recv", "sums"], ["recv", "clip_by_global_norm", *words[2][2:]]]
    assert [v.name for v in first.whole] == [v.name for v in second.told[0]]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (
            [Least()],
            r"Least looks at all parameters at once, and 2 servers .* or give it sums and update_share",
        ),
        ([Half()], "Half looks at all parameters at once"),
        ([CLIP, ow.ClipByGlobalNorm(0.02)], r"both look across parameters of several servers.*Leave one"),
    ],
)
def test_what_is_refused(rules, text):
    with pytest.raises(ow.GraphError, match=text):
        ow.split(minimized(rules, 6), 2, 2)
    ow.split(minimized(rules, 6), 1, 2)


def test_one_server_has_its_parameters_in_the_order_of_one_device():
    """Each parameter draws noise by its number; tables travel apart from the others."""
    noise = minimized([ow.rule.Noise(0.01)])
    compared(ow.split(noise, 1), noise, PARAMS, [DATA], 1, 1e-5, 1e-6)
