"""Steps that are not finite, on trainers and servers: left out, or refused, as on one device."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.on_threads import alone, close, running, together, trained

import onward as ow

RNG = np.random.default_rng(0)
FIRST = {"w": RNG.normal(size=(6, 2)).astype(np.float32), "b": np.ones(2, np.float32)}
X = RNG.normal(size=(48, 6)).astype(np.float32)
SPOILT, TRAINER, NUMBER = 5, 1, 2  # the sixth batch is the third one of the second trainer
BATCHES = [(X[i : i + 4].copy(),) for i in range(0, 48, 4)]
ADAM = ow.Adam(0.1)
BATCHES[SPOILT][0][2, 0] = 7.0

pytestmark = pytest.mark.usefixtures("short_pauses", "graphs_made_once")


def loss(p, x):
    """Smooth, but for a row that begins with 7."""
    return jnp.mean((x @ p["w"] + p["b"]) ** 2 + jnp.where(x[:, :1] == 7.0, jnp.nan, 0.0))


@cache
def minimized(rows, how="plain", optimizer=ADAM):
    program = optimizer.minimize(loss, FIRST, X[:rows])
    if how in ("skip", "stop"):
        return ow.guard(program, how)
    return ow.mixed_precision(program, "float16", scale=2.0**20) if how == "float16" else program


def on_one_device(how, rounds=6):
    return alone(minimized(8, how), together(BATCHES, 2)[:rounds], FIRST)[0]


def ended(program, batches, what, match, **options):
    """A training that ended by this error, and its message."""
    with running(program, batches, parameters=FIRST, **options) as run:  # noqa: SIM117
        with pytest.raises(what, match=match) as raised:
            run.wait(60.0)
    return run, str(raised.value)


@pytest.mark.parametrize(("servers", "mode"), [(1, "sync"), (2, "sync"), (2, "async")])
def test_an_update_that_is_not_finite_is_left_out_by_all_servers(servers, mode):
    run = trained(minimized(4, "skip"), BATCHES, parameters=FIRST, servers=servers, mode=mode)
    assert run.skipped == 1
    assert np.isnan(run.history["loss"]).sum() == 1
    assert all(np.isfinite(run.model[name]).all() for name in FIRST)
    if mode == "sync":
        close(run.model, on_one_device("skip"), FIRST, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("how", "options"), [("plain", {}), ("stop", {"check": False}), ("plain", {"check_finite": True})]
)
@pytest.mark.parametrize("mode", ["sync", ow.cluster.Local(1, ow.SGD(1.0))])
def test_a_step_that_is_not_finite_ends_the_training_before_it(how, options, mode):
    named = f"Trainer {TRAINER}, batch {NUMBER} "
    program = minimized(4, how)
    run, said = ended(program, BATCHES, ow.NonFiniteError, named, servers=2, mode=mode, **options)
    assert "nan" in said.lower()
    if mode == "sync":
        assert "The loss is nan. Nothing of this step was sent" in said
        assert "test_guarding.py" in said  # the user's line
        close(run.model, on_one_device("plain", NUMBER), FIRST, 1e-5, 1e-6)
    assert all(np.isfinite(run.model[name]).all() for name in FIRST)
    assert run.versions == (NUMBER, NUMBER)


def test_what_an_update_makes_is_looked_at_before_it_counts():
    large = ow.SGD(3e38)
    named = r"Server \d: an update is not finite, though all gradients"
    program = minimized(4, "plain", large)
    run, _ = ended(program, BATCHES, ow.NonFiniteError, named, servers=2, check_finite=True)
    assert all(np.isfinite(run.model[name]).all() for name in FIRST)


def test_float16_scales_the_loss_as_one_device_does():
    """The first scale overflows, so the first steps are left out, and the scale shrinks."""
    batches = [(np.concatenate([BATCHES[i][0], BATCHES[i + 1][0]]),) for i in range(0, 12, 2)]
    run = trained(minimized(8, "float16"), batches, parameters=FIRST, servers=2, trainers=1)
    expected = on_one_device("float16")
    assert run.skipped == int(expected["skipped"]) > 1
    close(run.model, expected, FIRST, 1e-6)
    two = trained(minimized(4, "float16"), BATCHES, parameters=FIRST, servers=2)
    assert two.skipped > 1
    assert all(np.isfinite(two.model[name]).all() for name in FIRST)


@pytest.mark.parametrize("mode", ["sync", ow.cluster.Local(1, ow.SGD(1.0))], ids=str)
def test_data_that_are_not_finite_are_refused_by_trainer_and_batch(mode):
    spoilt = [(x.copy(),) for (x,) in BATCHES[:4]]
    spoilt[3][0][1, 1] = np.inf
    named = r"Trainer 1, batch 1 .*'x' holds inf at \[1, 1\]"
    run, _ = ended(minimized(4), spoilt, ow.NonFiniteError, named, mode=mode)
    assert all(np.isfinite(run.model[name]).all() for name in FIRST)


def test_data_that_are_not_finite_are_taken_where_nothing_is_checked():
    spoilt = [(x.copy(),) for (x,) in BATCHES[:4]]
    spoilt[3][0][1, 1] = np.inf
    run = trained(minimized(4), spoilt, parameters=FIRST, check=False)
    assert not np.isfinite(run.model["w"]).all()
