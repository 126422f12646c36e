"""One writer to a folder of records: a second driver is refused, who lost a place writes beside nobody."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.breaking import counted, tally
from tests.fleet.hosting import Threads

import onward as ow
from onward.core.errors import ClusterError
from onward.fleet import fence
from onward.fleet.blueprint import Blueprint
from onward.fleet.desk import ServerSpec
from onward.fleet.faults import Faults
from onward.fleet.fence import Epoch, ServerPlace, claim_driver, only_driver
from onward.fleet.holding import Gradients
from onward.fleet.keeper import Durability
from onward.fleet.link import Unreachable
from onward.fleet.messages import Push, Reply, Sender, ServerWord
from onward.fleet.modes import Async
from onward.fleet.server import serve
from onward.fleet.servers import Servers
from onward.fleet.settings import check_same_training

BATCHES, WAIT = 12, 60.0
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("graphs_made_once", "short_pauses")


def spec(folder, faults=None, driver=0):
    """A server of a training that counts how often each batch was applied."""
    program, parameters, _ = counted(BATCHES)
    blueprint = Blueprint.of(program, 1, 1)
    given = {str(s): s.of(parameters[s.parameter.name]) for s in blueprint.split().shards[0]}
    place, faults = str(folder / "server-0"), faults or Faults()
    return ServerSpec(blueprint, 0, 1, Async(), True, given, place, Durability(1), faults, driver)


def apply(server, n, driver=0):
    """Send it the gradient of a batch, and return what it answers."""
    part = server.desk.keeper.holding.part
    gradients = Gradients(tuple(np.eye(BATCHES, dtype=v.dtype)[n] for v in part.received[0]))
    push = Push(Sender(0, 1, 0, driver), n, n, 1.0, gradients)
    return asyncio.run(server.exchange(push, {}))


def times(server):
    """How often it applied each batch."""
    return [-np.asarray(server.desk.keeper.holding.arrays[name]) for name in "abc"]


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# ---------------------------------------------------------------------------- a process that lost its place


LIFE = """
import os, signal, sys
from collections import Counter
from pathlib import Path
from onward.fleet.faults import Faults
from onward.fleet.server import serve
from tests.fleet.test_fence import BATCHES, apply, spec

folder, edge = Path(sys.argv[1]), sys.argv[2]

class Stops(Faults):
    seen = Counter()

    def reach(self, who, at):
        self.seen[at] += 1
        if at == edge and self.seen[at] == (4 if edge == "during write" else 3):
            os.kill(os.getpid(), signal.SIGSTOP)

server = serve(spec(folder, Stops()))
for n in range(BATCHES):
    try:
        print("acknowledged", n, apply(server, n).word, flush=True)
    except BaseException as error:
        print("refused", n, type(error).__name__, error, flush=True)
        sys.exit(7)
"""


@pytest.mark.parametrize("edge", ["during write", "after write"])  # and at all edges, run once
def test_a_stopped_server_writes_nothing_beside_its_successor(tmp_path, edge):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-c", LIFE, str(tmp_path), edge]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as zombie:
        try:
            stopped(zombie.pid)
            successor = serve(spec(tmp_path))
            first = successor.desk.keeper.version
            assert first == (2 if edge == "during write" else 3)
            for n in range(first, 6):
                apply(successor, n)
            os.kill(zombie.pid, signal.SIGCONT)
            told, _ = zombie.communicate(timeout=WAIT)
        finally:
            zombie.kill()
    lines = told.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["acknowledged", "0"],
        ["acknowledged", "1"],
        ["refused", "2"],
    ]
    assert "Unreachable Server 0 of epoch 0.0" in lines[-1]
    assert "its place was taken by the process of epoch 0.1" in lines[-1]
    assert zombie.returncode == 7
    for n in range(6, BATCHES):
        apply(successor, n)
    heir = serve(spec(tmp_path))
    for server in (successor, heir):
        np.testing.assert_array_equal(times(server), np.ones((3, BATCHES)))
    assert heir.desk.epoch == Epoch(0, 2)


def stopped(pid, seconds=WAIT):
    """Wait until a process is stopped."""
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.02)


def test_every_answer_of_a_server_that_lost_its_place_is_refused(tmp_path):
    zombie = serve(spec(tmp_path))
    apply(zombie, 0)
    successor = serve(spec(tmp_path))
    asked = (
        lambda: zombie.hello(Sender(0, 1), zombie.desk.cut.fingerprint),
        lambda: zombie.pull(Sender(0, 1), 0, {}),
        lambda: zombie.end(Sender(0, 1), 0),
        lambda: zombie.hold(0.0),
        lambda: zombie.status(),
        lambda: zombie.check(zombie.desk.cut.fingerprint),
    )
    for ask in asked:
        with pytest.raises(Unreachable, match=r"Server 0 of epoch 0\.0 .*epoch 0\.1"):
            asyncio.run(ask())
    assert "its place was taken" in zombie.ending()
    assert successor.ending() is None
    assert apply(successor, 1).epoch == Epoch(0, 1)


def test_whoever_is_older_is_refused(tmp_path):
    server = serve(spec(tmp_path, driver=2))
    assert apply(server, 0, driver=1).word is ServerWord.SUPERSEDED
    with pytest.raises(ClusterError, match=r"Server 0 is of driver 2 .* one of driver 3, which is newer"):
        apply(server, 0, driver=3)
    assert server.desk.keeper.version == 0
    with pytest.raises(ClusterError, match=r"epoch 1\.-?\d+ has lost its folder to epoch 2\.0"):
        serve(spec(tmp_path, driver=1))


def test_of_two_processes_that_begin_at_once_the_newer_one_has_the_place(tmp_path, monkeypatch):
    found = fence._epochs
    seen = iter([[Epoch(0, 0)]])  # as if the other one had claimed 1 behind its back
    first = ServerPlace(tmp_path, 0, "Server 0")
    other = ServerPlace(tmp_path, 0, "Server 0")
    monkeypatch.setattr(fence, "_epochs", lambda folder: next(seen, None) or found(folder))
    third = ServerPlace(tmp_path, 0, "Server 0")
    assert (first.epoch.start, other.epoch.start, third.epoch.start) == (0, 1, 2)
    third.expect()
    with pytest.raises(Unreachable):
        other.expect()


def test_a_process_that_dies_while_it_takes_over_takes_nothing_along(tmp_path, monkeypatch):
    server = serve(spec(tmp_path))
    for n in range(3):
        apply(server, n)
    with monkeypatch.context() as patched:
        patched.setattr(fence.os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            serve(spec(tmp_path))
    heir = serve(spec(tmp_path))
    assert (heir.desk.keeper.version, heir.desk.epoch) == (3, Epoch(0, 2))
    assert heir.desk.keeper.versions == (2, 3)
    assert names(tmp_path / "server-0") == ["epoch-00000000-00000002"]


def interrupted(*paths):
    raise KeyboardInterrupt


def test_records_of_before_there_were_epochs_are_taken_over(tmp_path):
    server = serve(spec(tmp_path))
    apply(server, 0)
    for path in server.desk.keeper.place.folder.iterdir():
        path.rename(tmp_path / "server-0" / path.name)
    server.desk.keeper.place.folder.rmdir()
    assert serve(spec(tmp_path)).desk.keeper.version == 1


def test_a_trainer_takes_no_answer_of_an_older_server(tmp_path):
    run = begun(tmp_path, Threads())
    run.wait(WAIT)
    spec = replace(
        run.supervisor.trainer_specs[0], servers=(Answering(Epoch(1, 1), Epoch(1, 0), Epoch(1, 2)),)
    )
    servers = Servers(spec)
    assert [servers.one(0, "pull").epoch, servers.one(0, "pull").epoch] == [Epoch(1, 1), Epoch(1, 2)]


class Answering:
    """A link to servers of these epochs, one after the other."""

    def __init__(self, *epochs):
        self.epochs = list(epochs)

    def call(self, method, *arguments):
        return self

    def result(self, timeout=None):
        return Reply(ServerWord.DONE, 0, epoch=self.epochs.pop(0))


# ---------------------------------------------------------------------------- two drivers


def begun(folder, engine, **options):
    program, parameters, read = counted(BATCHES)
    return ow.cluster.start(
        program,
        options.pop("read", read),
        parameters=parameters,
        mode="async",
        merge=ow.Sum(),
        engine=engine,
        folder=folder / "records",
        deadline=20.0,
        **options,
    )


def slowly():
    for row in np.eye(BATCHES, dtype=np.float32)[:, None]:
        time.sleep(0.1)
        yield row


def test_a_second_driver_is_refused_by_name(tmp_path):
    run = begun(tmp_path, Threads(), read=slowly)
    with pytest.raises(ClusterError, match=rf"in use by another training: pid {os.getpid()} on "):
        begun(tmp_path, Threads())
    run.wait(WAIT)
    assert tally(run.model) == (0, 0)
    assert run.events == []
    again = begun(tmp_path, Threads()).wait(WAIT)
    assert tally(again.model) == (0, 0)


def test_the_lock_dies_with_its_process(tmp_path):
    with only_driver(tmp_path):
        pass
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(); time.sleep(60)"
    command = [sys.executable, "-uc", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as one:
        one.stdout.readline()
        (tmp_path / "lock").write_text(json.dumps({"pid": one.pid, "host": "here"}))
        with pytest.raises(ClusterError, match=f"pid {one.pid} on"), only_driver(tmp_path):
            pass
        one.kill()
        one.wait(WAIT)
        with only_driver(tmp_path):
            pass


def test_where_no_lock_holds_the_newer_driver_goes_on_and_the_older_one_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: None)  # as on two machines without locks
    older = begun(tmp_path, Threads(), read=slowly)
    while max(older.versions) < 3:
        time.sleep(0.02)
    newer = begun(tmp_path, Threads())
    with pytest.raises(
        ClusterError, match=rf"epoch 1\.\d has lost its folder to epoch 2\.0: .*pid {os.getpid()}"
    ):
        older.wait(WAIT)
    newer.wait(WAIT)
    assert tally(newer.model) == (0, 0)


def test_each_driver_has_a_higher_number(tmp_path):
    numbers, threads = [], []
    for _ in range(8):
        threads.append(threading.Thread(target=lambda: numbers.append(claim_driver(tmp_path))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(numbers)) == 8
    assert names(tmp_path) == [f"driver-{max(numbers):08d}"]
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "server-0" / "epoch-00000011-00000000").mkdir(parents=True)
    assert claim_driver(tmp_path) == 12


def test_a_driver_whose_number_a_newer_one_removes_takes_a_higher_one(tmp_path, monkeypatch):
    def overtaken(path, sync=fence.sync):
        if (mine := tmp_path / "driver-00000001").exists():
            mine.unlink()
            (tmp_path / "driver-00000005").touch()
        sync(path)

    monkeypatch.setattr(fence, "sync", overtaken)
    assert claim_driver(tmp_path) == 6


# ---------------------------------------------------------------------------- what a folder says of itself


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_another_learning_rate_goes_on_and_is_noted(tmp_path, mode):
    """With momentum, the velocity goes on too: compared with the closed form."""
    w, rows = np.zeros(2, np.float32), [np.ones((1, 2), np.float32)] * 6
    options = {"parameters": w, "trainers": 1, "servers": 2, "mode": mode, "folder": tmp_path}
    for rate, epochs in ((0.5, 1), (0.25, 2)):
        program = ow.Momentum(rate, 0.5).minimize(lambda w, x: jnp.sum(x @ w), w, rows[0])
        run = ow.cluster.train(program, rows, engine=Threads(), epochs=epochs, **options)
    velocity, expected = 0.0, 0.0
    for n in range(12):
        velocity = 0.5 * velocity + 1.0
        expected -= (0.5 if n < 6 else 0.25) * velocity
    np.testing.assert_array_equal(run.model.parameters, [expected] * 2)
    assert run.events == ["learning_rate is 0.25 from here on; before it was 0.5."]
    assert set(run.history["learning_rate"]) == {0.25}
    told = json.loads((tmp_path / "training.json").read_text())["hyperparameters"]
    assert [numbers["learning_rate"] for numbers in told.values()] == [0.5, 0.25]


def test_what_a_folder_says_of_itself_is_written_whole(tmp_path, monkeypatch):
    told = {"graph": "0123", "trainers": 2}
    check_same_training(tmp_path, told, 1, {"learning_rate": 0.5})
    before = (tmp_path / "training.json").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)  # it dies just before the file has its name
        with pytest.raises(KeyboardInterrupt):
            check_same_training(tmp_path, told, 2, {"learning_rate": 0.25})
    assert (tmp_path / "training.json").read_bytes() == before
    assert len(check_same_training(tmp_path, told, 3, {})) == 2
    with pytest.raises(ClusterError, match=r"another training: \{'trainers': 2\}, .* \{'trainers': 3\}"):
        check_same_training(tmp_path, {**told, "trainers": 3}, 4, {})
    (tmp_path / "training.json").write_text("[")
    with pytest.raises(ClusterError, match="cannot be used for records"):
        check_same_training(tmp_path, told, 5, {})
