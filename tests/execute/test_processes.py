"""One script, in one process or in several: equal results, and a peer that dies or hangs is named."""

import os
import re
import signal
from contextlib import redirect_stderr
from io import BytesIO, TextIOWrapper
from threading import Timer
from time import monotonic

import numpy as np
import pytest

from onward.shell.main import main

LONGEST = 180.0  # seconds of one launch
SCRIPT = """
import os, signal, sys
import jax, numpy as np, onward as ow

folder, merge, fate = sys.argv[1:]

def network():
    x, y, w = ow.data("x", (None, 6)), ow.data("y", (None, 2)), ow.data("example_weight", (None,))
    return ow.layer.mse(ow.layer.fc(x, 2, act="tanh"), y, weights=w)

def fail(event):
    if event.step != 5 or jax.process_index() != 1 or not fate.startswith("SIG"):
        return
    if not os.path.exists(f"{folder}/done"):
        open(f"{folder}/done", "w").close()
        os.kill(os.getppid() if fate == "SIGINT" else os.getpid(), getattr(signal, fate))

rng = np.random.default_rng(0)
arrays = {"x": rng.normal(size=(22, 6)).astype("float32"), "y": rng.normal(size=(22, 2)).astype("float32")}
reader = ow.batches(arrays | {"example_weight": np.ones(22, "float32")}, 16, shuffle=True)
own = jax.process_index() * (fate == "parts")
rate = (lambda step: 0.05 + own) if fate else 0.05
try:
    trainer = ow.train(
        network, reader, optimizer=ow.Momentum(rate), epochs=4, test=reader, devices=None,
        merge=getattr(ow, merge)(), checkpoints=ow.Checkpoints(folder, every=2), resume=True,
        callbacks=[fail],
    )
except KeyboardInterrupt as interrupt:
    print(f"onward: SIGINT: step {interrupt.trainer.step} is saved in {folder}", file=sys.stderr, flush=True)
    raise
if jax.process_index() == 0:
    values = {name: np.asarray(trainer[name]) for name in trainer.state if name in trainer.model.state}
    np.savez(f"{folder}/end.npz", test_loss=trainer.history["test_loss"][-1], **values)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


def launch(script, folder, *options, merge="Average", fate=""):
    """The status that ``onward launch`` ends with, and what it says; one that hangs is interrupted."""
    late = Timer(LONGEST, os.kill, [os.getpid(), signal.SIGINT])
    late.start()
    try:
        with redirect_stderr(TextIOWrapper(BytesIO(), write_through=True)) as said:
            status = main(["launch", *options, str(script), str(folder), merge, fate])
    finally:
        late.cancel()
    return status, said.buffer.getvalue().decode()


def end(folder):
    return dict(np.load(folder / "end.npz"))


@pytest.fixture(scope="module")
def together(script, tmp_path_factory):
    """What two processes make of it."""
    folder = tmp_path_factory.mktemp("together")
    status, said = launch(script, folder, "-n", "2")
    assert status == 0, said
    return end(folder)


def test_two_processes_equal_one_with_two_devices(script, together, tmp_path):
    status, said = launch(script, tmp_path, "-n", "1", "--devices", "2")
    assert status == 0, said
    alone = end(tmp_path)
    assert alone.keys() == together.keys()
    for name, value in together.items():
        np.testing.assert_allclose(alone[name], value, 1e-6, 1e-7, err_msg=name)
    assert float(together["test_loss"]) == pytest.approx(float(alone["test_loss"]), rel=1e-6)


def test_one_is_killed_and_all_go_on_from_the_last_checkpoint(script, together, tmp_path):
    status, said = launch(script, tmp_path, "-n", "2", "--restarts", "1", fate="SIGKILL")
    assert status == 0, said
    assert "PeerError" in said
    assert "process 1 was killed by SIGKILL" in said
    for name, value in end(tmp_path).items():
        np.testing.assert_array_equal(value, together[name], err_msg=name)


def test_one_is_taken_away_and_all_save_the_same_step(script, together, tmp_path):
    """SIGTERM reaches one of two: both end with status 143, and another two go on, bit for bit."""
    status, said = launch(script, tmp_path, "-n", "2", "--restarts", "1", fate="SIGTERM")
    assert status == 0, said
    assert "ended with status 143" in said
    assert "PeerError" not in said
    expect_one_step_saved(said, "SIGTERM")
    for name, value in end(tmp_path).items():
        np.testing.assert_array_equal(value, together[name], err_msg=name)


def expect_one_step_saved(said, name):
    """Both processes have saved the same step, soon after the signal."""
    saved = re.findall(rf"onward: {name}: step (\d+) is saved in", said)
    assert len(saved) == 2
    assert saved[0] == saved[1]
    assert 5 <= int(saved[0]) < 8


def test_ctrl_c_ends_all_after_the_same_step(script, together, tmp_path):
    """It reaches ``onward launch``: both processes save the same step, and another two go on from there."""
    status, said = launch(script, tmp_path, "-n", "2", fate="SIGINT")
    assert status == 128 + signal.SIGINT, said
    assert "PeerError" not in said
    expect_one_step_saved(said, "SIGINT")
    status, said = launch(script, tmp_path, "-n", "2", fate="SIGINT")
    assert status == 0, said
    for name, value in end(tmp_path).items():
        np.testing.assert_array_equal(value, together[name], err_msg=name)


def test_one_is_stopped_and_the_other_names_it_within_the_deadline(script, tmp_path):
    begun = monotonic()
    status, said = launch(script, tmp_path, "-n", "2", "--deadline", "6", merge="Sharded", fate="SIGSTOP")
    assert status != 0
    assert monotonic() - begun < 60
    [message] = [line for line in said.splitlines() if "errors.PeerError: " in line]  # not as told again
    assert message.startswith("[0] ")
    assert "Process 1" in message
    assert "it died or was stopped" in message


NONFINITE = """
import sys
import jax, jax.numpy as jnp, numpy as np, onward as ow

def loss(w, x):
    return jnp.mean(jnp.log(jnp.abs(w * x)))

def spoilt(program):
    step = ow.compile(ow.replicate(program, 2), check_finite=True)
    state, _ = step(step.init(ones), own)
    try:
        step.expect_going(state)
    except ow.NonFiniteError as error:
        return ow.find_nonfinite(step, error.state, own), error.finding

rows, ones = np.ones((8, 3), "float32"), np.ones(3, "float32")
rows[6, 1] = 0
own = rows.reshape(2, 4, 3)[jax.process_index()]
told = spoilt(ow.accumulate(ow.SGD(0.1).minimize(loss, ones, rows), 2))
lines = [f"{f.type} {f.made_by} device {f.device} line {f.line} {[i.where for i in f.inside]}" for f in told]
with open(f"{sys.argv[1]}/{jax.process_index()}", "w") as file:
    file.write("\\n".join(lines))
"""


def test_what_is_not_finite_on_one_process_is_found_by_all(tmp_path):
    """The op within ``accumulate``, its pass and line, and the device, which is that of the other process."""
    script = tmp_path / "find.py"
    script.write_text(NONFINITE)
    status, said = launch(script, tmp_path, "-n", "2")
    assert status == 0, said
    found = "log forward device 1 line 6 ['', 'turn 1 of 2 (counted from 0)']"
    for process in "01":
        assert (tmp_path / process).read_text().splitlines() == [found] * 2


def test_processes_whose_rates_differ_do_not_train_on(script, tmp_path):
    status, said = launch(script, tmp_path, "-n", "2", fate="parts")
    assert status != 0
    assert "these are different Programs. All processes run the same one" in said, said
    assert not (tmp_path / "end.npz").exists()
