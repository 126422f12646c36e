"""Rules that look across parameters of several servers: their sums, on one device and through kills."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.breaking import MESSAGES, Breaking, counted, tally
from tests.fleet.on_threads import alone, close, running, together, trained

import onward as ow
from onward.fleet.faults import BETWEEN

RNG = np.random.default_rng(0)
FIRST = {n: RNG.normal(size=s).astype(np.float32) for n, s in (("table", (40, 3)), ("w", (3, 4)), ("b", 4))}
IDS, Y = RNG.integers(0, 40, size=(8, 4, 2), dtype=np.int32), RNG.normal(size=(8, 4, 4)).astype(np.float32)
BATCHES = list(zip(IDS, Y, strict=True))
CLIP = ow.Adam(0.1, rules=[ow.ClipByGlobalNorm(0.05)])

pytestmark = pytest.mark.usefixtures("graphs_made_once", "short_pauses")


def loss(p, i, y):
    """Not a number for a target that begins with 7."""
    h = jnp.tanh(p["table"][i].sum(1) @ p["w"] + p["b"])
    return jnp.mean((h - y) ** 2 + jnp.where(y[:, :1] == 7.0, jnp.nan, 0.0))


@cache
def minimized(rows, optimizer=CLIP):
    i, y = (np.concatenate([x] * (rows // 4)) for x in BATCHES[0])
    return optimizer.minimize(loss, FIRST, i, y)


@cache
def guarded(rows):
    return ow.guard(minimized(rows))


def spoilt(batches):
    """The same with one that is not finite."""
    changed = [(i, y.copy()) for i, y in batches]
    changed[3][1][0, 0] = 7.0
    return changed


@pytest.mark.parametrize(("servers", "trainers"), [(2, 1), (3, 2)])
def test_the_norm_of_all_servers_is_that_of_one_device(servers, trainers):
    batches = spoilt(BATCHES)
    run = trained(guarded(4), batches, parameters=FIRST, servers=servers, trainers=trainers, check=False)
    expected, _ = alone(guarded(4 * trainers), together(batches, trainers), FIRST)
    assert run.skipped == int(expected["skipped"]) == 1
    close(run.model, expected, FIRST, 1e-5, 1e-6)


def test_the_norm_is_that_of_gradients_without_their_loss_scale():
    """The first scale overflows; what is left out on one device is left out here."""
    program = ow.mixed_precision(minimized(4), "float16", scale=2.0**20)
    run = trained(program, BATCHES, parameters=FIRST, servers=2, trainers=1)
    expected, _ = alone(program, BATCHES, FIRST)
    assert run.skipped == int(expected["skipped"]) > 1
    close(run.model, expected, FIRST, 1e-5, 1e-6)


def test_a_trainer_clips_its_own_gradient_where_each_is_an_update():
    """One trainer at its own pace is one device; of two, each sends the sums of its own gradient."""
    run = trained(guarded(4), BATCHES, parameters=FIRST, servers=2, trainers=1, mode="async")
    close(run.model, alone(guarded(4), BATCHES, FIRST)[0], FIRST, 1e-5, 1e-6)
    sgd = ow.SGD(1.0, rules=[ow.ClipByGlobalNorm(0.01)])
    run = trained(minimized(4, sgd), BATCHES, parameters=FIRST, servers=2, mode=ow.cluster.Bounded(2))
    way = sum(float(np.sum((np.asarray(run.model[n]) - x) ** 2)) for n, x in FIRST.items()) ** 0.5
    assert 0 < way <= 8 * 0.01 * (1 + 1e-9)


def test_without_rounds_sums_of_changed_gradients_are_refused():
    changed = ow.SGD(0.1, rules=[ow.ClipByValue(0.1), ow.ClipByGlobalNorm(1.0)])
    with pytest.raises(ow.GraphError, match=r"ClipByGlobalNorm\(.*Put it first in rules=.* mode='sync'"):
        ow.cluster.start(minimized(4, changed), BATCHES, parameters=FIRST, servers=2, mode="async")


def test_an_outer_optimizer_across_parameters_is_refused_and_its_clip_is_of_all_servers():
    """Two halves of what one step changes: the outer clip is that of one server."""
    inner = minimized(4, ow.SGD(1.0))
    with pytest.raises(ow.GraphError, match="Prodigy looks at all parameters at once, and 2 servers"):
        ow.cluster.start(
            inner, BATCHES, parameters=FIRST, servers=2, mode=ow.cluster.Local(1, ow.optimizer.Prodigy(1.0))
        )
    outer = ow.SGD(1.0, rules=[ow.ClipByGlobalNorm(0.05)])
    found = [
        trained(inner, BATCHES, parameters=FIRST, servers=n, mode=ow.cluster.Local(2, outer)).model
        for n in (1, 2)
    ]
    close(*found, FIRST, 1e-5, 1e-6)


# ---------------------------------------------------------------------------- whoever dies

# Two trainers, two parameters: the gradients of a round have the norm 2, of which half is left, twice.
HALVED = ow.SGD(2.0, rules=[ow.ClipByGlobalNorm(1.0)])


@cache
def counting():
    _, first, read = counted(12)
    first = {n: first[n] for n in "ab"}
    return (
        HALVED.minimize(lambda p, x: jnp.sum(x @ p["a"]) + jnp.sum(x @ p["b"]), first, read[0]),
        first,
        read,
    )


def halved(folder, kills=(), rates=None, **options):
    """A training that counts, and what was broken in it."""
    program, first, read = counting()
    faults = Breaking(folder / "faults", kills, rates, seed=3)
    options = {"servers": 2, "deadline": 20.0, "restarts": 20, **options}
    with running(
        program, read, parameters=first, merge=ow.Sum(), settings={"faults": faults}, **options
    ) as run:
        return run.wait(60.0), faults.injected


@pytest.mark.parametrize(
    "kills",
    [
        [("server 1", BETWEEN, 2), ("server 1", BETWEEN, 4)],
        [("server 0", "before reply", 9), ("trainer 0", "after send", 7), ("server 1", BETWEEN, 5)],
        [("trainer 0", "after send", 4), ("trainer 1", "after send", 4), ("server 1", "after apply", 3)],
    ],
)
def test_a_kill_between_the_parts_and_the_whole(tmp_path, kills):
    run, injected = halved(tmp_path, kills)
    assert tally(run.model, "ab") == (0, 0)
    assert injected.total() == len(kills)


def test_messages_that_are_lost_and_records_that_are_not_of_every_update(tmp_path):
    rates = dict.fromkeys(MESSAGES, 0.06)
    kills = [("server 1", BETWEEN, 4), ("server 0", "after apply", 4)]
    run, injected = halved(tmp_path, kills, rates, servers=3, durability=2)
    assert tally(run.model, "ab") == (0, 0)
    assert injected.total() >= 8


def test_a_snapshot_brings_the_sums_to_who_lacks_them(tmp_path):
    """A snapshot is of one version, made by whoever asks if no trainer has."""
    program, first, read = counting()
    with running(program, read, parameters=first, merge=ow.Sum(), servers=2) as run:
        while run.is_running:
            model = run.snapshot()
            np.testing.assert_array_equal(model["a"], model["b"])
        assert tally(run.wait(60.0).model, "ab") == (0, 0)
