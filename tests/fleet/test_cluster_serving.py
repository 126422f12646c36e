"""The parameters while training goes on and after it; stopping, waiting, and going on in a folder."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.on_threads import WAIT, arrays, close, equal, running, together, trained

import onward as ow
from onward.fleet import run as run_module

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(64, 5)).astype(np.float32), RNG.normal(size=(64, 2)).astype(np.float32)
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 64, 4)]
FIRST = {"w": RNG.normal(size=(5, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
MODES = ["sync", "async", ow.cluster.Bounded(1), ow.cluster.Local(2)]


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


PROGRAM = ow.Adam(0.05).minimize(loss, FIRST, *BATCHES[0])

pytestmark = pytest.mark.usefixtures("graphs_made_once", "short_pauses")


def slowly(pause=0.02):
    for batch in BATCHES:
        time.sleep(pause)
        yield batch


def slower():
    return slowly(0.1)


def begun(run):
    """Wait until some steps are done."""
    end = time.monotonic() + WAIT
    while len(run.history.get("step", ())) < 3:
        assert run.is_running
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_snapshot_is_a_model_of_now(mode):
    with running(PROGRAM, slowly, parameters=FIRST, servers=2, mode=mode, epochs=50) as run:
        begun(run)
        models = [ow.cluster.snapshot(), run.snapshot()]
        assert run.is_running
        first = arrays(models[0], FIRST)
        assert np.abs(first["w"] - FIRST["w"]).max() > 0
        numbers = [ow.Evaluator(model).test(BATCHES)["loss"] for model in models]
        assert all(0 < number < 10 for number in numbers)
        time.sleep(0.15)
        equal(models[0], first, FIRST)
        later = run.snapshot()
        assert np.abs(np.asarray(later["w"]) - first["w"]).max() > 0
        assert len(run.versions) == 2


def test_a_snapshot_in_rounds_is_one_version_of_all_servers():
    step = ow.compile(ow.Adam(0.05).minimize(loss, FIRST, X[:8], Y[:8]), donate=False)
    state, versions = step.init(FIRST), []
    for batch in together(BATCHES * 4, 2):
        state, _ = step(state, *batch)
        versions.append(arrays(state, FIRST))
    with running(PROGRAM, slowly, parameters=FIRST, servers=2, epochs=4) as run:
        begun(run)
        for _ in range(5):
            found = run.snapshot()
            distance = [max(np.abs(np.asarray(found[n]) - v[n]).max() for n in FIRST) for v in versions]
            assert min(distance) < 1e-5
            time.sleep(0.05)
        run.wait(WAIT)
        close(run.model, versions[-1], FIRST, 1e-4, 1e-5)


def test_after_the_end_a_snapshot_is_the_model():
    run = trained(PROGRAM, BATCHES, parameters=FIRST)
    assert not run.is_running
    equal(run.snapshot(), run.model, FIRST)
    with pytest.raises(ow.StateError, match=r"0 trainings .* are running .*run\.snapshot\(\)"):
        ow.cluster.snapshot()


def test_with_two_trainings_one_has_to_say_which():
    with (
        running(PROGRAM, slowly, parameters=FIRST, epochs=50) as one,
        running(PROGRAM, slowly, parameters=FIRST, epochs=50) as other,
    ):
        with pytest.raises(ow.StateError, match="2 trainings"):
            ow.cluster.snapshot()
        begun(other)
        assert np.abs(np.asarray(other.snapshot()["w"]) - FIRST["w"]).max() > 0
        one.stop()
        assert not one.is_running
        assert other.is_running
        ow.cluster.snapshot()


# ---------------------------------------------------------------------------- waiting and stopping


def test_stop_keeps_what_was_learned():
    with running(PROGRAM, slowly, parameters=FIRST, servers=2, epochs=50) as run:
        begun(run)
        run.stop()
        assert not run.is_running
        assert run.wait(0.0) is run
        assert np.abs(np.asarray(run.model["w"]) - FIRST["w"]).max() > 0
        assert "ended" in repr(run)
        run.stop()


def test_waiting_is_limited_and_the_training_goes_on():
    with running(PROGRAM, slowly, parameters=FIRST) as run:
        assert "running" in repr(run)
        with pytest.raises(TimeoutError, match=r"not ended within 0\.05 s"):
            run.wait(0.05)
        assert run.is_running
        run.wait(WAIT)
        assert len(run.history["loss"]) == len(BATCHES)


def test_an_interrupt_ends_everything(monkeypatch):
    with running(PROGRAM, slowly, parameters=FIRST, epochs=50) as run:
        begun(run)
        join, calls = threading.Thread.join, []

        def interrupted(thread, timeout=None):
            calls.append(thread)
            if len(calls) == 1:
                raise KeyboardInterrupt
            join(thread, timeout)

        monkeypatch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.wait()
        monkeypatch.undo()
        assert not run.is_running
        assert not any(host.alive for host in run.engine.hosts)
        assert np.abs(np.asarray(run.model["w"]) - FIRST["w"]).max() > 0


def test_the_load_of_the_servers_is_recorded_now_and_then_and_not_at_every_look(monkeypatch):
    monkeypatch.setattr(run_module, "_LOAD", WAIT)
    run = trained(PROGRAM, slowly, parameters=FIRST, servers=2)
    assert sorted(run.load["server"]) == [0, 0, 1, 1]  # at the first look, and at the end


# ---------------------------------------------------------------------------- going on in a folder


@pytest.mark.parametrize("stopped", [False, True], ids=["ended", "stopped"])
def test_rounds_go_on_where_they_ended(stopped, tmp_path):
    options = {"parameters": FIRST, "servers": 2, "folder": tmp_path}
    with running(PROGRAM, slower if stopped else slowly, **options) as run:
        begun(run)
        run.stop() if stopped else run.wait(WAIT)
        done = run.versions[0]
        assert done < len(BATCHES) // 2 if stopped else done == len(BATCHES) // 2
        ended = arrays(run.model, FIRST)
    whole = trained(PROGRAM, BATCHES, parameters=FIRST, servers=2, epochs=2)
    again = trained(PROGRAM, BATCHES, epochs=2, **options)
    equal(again.model, whole.model, FIRST)
    assert done < again.history["step"].min()
    assert again.history["step"].max() == len(BATCHES)
    over = trained(PROGRAM, BATCHES, epochs=2, **options)
    equal(over.model, whole.model, FIRST)
    assert "loss" not in over.history
    assert np.abs(ended["w"] - np.asarray(over.model["w"])).max() > 0


def test_trainers_at_their_own_pace_go_on_with_the_batches_that_nobody_had(tmp_path):
    options = {"parameters": FIRST, "servers": 2, "folder": tmp_path, "mode": "async"}
    with running(PROGRAM, slower, **options) as run:
        begun(run)
        run.stop()
        before = [s.pushes for s in run.servers]
    with running(PROGRAM, BATCHES, **options) as run:
        run.wait(WAIT)
        total = run.servers[0].version, run.servers[1].version
    assert total == (len(BATCHES), len(BATCHES))
    assert max(before) < len(BATCHES)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trainer_that_was_replaced_does_not_bar_the_next_training(mode, tmp_path):
    options = {"parameters": FIRST, "folder": tmp_path, "mode": mode, "deadline": 20.0}
    with running(PROGRAM, slowly, **options) as run:
        begun(run)
        run.engine.kill(run.supervisor.trainers[0].link)
        run.wait(WAIT)
        assert [event.partition(" (pid")[0] for event in run.events] == ["Trainer 0"]
    again = trained(PROGRAM, BATCHES, epochs=2, **options)
    assert again.events == []
    assert len(again.history["loss"]) == len(BATCHES)


def test_a_folder_of_another_graph_is_refused(tmp_path):
    trained(PROGRAM, BATCHES[:2], parameters=FIRST, folder=tmp_path)
    other = ow.SGD(0.1).minimize(loss, FIRST, *BATCHES[0])
    for program, settings in ((other, {}), (PROGRAM, {"servers": 2}), (PROGRAM, {"trainers": 3})):
        told = "".join(f"'{name}': {number}, .*" for name, number in settings.items())
        with pytest.raises(
            ow.ClusterError, match=rf"of another training: .* and this one has {{{told}'graph"
        ):
            trained(program, BATCHES[:2], parameters=FIRST, folder=tmp_path, **settings)
    (tmp_path / "training.json").unlink()
    with pytest.raises(ow.ClusterError, match=r"another graph.*'b/mean'.*or an empty one"):
        trained(other, BATCHES[:2], parameters=FIRST, folder=tmp_path)
