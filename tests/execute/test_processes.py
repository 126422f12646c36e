"""One script, in one process or in several: equal results, and a peer that dies or hangs is named."""

import subprocess
import sys
from time import monotonic

import numpy as np
import pytest

SCRIPT = """
import os, signal, sys
import jax, numpy as np, onward as ow

folder, merge, fate = sys.argv[1:]

def network():
    x, y, w = ow.data("x", (None, 6)), ow.data("y", (None, 1)), ow.data("example_weight", (None,))
    return ow.layer.mse(ow.layer.fc(ow.layer.fc(x, 8, act="tanh"), 1), y, weights=w)

def fail(event):
    if fate and event.step == 5 and jax.process_index() == 1 and not os.path.exists(f"{folder}/done"):
        open(f"{folder}/done", "w").close()
        os.kill(os.getpid(), getattr(signal, fate))

rng = np.random.default_rng(0)
arrays = {"x": rng.normal(size=(22, 6)).astype("float32"), "y": rng.normal(size=(22, 1)).astype("float32")}
reader = ow.batches(arrays | {"example_weight": np.ones(22, "float32")}, 16, shuffle=True)
trainer = ow.train(
    network, reader, optimizer=ow.Momentum(0.05), epochs=4, test=reader, devices=None,
    merge=getattr(ow, merge)(), checkpoints=ow.Checkpoints(folder, every=2), resume=True, callbacks=[fail],
)
if jax.process_index() == 0:
    values = {name: np.asarray(trainer[name]) for name in trainer.state if name in trainer.model.state}
    np.savez(f"{folder}/end.npz", **values)
    print("test loss", trainer.history["test_loss"][-1])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def launch(script, folder, *options, merge="Average", fate=""):
    command = [sys.executable, "-m", "onward", "launch", *options, str(script), str(folder), merge, fate]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def end(folder):
    return dict(np.load(folder / "end.npz"))


@pytest.fixture(scope="module")
def together(script, tmp_path_factory):
    """What two processes make of it."""
    folder = tmp_path_factory.mktemp("together")
    done = launch(script, folder, "-n", "2")
    assert done.returncode == 0, done.stderr
    return end(folder), done.stdout


def test_two_processes_equal_one_with_two_devices(script, together, tmp_path):
    done = launch(script, tmp_path, "-n", "1", "--devices", "2")
    assert done.returncode == 0, done.stderr
    expected, printed = together
    alone = end(tmp_path)
    assert alone.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(alone[name], value, 1e-6, 1e-7)
    assert float(printed.split()[-1]) == pytest.approx(float(done.stdout.split()[-1]), rel=1e-6)


def test_one_is_killed_and_all_go_on_from_the_last_checkpoint(script, together, tmp_path):
    done = launch(script, tmp_path, "-n", "2", "--restarts", "1", fate="SIGKILL")
    assert done.returncode == 0, done.stderr
    assert "PeerError" in done.stderr
    assert "process 1 was killed by SIGKILL" in done.stderr
    for name, value in end(tmp_path).items():
        np.testing.assert_array_equal(value, together[0][name])


def test_one_is_stopped_and_the_other_names_it_within_the_deadline(script, tmp_path):
    begun = monotonic()
    done = launch(script, tmp_path, "-n", "2", "--deadline", "6", merge="Sharded", fate="SIGSTOP")
    assert done.returncode != 0
    assert monotonic() - begun < 60
    [message] = [line for line in done.stderr.splitlines() if "PeerError: " in line]
    assert message.startswith("[0] ")
    assert "Process 1" in message
    assert "it died or was stopped" in message
