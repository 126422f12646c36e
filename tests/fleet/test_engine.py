"""Processes that host objects: calls, deaths, tokens, and that nothing is left behind."""

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import onward
from onward.core import extras
from onward.core.errors import ClusterError, MissingExtraError
from onward.execute.host_memory import can_keep_host_memory
from onward.fleet import engine as engines
from onward.fleet import ray_start
from onward.fleet.engine import Engine
from onward.fleet.host import is_reborn
from onward.fleet.link import Unreachable

ray = pytest.importorskip("ray")
WAIT = 60.0  # seconds; a process imports JAX first


class Counter:
    def __init__(self, start=0):
        if start < 0:
            raise ValueError(f"{start} is below zero")
        self.count = start
        self.reborn = is_reborn()
        self.open = asyncio.Event()

    def add(self, n):
        self.count += n
        return self.count

    def block(self, seconds):
        time.sleep(seconds)
        return "blocked"

    async def wait(self):
        await self.open.wait()
        return "open"

    async def release(self):
        self.open.set()

    def fail(self):
        raise ClusterError("server 3 has another program")

    def fail_unpicklably(self):
        error = ValueError("cannot travel")
        error.lock = signal.default_int_handler, self.open, (n for n in ())
        raise error

    def die(self):
        os._exit(3)

    def born_again(self):
        return self.reborn, is_reborn()

    def pull(self, n):
        return self.count, np.arange(n, dtype=np.float32)

    def surroundings(self):
        return onward.__file__, os.nice(0)

    async def page_faults(self):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(10):
            b"1" * self.count * 8_000_000
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    def describe(self, array):
        return type(array) is np.ndarray, array.flags.owndata, array.flags.writeable, float(array.sum())

    def through(self, link, n):
        return link.call("add", n).result(timeout=WAIT)


def back(link, timeout=WAIT):
    """Wait until a process that was lost is there again."""
    end = time.monotonic() + timeout
    while True:
        try:
            return link.call("born_again").result(timeout)
        except Unreachable:
            assert time.monotonic() < end


@pytest.fixture(scope="module")
def engine(ray_here):
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def link(engine):
    return engine.spawn(Counter, 5, name="counter")


@pytest.fixture(scope="module")
def mortal(engine):
    """One that starts again; who has ended it waits until it is back."""
    link = engine.spawn(lambda: Counter(), name="mortal", restart=True)
    engine.place(link, WAIT)
    return link


def test_a_process_has_the_drivers_modules_first_and_is_as_nice_as_others(link):
    """Ray puts each folder before the others; it makes its workers nice (15), so that they starve."""
    assert link.call("surroundings").result(WAIT) == (onward.__file__, os.nice(0))


def test_what_a_start_waits_for_is_told(engine):
    link = engine.spawn(Late, name="late")
    end = time.monotonic() + WAIT
    while "imports JAX and makes its graph" not in engine.awaited(link):
        assert time.monotonic() < end
    assert link.call("pid").result(WAIT) == engine.place(link).pid


class Late:
    def __init__(self):
        time.sleep(1.0)

    def pid(self):
        return os.getpid()


def test_a_process_that_has_lost_its_place_ends_and_another_one_comes(engine):
    link = engine.spawn(Losing, name="losing", restart=True)
    assert back(link) == (False, False)
    link.call("lose").result(WAIT)
    end = time.monotonic() + WAIT
    while back(link) == (False, False):
        assert time.monotonic() < end
        time.sleep(0.05)


class Losing:
    lost = None

    def lose(self):
        self.lost = "another one has the place"

    def ending(self):
        return self.lost

    def born_again(self):
        return is_reborn(), self.lost is not None


def test_a_start_that_fails_is_advised_on_by_what_is_wrong(monkeypatch, capsys):
    full, room = SimpleNamespace(free=2**20), SimpleNamespace(free=2**40)
    monkeypatch.setattr(ray_start, "busy", lambda: "9 processes want the 2 processors of this machine")
    late = ray_start._why(None, None, RuntimeError("The current node timed out during startup."))
    for error, found, expected in (
        ("timed out", full, "There are 1 MiB free in /tmp"),
        ("timed out", room, "too slow: 9 processes want the 2 processors"),
        ("no route", room, "may open ports on loopback"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, found=found: found)
        told = ray_start._why(None, None, RuntimeError(error))
        assert expected in told
        assert ("port" in told, "room" in told) == (error == "no route", found is full)
    assert "does not start on this machine: The current node timed out" in late
    monkeypatch.setattr(ray_start, "PATIENCE", 0.01)
    with ray_start._patient():
        time.sleep(0.2)
    assert (
        "Ray has been starting for 0 s: its processes have yet to answer; 9 proc" in capsys.readouterr().err
    )


def test_calls_return_what_the_method_returns(link):
    assert link.call("add", 3).result(WAIT) == 8
    pending = link.call("add", 0)
    assert pending.result(WAIT) == 8
    assert pending.done()


def test_a_call_that_waits_or_blocks_holds_up_nobody(link):
    waiting, blocking = link.call("wait"), link.call("block", 0.5)
    assert link.call("add", 0).result(WAIT) >= 5
    assert not waiting.done()
    link.call("release").result(WAIT)
    assert waiting.result(WAIT) == "open"
    assert blocking.result(WAIT) == "blocked"


@pytest.mark.skipif(not can_keep_host_memory(), reason="only glibc can be told so")
def test_memory_that_a_call_used_is_there_for_the_next_one(link):
    link.call("page_faults").result(WAIT)
    assert link.call("page_faults").result(WAIT) < 10_000  # ten times as many where it is given back


def test_a_result_that_is_late(link):
    with pytest.raises(TimeoutError, match="counter has not answered in time"):
        link.call("block", 1.0).result(0.1)


def test_an_error_arrives_as_it_was_raised(link):
    with pytest.raises(ClusterError) as raised:
        link.call("fail").result(WAIT)
    assert type(raised.value) is ClusterError
    assert str(raised.value) == "server 3 has another program"
    assert "in fail" in raised.value.__notes__[0]


def test_an_error_that_cannot_travel_arrives_as_a_text(link):
    with pytest.raises(ClusterError, match=r"isn't serializable.*; ValueError: cannot travel"):
        link.call("fail_unpicklably").result(WAIT)


def test_an_unknown_method(link):
    with pytest.raises(AttributeError, match="'Counter' object has no attribute 'subtract'"):
        link.call("subtract").result(WAIT)


def test_an_error_of_the_factory_arrives_with_every_call(engine):
    link = engine.spawn(Counter, -1, name="broken")
    for get in (lambda: engine.place(link), lambda: link.call("add", 1).result(WAIT)):
        with pytest.raises(ValueError, match="-1 is below zero"):
            get()
    engine.kill(link)


def test_arrays_travel_as_buffers(link):
    x = np.ones(2**20, np.float32)
    assert link.call("describe", x).result(WAIT) == (True, False, False, 2.0**20)
    count, pulled = link.call("pull", 2**20).result(WAIT)
    assert not pulled.flags.owndata
    np.testing.assert_array_equal(pulled, np.arange(2**20))
    assert count >= 5


def test_a_link_can_be_handed_on(mortal, link):
    before = link.call("add", 0).result(WAIT)
    assert mortal.call("through", link, 1).result(WAIT) == before + 1


def test_place_says_where_it_lives(engine, link):
    place = engine.place(link)
    assert os.path.exists(f"/proc/{place.pid}")
    assert place.pid != os.getpid()


def test_what_no_machine_has_is_refused_at_once(engine):
    with pytest.raises(ClusterError, match=r"greedy asks for unicorn 2, and no machine .* has that"):
        engine.spawn(Counter, name="greedy", options={"resources": {"unicorn": 2}})


def test_what_no_machine_has_free_is_refused_in_time(engine):
    cpus = ray.cluster_resources()["CPU"]
    first = engine.spawn(Counter, name="first", options={"num_cpus": cpus})
    engine.place(first, WAIT)
    second = engine.spawn(Counter, name="second", options={"num_cpus": cpus})
    with pytest.raises(ClusterError, match=r"second is not there after 0\.5 s"):
        engine.place(second, 0.5)
    engine.kill(second)
    engine.kill(first)


def test_one_that_dies_stays_dead_unless_it_is_to_start_again(engine):
    link = engine.spawn(Counter, name="mortal")
    for call in (("die",), ("add", 1)):
        with pytest.raises(Unreachable, match="mortal cannot be reached"):
            link.call(*call).result(WAIT)


def test_one_that_dies_is_made_anew(link, mortal):
    mortal.call("add", 7).result(WAIT)
    assert link.call("born_again").result(WAIT) == (False, False)
    with pytest.raises(Unreachable):
        mortal.call("die").result(WAIT)
    assert back(mortal) == (True, True)
    assert mortal.call("add", 1).result(WAIT) == 1
    assert not is_reborn()


@pytest.mark.parametrize("restart", [False, True])
def test_kill_ends_one_that_does_not_react(engine, request, restart):
    link = request.getfixturevalue("mortal") if restart else engine.spawn(Counter, name="last", restart=True)
    pid = engine.place(link).pid
    os.kill(pid, signal.SIGSTOP)
    pending = link.call("add", 1)
    engine.kill(link, restart=restart)
    with pytest.raises(Unreachable):
        pending.result(WAIT)
    end = time.monotonic() + 10.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
    if restart:
        assert back(link) == (True, True)


def test_only_this_machine_can_connect(engine):
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    pids = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in pids.splitlines()[1:]]
    ours = {int(os.getpid())}
    for _ in range(4):  # generations
        ours |= {int(pid) for pid, parent, _ in rows if int(parent) in ours}
    lines = [line for line in listening.splitlines() if any(f"pid={pid}," in line for pid in ours)]
    assert len(lines) >= 4
    assert [line for line in lines if "127.0.0.1]:" not in line and " 127.0.0.1:" not in line] == []


def test_the_token_is_private(engine):
    path = engine.folder / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_ray_that_runs_already_is_used_and_left_running(engine):
    with Engine() as second:
        link = second.spawn(Counter, 1, name="guest")
        assert link.call("add", 1).result(WAIT) == 2
    assert ray.is_initialized()
    with pytest.raises(Unreachable):
        link.call("add", 1).result(WAIT)


def test_without_ray_the_extra_is_named(monkeypatch):
    def absent(module):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(extras, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'onward\[cluster\]'"), Engine():
        pass


ALONE = """
import os, signal, sys, time
from onward.fleet.engine import Engine, Unreachable
{body}
"""
LIVES = """
import ray  # sets RAY_CLIENT_MODE
before = dict(os.environ), signal.getsignal(signal.SIGTERM)

def live(engine):
    with engine:
        links = [engine.spawn(dict, name="dict", restart=True) for _ in range(2)]
        assert links[0].call("__len__").result(60) == 0
        assert dict(os.environ) == before[0]  # what is started from here has a Ray of its own
        os.kill(engine.place(links[0]).pid, signal.SIGSTOP)
        print(engine.folder, engine.place(links[1]).pid, flush=True)
        yield links[1]
        time.sleep(600)

living = live(Engine(memory=100 * 2**20))
link = next(living)
try:
    next(living)
except SystemExit as stop:
    assert stop.code == 128 + signal.SIGTERM
assert signal.getsignal(signal.SIGTERM) == before[1]
try:
    link.call("__len__")
except Unreachable as error:
    assert "is closed" in str(error)
list(live(Engine(memory=100 * 2**20)))
"""


def alone(tmp_path, body):
    path = tmp_path / "alone.py"
    path.write_text(ALONE.format(body=body))
    command = [sys.executable, "-W", "error", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def strange(said):
    """The lines that a driver says, but that its start was slow."""
    return [line for line in said.splitlines() if not line.startswith("Ray has been starting")]


def end_by(number, process):
    """A driver says where it is, is sent this signal, and leaves nothing but the logs that it has open."""
    folder, pid = process.stdout.readline().split()
    folder = Path(folder)
    assert others(folder, process)
    process.send_signal(number)
    end = time.monotonic() + 20.0
    while (folder.exists() or others(folder, process) or running(pid)) and time.monotonic() < end:
        time.sleep(0.1)
    assert (folder.exists(), others(folder, process), running(pid)) == (False, set(), False)


def test_an_engine_leaves_all_as_it_was_and_says_nothing(tmp_path):
    """The first one is closed behind SIGTERM, which the script lives on after, the second one is killed."""
    with alone(tmp_path, LIVES) as process:
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                end_by(number, process)
            out, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (out, strange(said)) == ("", [])
    assert process.returncode == -signal.SIGKILL


def running(pid):
    return os.path.exists(f"/proc/{pid}")


def others(folder, process):
    """All but this process that have files of the folder open; their names tell nothing."""
    command = ["find", *map(str, Path("/proc").glob("[0-9]*/fd")), "-lname", f"{folder}/*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return {line.split("/")[2] for line in found.splitlines()} - {str(process.pid)}


JOIN = """
from onward.core.errors import ClusterError
for token in {tokens!r}:
    start = time.monotonic()
    try:
        with Engine("{address}", token) as engine:
            print(engine.spawn(dict, {{"x": 6}}, name="dict").call("get", "x").result(60))
    except ClusterError as error:
        print(error)
    assert time.monotonic() - start < 30
"""


def test_joining_a_cluster_takes_its_token(tmp_path, engine):
    """That of the Ray of these tests, which has one."""
    right, wrong = engine.folder / "token", tmp_path / "wrong"
    wrong.write_text("8" * 64)
    tokens = [str(right), str(wrong), str(tmp_path / "absent"), str(right)]
    address = ray.get_runtime_context().gcs_address
    with alone(tmp_path, JOIN.format(tokens=tokens, address=address)) as process:
        out, error = process.communicate(timeout=120)
    lines = out.splitlines()
    assert (process.returncode, strange(error)) == (0, [])
    assert (lines[0], lines[3]) == ("6", "6")
    assert "refuses the token in" in lines[1]
    assert "There is no token for Ray in" in lines[2]


ADDRESSES = {
    "127.0.0.1:9": "Nobody listens at 127.0.0.1:9: .*ray start --head",
    "127.0.0.1:99999": "Nobody listens at 127.0.0.1:99999",
    "ray://127.0.0.1:10001": "one of a Ray client.*host:port",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_where_no_cluster_is(monkeypatch, address):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(engines, "_home", engines._Home())
    with pytest.raises(ClusterError, match=ADDRESSES[address]), Engine(address):
        pass
