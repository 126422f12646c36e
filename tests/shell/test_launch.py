"""``onward launch``: real processes, joined by ``jax.distributed``, that end as processes do."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from onward.core.errors import ArgumentError
from onward.shell.launch import gang, worker
from onward.shell.launch.gang import Ending, Gang, Signals, blamed, name_of
from onward.shell.launch.launch import environment, shares
from onward.shell.launch.printer import tagged
from onward.shell.launch.relay import Relay
from onward.shell.launch.worker import GAVE_UP, VARIABLE, LaunchedProcess
from onward.shell.main import main

SUM = """
import os, signal, sys, time
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from onward.execute.peers.peers import Peers

here = jax.process_index()
mesh = Mesh(np.array(jax.devices()), ("replicas",))
split = NamedSharding(mesh, P("replicas"))
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "replicas"), mesh=mesh, in_specs=P("replicas"),
                              out_specs=P()))
mine = np.full((jax.local_device_count(), 2), here + 1, np.float32)
deadline = float(os.environ["ONWARD_DEADLINE"])

def step(label="x [2]"):
    x = jax.make_array_from_process_local_data(split, mine)
    return np.asarray(Peers.meet().run(lambda: jax.block_until_ready(total(x)), deadline, label))

for _ in range(3):
    found = step()
"""


@pytest.fixture
def surroundings():
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ONWARD_", "XLA_FLAGS"))}
    return {**kept, "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def run(surroundings, monkeypatch, capfd):
    """Launches from this process; returns status, and the lines of stdout and stderr without gloo's own."""
    for name in set(os.environ) - set(surroundings):
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PLATFORMS", surroundings["JAX_PLATFORMS"])

    def launched(*options, script, arguments=(), seconds=60):
        guard = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
        guard.start()
        try:
            status = main(["launch", *map(str, options), str(script), *map(str, arguments)])
        finally:
            guard.cancel()
        lines = (text.splitlines() for text in capfd.readouterr())
        return status, *([x for x in found if "[Gloo]" not in x] for found in lines)

    return launched


@pytest.fixture
def start(surroundings):
    """Starts a launcher in a group of its own, and ends all of it afterwards."""
    made = []

    def started(*options, script):
        process = subprocess.Popen(
            [sys.executable, "-m", "onward", "launch", *map(str, options), str(script)],
            env=surroundings,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        made.append(process)
        return process

    yield started
    for process in made:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def quick(monkeypatch):
    """What is left of a gang has nothing more to say, and is ended soon."""
    monkeypatch.setattr(gang, "FAILED", ((0.5, signal.SIGTERM), (1.0, signal.SIGKILL)))
    monkeypatch.setattr(gang, "LEAVING", ((0.5, signal.SIGTERM), (10.0, signal.SIGKILL)))
    monkeypatch.setattr(gang, "ENDED", ((0, signal.SIGTERM), (0.5, signal.SIGKILL)))


def is_running(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def until(condition, patience=20.0):
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ---------------------------------------------------------------------------- one computation


def test_two_processes_are_one_computation(run, script):
    script("TEXT = 'from beside the script'", "beside.py")
    path = script(
        SUM
        + """
import beside
print("sum", found.tolist(), jax.device_count(), jax.local_device_count(), jax.process_count())
print(f"{__name__} {sys.argv[1:]} {deadline} {beside.TEXT} {os.path.basename(__file__)}", file=sys.stderr)
print("10%\\r100%")
print("no end", end="")
"""
    )
    status, out, err = run(
        "-n", 2, "--devices", 3, "--deadline", 77, script=path, arguments=["-n", "5", "--name", "a b"]
    )
    assert status == 0, err
    for tag in ("[0]", "[1]"):
        # Gloo may tell how many peers it is connected to, on the same stream, and end that line later
        assert [x for x in out if x.startswith(tag) and "peer ranks" not in x and x.strip() != tag] == [
            f"{tag} sum [[9.0, 9.0]] 6 3 2",
            f"{tag} 100%",
            f"{tag} no end",
        ]
        told = f"{tag} __main__ ['-n', '5', '--name', 'a b'] 77.0 from beside the script train.py"
        assert [x for x in err if x.startswith(tag)] == [told]


def test_a_killed_process_is_named_by_the_others_and_a_restart_helps(run, script, tmp_path):
    """First the coordinator dies, whose death is an error too, then the other one."""
    path = script(
        SUM
        + f"""
mark = Path({str(tmp_path)!r}, f"seen-{{here}}")
if not mark.exists():
    mark.write_text("")
    if here == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    step()
print("whole", step().tolist())
if here == 1: os.kill(os.getpid(), signal.SIGKILL)
while True: step()
"""
    )
    status, out, err = run("-n", 2, "--devices", 1, "--restarts", 1, script=path)
    assert status == 128 + signal.SIGKILL
    assert sorted(out) == ["[0] whole [[3.0, 3.0]]", "[1] whole [[3.0, 3.0]]"], err
    first, again, last = [x for x in err if x.startswith("onward")]
    assert first.startswith("onward: process 0 was killed by SIGKILL after")
    assert again == "onward: starting all again, restart 1 of 1"
    assert last.startswith("onward: process 1 was killed by SIGKILL after")
    assert err[-1] == last
    (told,) = [x for x in err if x.startswith("[1] onward.core.errors.PeerError: Step 4")]
    assert "Process 0 (pid" in told
    (told,) = [x for x in err if x.startswith("[0] onward.core.errors.PeerError: Step 5")]
    assert "Process 1 (pid" in told
    assert " after step 4: " in told
    assert not [x for x in err if "Check failure stack trace" in x]


def test_a_stopped_process_is_named_within_the_deadline(run, script, quick):
    path = script(SUM + "print(os.getpid())\nif here == 1: os.kill(os.getpid(), signal.SIGSTOP)\nstep()")
    status, out, err = run("-n", 2, "--devices", 1, "--deadline", 4, script=path)
    assert status == GAVE_UP
    told = [x for x in err if x.startswith("[0] onward.core.errors.PeerError")]
    assert "Step 4 did not end within 4 s. Process 1 (pid" in told[0]
    assert "after step 3: it died or was stopped" in told[0]
    assert err[-1].startswith("onward: process 0 gave up after")
    assert not any(is_running(int(line.split()[1])) for line in out)


def test_processes_of_another_launcher_end_within_the_deadline_too(script, surroundings):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    join = f"""
import sys, jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize({address!r}, 2, int(sys.argv[1]), coordinator_bind_address={address!r})
"""
    path = script(join + SUM + "if here == 1: os.kill(os.getpid(), signal.SIGSTOP)\nstep()")
    processes = [
        subprocess.Popen(
            [sys.executable, path, str(index)],
            env={**surroundings, "ONWARD_DEADLINE": "4"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        _, err = processes[0].communicate(timeout=60)  # JAX alone would wait for five minutes more
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stderr.close()
    assert processes[0].returncode == 1
    assert f"Step 4 did not end within 4 s. Process 1 (pid {processes[1].pid} on" in err


@pytest.mark.parametrize("first", [0, 1])
def test_a_process_whose_data_ran_out_is_named_at_once(run, script, quick, first):
    path = script(SUM + f"if here != {first}: step()")
    begun = time.monotonic()
    status, _, err = run("-n", 2, "--devices", 1, script=path)
    assert time.monotonic() - begun < 40  # the deadline is 300
    assert status == GAVE_UP
    told = [x for x in err if x.startswith(f"[{1 - first}] onward.core.errors.PeerError")]
    assert f"Process {first} (pid" in told[0]
    assert "came to its end after step 3, and takes no part in step 4" in told[0]


def test_an_error_of_one_process_is_told_by_the_other(run, script):
    path = script(SUM + "if here == 1: raise OSError('the reader broke')\nstep()")
    status, _, err = run("-n", 2, "--devices", 1, script=path)
    assert status == 1
    assert err[-1].startswith("onward: process 1 ended with status 1 after")
    mine = [x for x in err if x.startswith("[1] ")]
    assert mine[0] == "[1] Traceback (most recent call last):"
    assert "train.py" in mine[1]  # nothing of the launcher
    assert mine[-1] == "[1] OSError: the reader broke"
    told = [x for x in err if x.startswith("[0] onward.core.errors.PeerError")]
    assert "was ended after step 3 by an error: OSError: the reader broke." in told[0]


# ---------------------------------------------------------------------------- as if it was started by itself


ENDS = {
    "a status": ("sys.exit(3)", 3, ""),
    "a text": ("sys.exit('no data here')", 1, "no data here"),
    "an error": ("raise LookupError('lost')", 1, "LookupError: lost"),
    "syntax": ("this is not a Python", 1, "SyntaxError"),
    "a signal": ("os.kill(os.getpid(), 15)", 128 + 15, "onward: process 0 was killed by SIGTERM"),
}


@pytest.mark.parametrize(("last", "status", "words"), ENDS.values(), ids=ENDS)
def test_how_a_script_alone_ends(run, script, last, status, words):
    path = script(f"import os, sys\nprint('begun', flush=True)\n{last}" if "Python" not in last else last)
    found, out, err = run("-n", 1, script=path)
    assert found == status
    assert out == (["begun"] if "Python" not in last else [])  # without the number of the process
    assert words in "\n".join(err)
    assert bool(err) == bool(status)
    assert not [x for x in err if "worker.py" in x]


def test_what_a_script_alone_finds(run, script, tmp_path):
    beside = tmp_path / "elsewhere"
    beside.mkdir()
    path = script(
        """
import atexit, os, pickle, sys, threading, jax
class Own: pass
print(jax.process_count(), sys.argv, sys.path[0], __file__, "ONWARD_WORKER" in os.environ)
print(sys.modules["__main__"].Own is Own, sys.stdin.read() == "")
atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Own()))).__name__))
"""
    )
    link = beside / "link.py"
    link.symlink_to(path)
    status, out, err = run("-n", 1, script=link, arguments=["--help"])
    assert (status, err) == (0, [])
    assert out == [f"1 {[str(link), '--help']} {tmp_path} {link} False", "True True", "Own"]


def test_a_worker_is_not_started_by_hand(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(SystemExit) as end:
        worker.main()
    assert end.value.code == (
        "onward.shell.launch.worker is started by the launcher: onward launch -n 2 script.py"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-n", "0", "train.py"], 2, "0 is not a number of at least 1"),
        (["-n", "two", "train.py"], 2, "two is not a number of at least 1"),
        (["train.py", "-n", "2"], 2, "required: -n/--processes"),
        (["-n", "2"], 2, "required: script"),
        (["-n", "2", "--deadline", "0", "train.py"], 2, "0 is not a number of seconds above 0"),
        (["-n", "2", "--deadline", "soon", "train.py"], 2, "soon is not a number of seconds above 0"),
        (["-n", "2", "--deadline", "inf", "train.py"], 2, "inf is not a number of seconds above 0 and below"),
        (["-n", "2", "--restarts", "-1", "train.py"], 2, "-1 is not a number of at least 0"),
        (["-n", "2", "nowhere/train.py"], 1, "nowhere/train.py does not exist; expected a Python file"),
        (["-n", "2", "."], 1, ". is a folder; expected a Python file"),
    ],
)
def test_wrong_arguments_are_explained(arguments, status, message, capsys):
    try:
        found = main(["launch", *arguments])
    except SystemExit as stop:
        found = stop.code
    assert found == status
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------- nothing is left behind


WAITING = """
import os, subprocess, sys, time, jax
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
jax.devices()
print("pids", os.getpid(), child.pid, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("saved", flush=True)
    raise
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_launcher_that_ends_leaves_nothing(start, script, number):
    launcher = start("-n", 2, "--devices", 1, script=script(WAITING))
    pids = []
    while len(pids) < 4:
        line = launcher.stdout.readline()
        if " pids " in line:
            pids += map(int, line.split()[2:])
    assert all(map(is_running, pids))
    os.kill(launcher.pid, number)
    begun = time.monotonic()
    rest = launcher.stdout.read()
    status = launcher.wait(20)
    until(lambda: not any(map(is_running, pids)))
    assert time.monotonic() - begun < 15
    assert status == (-9 if number == signal.SIGKILL else 128 + number)
    assert rest.count("saved") == (2 if number == signal.SIGINT else 0)


def test_when_nobody_reads_any_more(start, script):
    path = script("import jax, itertools\nfor i in itertools.count(): print('line', i)")
    launcher = start("-n", 2, "--devices", 1, script=path)
    assert launcher.stdout.readline()[3:] == " line 0\n"
    launcher.stdout.close()
    assert launcher.wait(20) == 128 + signal.SIGHUP


# ---------------------------------------------------------------------------- a gang of anything


def gang_of(*codes, signals=None):
    """Runs Python code in processes; returns the gang, what they printed, and how long it took."""
    made = []

    def begin(index):
        process = subprocess.Popen(
            [sys.executable, "-c", f"import os, signal, sys, time\n{codes[index]}"],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        made.append(process)
        return process

    begun = time.monotonic()
    made_gang = Gang(begin, len(codes), signals or Signals())
    made_gang.run()
    seconds = time.monotonic() - begun
    printed = [p.stdout.read() for p in made]
    for process in made:
        process.stdout.close()
    return made_gang, printed, seconds


STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


def test_a_gang_in_which_nothing_fails():
    found, printed, _ = gang_of("print(1)", "time.sleep(0.3); print(2)")
    assert (found.failed, printed) == ([], ["1\n", "2\n"])
    assert blamed(found.failed) is None


def test_a_gang_is_given_a_moment_then_ended(quick):
    found, printed, seconds = gang_of(
        "time.sleep(0.2); sys.exit(4)", "time.sleep(0.4); print('late', flush=True); time.sleep(60)", STUBBORN
    )
    assert [(e.index, e.code) for e in found.failed] == [(0, 4)]
    assert printed[1] == "late\n"
    assert seconds < 10


def test_where_one_was_taken_away_the_others_may_save(quick):
    saving = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(2); print('saved', flush=True)"
    found, printed, seconds = gang_of("time.sleep(0.2); sys.exit(143)", saving)
    assert printed[1] == "saved\n"
    assert str(blamed(found.failed)).startswith("process 0 ended with status 143")
    assert seconds < 10


def test_a_stopped_process_is_ended(quick):
    found, _, seconds = gang_of("os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(0.2); sys.exit(75)")
    assert str(blamed(found.failed)).startswith("process 1 gave up after")
    assert seconds < 10


def test_what_a_failed_process_started_is_ended(quick):
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); sys.exit(1)"
    _, printed, _ = gang_of(code)
    until(lambda: not is_running(int(printed[0])))


@pytest.mark.parametrize(("times", "printed"), [([0.5], "saved\n"), ([0.5, 0.7], "")], ids=["once", "twice"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_ctrl_c_and_sigterm_let_a_gang_save_and_a_second_one_does_not(quick, times, printed, number):
    code = """
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.6)
    print("saved", flush=True)
"""
    if number == signal.SIGTERM:
        code = "signal.signal(signal.SIGTERM, signal.default_int_handler)" + code
    with Signals() as signals:
        for seconds in times:
            threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
        found, out, seconds = gang_of(code, signals=signals)
    assert signals.seen == [number] * len(times)
    assert out[0] == printed
    assert found.failed == []  # it did not fail by itself
    assert seconds < 10


def test_handlers_are_put_back():
    former = signal.getsignal(signal.SIGTERM)
    with Signals():
        assert signal.getsignal(signal.SIGTERM) is not former
    assert signal.getsignal(signal.SIGTERM) is former


# ---------------------------------------------------------------------------- on paper


BLAMED = {
    "a killed one before its victims": (
        [(0, 75, 14.2), (1, -9, 12.1)],
        "process 1 was killed by SIGKILL after 12 s",
    ),
    "of two at once the killed one": (
        [(0, 1, 3.0), (1, -11, 3.0)],
        "process 1 was killed by SIGSEGV after 3 s",
    ),
    "the first": ([(0, 1, 5.0), (1, 2, 3.4)], "process 1 ended with status 2 after 3 s"),
    "only victims": (
        [(0, 75, 9.0)],
        "process 0 gave up after 9 s because of another process; its message says why",
    ),
    "an unnamed signal": ([(0, -64 - 1, 1.0)], "process 0 was killed by signal 65 after 1 s"),
}


@pytest.mark.parametrize(("endings", "words"), BLAMED.values(), ids=BLAMED)
def test_who_is_blamed(endings, words):
    assert str(blamed(Ending(*e) for e in endings)) == words


def test_statuses_are_counted_as_shells_do():
    assert [Ending(0, code, 1.0).status for code in (3, -9, -15)] == [3, 137, 143]
    assert name_of(2) == "SIGINT"


def test_the_environment_of_a_process():
    place = LaunchedProcess(1, 2, "127.0.0.1:1", "127.0.0.1:2", 9.5, 7)
    alone = LaunchedProcess(0, 1, "127.0.0.1:1", "127.0.0.1:2", 9.5, 7)
    assert environment({"A": "1"}, alone) == {"A": "1", VARIABLE: alone.to_text(), "ONWARD_DEADLINE": "9.5"}
    flags = environment({"XLA_FLAGS": "--a=1"}, place, devices=2, gpus="3,4")
    assert flags["XLA_FLAGS"] == "--a=1 --xla_force_host_platform_device_count=2"
    assert flags["CUDA_VISIBLE_DEVICES"] == "3,4"
    assert "no_grpc_proxy" not in flags
    proxied = environment({"HTTPS_PROXY": "http://proxy:80", "no_proxy": "inside"}, place)
    assert proxied["no_grpc_proxy"] == "inside,127.0.0.1"
    assert environment({"JAX_ENABLE_PREEMPTION_SERVICE": "1"}, place)["JAX_ENABLE_PREEMPTION_SERVICE"] == "1"


def test_gpus_are_shared_out():
    assert shares([], 3) == [None, None, None]
    assert shares(["0", "1"], 1) == [None]
    assert shares(["4", "5", "6", "7", "8"], 2) == ["4,5", "6,7"]
    with pytest.raises(ArgumentError, match=r"2 processes need a GPU each.*shows 1 \(0\).*JAX_PLATFORMS=cpu"):
        shares(["0"], 2)


def test_a_line_as_it_is_printed():
    assert tagged(12, b"loss 0.5\n") == b"[12] loss 0.5\n"
    assert tagged(0, b"a\r\n") == b"[0] a\n"
    assert tagged(0, b"\n") == b"[0] \n"
    assert tagged(0, b"no end") == b"[0] no end\n"


def test_the_relay_waits_for_its_target_and_outlives_it():
    def ends(address):
        host, port = address.split(":")
        return host, int(port)

    with Relay() as relay:
        client = socket.create_connection(ends(relay.address))
        client.sendall(b"early")
        time.sleep(0.2)
        with socket.create_server(ends(relay.target)) as server:
            served, _ = server.accept()
            assert served.recv(10) == b"early"
            served.sendall(b"answer")
            assert client.recv(10) == b"answer"
            served.close()
        client.settimeout(0.3)
        for _ in range(3):
            client.sendall(b"is anybody there?")
            with pytest.raises(TimeoutError):
                client.recv(10)
    client.settimeout(5)
    assert client.recv(10) == b""
    client.close()
