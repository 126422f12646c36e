"""A folder of checkpoints has one writer and one run, and what is damaged never costs what is whole."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from hashlib import sha256

import numpy as np
import pytest

from onward.core.errors import CheckpointError
from onward.execute.checkpoint import checkpoints as module
from onward.execute.checkpoint.checkpoints import WRITER, Checkpoints
from onward.execute.checkpoint.identity import UNKNOWN
from onward.execute.loop.interrupt import Interruptible, Terminated

pytestmark = pytest.mark.usefixtures("signals_of_a_new_process")
W = np.arange(6, dtype=np.float32)


def save(store, *steps):
    return [store.save({"w": W + step}, step) for step in steps]


def steps(folder):
    return [e.step for e in Checkpoints(folder).entries()]


def damage(path, name="arrays.safetensors"):
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)


# ---------------------------------------------------------------------------- one writer


HOLDING = """
import os, sys
import numpy as np
from onward.execute.checkpoint.checkpoints import Checkpoints
store = Checkpoints(sys.argv[1])
store.save({"w": np.ones(2)}, 1)
store.wait()
if os.fork() == 0:  # as a reader of data does; it outlives its parent
    os.read(0, 1)
    os._exit(0)
print(os.getpid(), flush=True)
os.read(0, 1)
"""


def test_the_lock_names_who_holds_it_and_dies_with_its_process(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-W", "ignore", "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, **pipes) as process:
        pid = int(process.stdout.readline())
        store = Checkpoints(tmp_path)
        assert store.load().step == 1  # who reads needs no lock
        with pytest.raises(
            CheckpointError, match=rf"written by process {pid} on .*kill {pid}.*another folder"
        ):
            save(store, 2)
        process.kill()
        process.wait()
        save(store, 2)
        store.wait()
        assert steps(tmp_path) == [1, 2]
        process.stdin.close()


def test_a_second_writer_in_the_same_process_is_refused(tmp_path):
    one, two = Checkpoints(tmp_path, asynchronous=False), Checkpoints(tmp_path, asynchronous=False)
    save(one, 1)
    two.load()
    with pytest.raises(
        CheckpointError, match=rf"by this process \(pid {os.getpid()}\).*use that one, or let it go"
    ):
        save(two, 2)
    with one:
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["000001-step-1"]
    save(two, 2)
    with pytest.raises(CheckpointError, match="this process"):
        save(one, 3)
    del two
    with pytest.raises(CheckpointError, match="another run, of steps 1, 2"):  # it went on without this one
        save(one, 3)


def test_a_lock_whose_file_is_removed_is_taken_again(tmp_path):
    store = Checkpoints(tmp_path, asynchronous=False)
    save(store, 1)
    (tmp_path / WRITER).unlink()
    save(store, 2)
    with pytest.raises(CheckpointError, match="this process"):
        Checkpoints(tmp_path).claim(resume=True)


# ---------------------------------------------------------------------------- one run


def test_the_identity_is_taken_over(tmp_path):
    with Checkpoints(tmp_path, keep=2) as store:
        save(store, 1, 2)
    again = Checkpoints(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match="holds 2 checkpoints of another run, of steps 1, 2"):
        save(again, 3)
    assert again.load().identity == again.identity == store.identity
    save(again, 3)
    again.wait()
    assert steps(tmp_path) == [2, 3]
    assert {Checkpoints(tmp_path).load(e.path).identity for e in store.entries()} == {store.identity}


def test_nobody_removes_what_another_run_has_written(tmp_path):
    with Checkpoints(tmp_path) as store:
        save(store, 1, 2, 3)
    added = Checkpoints.adding(tmp_path)
    added.keep = 1
    save(added, 4, 5)
    added.wait()
    assert steps(tmp_path) == [1, 2, 3, 5]


def test_checkpoints_without_an_identity_are_resumed(tmp_path):
    with Checkpoints(tmp_path) as store:
        store.identity = UNKNOWN
        for path in save(store, 1, 2):
            store.wait()
            record = json.loads((path / "manifest.json").read_bytes())
            del record["run"]
            data = json.dumps(record).encode()
            (path / "manifest.json").write_bytes(data)
            (path / "manifest.sha256").write_text(sha256(data).hexdigest())
    again = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match="of another run, of steps 1, 2; the last was written"):
        save(again, 3)
    assert again.load().step == 2
    save(again, 3)
    again.wait()
    assert steps(tmp_path) == [3]


# ---------------------------------------------------------------------------- what is damaged


@pytest.mark.parametrize("name", ["arrays.safetensors", "manifest.json"])
def test_what_is_damaged_does_not_count(tmp_path, name):
    store = Checkpoints(tmp_path, keep=2, asynchronous=False)
    paths = save(store, 1, 2)
    damage(paths[1], name)
    if name == "manifest.json":
        save(store, 3)
    else:
        with pytest.warns(UserWarning, match=rf"{paths[1]}.* is damaged: .*does not count") as warned:
            save(store, 3)
        assert warned[0].filename == __file__
    assert paths[0].exists()
    save(store, 4)  # it is not said again
    assert not paths[0].exists()
    assert [
        Checkpoints(tmp_path).load(p).step for p in (tmp_path / "000003-step-3", tmp_path / "000004-step-4")
    ]


def test_a_damaged_best_does_not_stand_for_the_next_best(tmp_path):
    store = Checkpoints(tmp_path, keep=1, best="loss", asynchronous=False)
    paths = [store.save({"w": W}, step, metrics={"loss": loss}) for step, loss in ((1, 2.0), (2, 1.0))]
    assert steps(tmp_path) == [2]
    store.keep = 2
    store.save({"w": W}, 3, metrics={"loss": 3.0})
    damage(paths[1])
    with pytest.warns(UserWarning, match="step-2"):
        store.save({"w": W}, 4, metrics={"loss": 4.0})
    store.keep = 1
    store.save({"w": W}, 5, metrics={"loss": 5.0})
    assert steps(tmp_path) == [3, 5]


def test_an_empty_newest_is_not_passed_over_in_silence(tmp_path):
    with Checkpoints(tmp_path) as store:
        save(store, 1, 2)
    for file in store.load().path.iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match=r"000002-step-2 is not a checkpoint.*no manifest\.json"):
        store.load()
    with pytest.warns(UserWarning, match=r"Left out: .*000002-step-2.*no manifest\.json"):
        assert store.load(fallback=True).step == 1
    assert save(store, 3)[0].name == "000003-step-3"
    store.wait()


def test_a_discard_that_fails_is_said(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.EROFS, "Read-only file system")

    store = Checkpoints(tmp_path, keep=1)
    save(store, 1)
    monkeypatch.setattr(module, "discard", fail)
    save(store, 2)
    with pytest.warns(UserWarning, match=r"000001-step-1 .*could not be removed: .*Read-only"):
        store.wait()


def test_a_folder_that_cannot_be_synced_holds_the_checkpoint_all_the_same(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    store = Checkpoints(tmp_path, keep=1, asynchronous=False)
    save(store, 1)
    monkeypatch.setattr(module, "sync", fail)
    with pytest.warns(UserWarning, match=r"step-2 is written and whole, but .*Input/output.* power cut"):
        save(store, 2)
    assert steps(tmp_path) == [1, 2]


# ---------------------------------------------------------------------------- SIGTERM


def terminate():
    signal.raise_signal(signal.SIGTERM)


def swallowed_once(interrupts, done):
    """A part that SIGTERM interrupts, whose error is thrown away, as in a destructor; then another part."""
    with suppress(Terminated), interrupts.uninterrupted:
        terminate()
        done.append("first")
    with interrupts.uninterrupted:
        done.append("second")


def test_sigterm_waits_for_the_end_and_asks_until_it_is_answered():
    done = []
    with Interruptible(grace=60.0) as interrupts:
        with pytest.raises(Terminated) as raised:
            swallowed_once(interrupts, done)
        interrupts.uninterrupted.termination.answer()
        terminate()
        with interrupts.uninterrupted:
            done.append("saving")
    assert done == ["first", "second", "saving"]
    assert raised.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("former", [signal.SIG_IGN, lambda number, frame: calls.append(number)])
def test_a_handler_of_the_users_own_stays_his(former):
    calls.clear()
    before = signal.signal(signal.SIGTERM, former)
    try:
        with Interruptible(grace=60.0) as interrupts, interrupts.uninterrupted:
            terminate()
            assert calls == []
        assert calls == ([signal.SIGTERM] if callable(former) else [])
        assert signal.getsignal(signal.SIGTERM) is former
    finally:
        signal.signal(signal.SIGTERM, before)


calls = []
SLOW = """
import os, signal, time
from onward.execute.loop.interrupt import Interruptible
with Interruptible(grace=0.2) as interrupts, interrupts.uninterrupted:
    signal.raise_signal(signal.SIGTERM)
    time.sleep(60)
"""


def test_what_takes_too_long_is_given_up():
    begun = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-c", SLOW], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 143
    assert re.search(r"SIGTERM came 0\.2 s ago, .*grace=", found.stderr)
    assert time.monotonic() - begun < 50
