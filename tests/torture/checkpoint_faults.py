"""Does a checkpoint survive what disks and power cuts do?

    python -m tests.torture.checkpoint_faults

Four ways to break one, each of which must end in a whole checkpoint or in a CheckpointError:

    flips        one bit of one file is another: refused, the message names the file and the variable
    truncations  a file ends too early: refused, the message names the file
    kills        SIGKILL at a random moment of a process that saves in a loop: the last whole one loads
    faults       strace makes one system call of one save kill the process, or fail with ENOSPC or EIO: the
                 loader returns the old state or the new one, and the next save leaves no rubbish behind

For the faults only the calls of the save count, not the thousands of an import. So a server process imports
everything once and forks a child for each fault. The child waits until there is a byte in a pipe; strace
attaches to it, and counts calls from there; then the byte is written, and the child saves. A first run
without a fault tells how many calls of each name there are.
"""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from onward.core.errors import CheckpointError, MissingExtraError
from onward.execute.checkpoint.backends import BACKENDS
from onward.execute.checkpoint.checkpoints import Checkpoints

ROOT = Path(__file__).parents[2]
CALLS = (
    *(
        "openat",
        "read",
        "write",
        "pwrite64",
        "lseek",
        "ftruncate",
        "fsync",
        "fdatasync",
        "close",
        "getdents64",
    ),
    *("mkdir", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"),
    *("newfstatat", "fstat", "stat", "lstat", "statx"),
)
REMOVING = ("unlink", "unlinkat", "rmdir", "openat", "getdents64", "newfstatat", "fstat", "lstat", "close")
FAULTS = ("signal=KILL", "error=ENOSPC", "error=EIO")
NAMES = ("fc_0/w", "grad(x)", "ключ", "../../escape")


def arrays(step: int) -> dict[str, np.ndarray]:
    """Arrays of which each element tells the step; two larger than a write buffer."""
    return {
        "fc_0/w": np.full((64, 128), step, np.float32),
        "grad(x)": np.full((3, 5), step, np.int64),
        "ключ": np.full((), step, np.uint8),
        "../../escape": np.full(9000, step, np.int32),
    }


def loaded_step(folder: Path) -> int:
    """The step of the latest checkpoint, once it is certain that it is whole."""
    found = Checkpoints(folder).load()
    expected = arrays(found.step)
    assert found.arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert found.arrays[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found.arrays[name], array)
    return found.step


# ---------------------------------------------------------------------------- flips and truncations


def flips(path: Path, count: int, seed: int = 0) -> tuple[int, int]:
    """Flip bits one at a time; how many were refused, and for how many of those the variable was named."""
    generator, files = random.Random(seed), sorted(p for p in path.rglob("*") if p.is_file())
    refused = named = 0
    for i in range(count):
        file = files[i % len(files)]
        data = bytearray(original := file.read_bytes())
        position = generator.randrange(len(data))
        data[position] ^= 1 << generator.randrange(8)
        file.write_bytes(data)
        message = refusal(path)
        file.write_bytes(original)
        refused += message is not None and str(file) in message.replace("manifest.json", file.name)
        variable = variable_at(path, file, position)
        assert variable is None or message is None or repr(variable) in message, (file, position, message)
        named += variable is not None
    return refused, named


def truncations(path: Path, count: int, seed: int = 0) -> int:
    """Cut files off one at a time; how many were refused."""
    generator, files = random.Random(seed), sorted(p for p in path.rglob("*") if p.is_file())
    refused = 0
    for i in range(count):
        file = files[i % len(files)]
        original = file.read_bytes()
        file.write_bytes(original[: generator.randrange(len(original))])
        message = refusal(path)
        refused += message is not None and str(file) in message.replace("manifest.json", file.name)
        file.write_bytes(original)
    return refused


def refusal(path: Path) -> str | None:
    """The message with which a checkpoint is refused; None if it is not."""
    try:
        Checkpoints(path.parent).load(path)
    except CheckpointError as error:
        return str(error)
    return None


def variable_at(path: Path, file: Path, position: int) -> str | None:
    """Which variable a byte belongs to: found by the layout of the data, without the code under test."""
    if file.name == "arrays.safetensors":
        data = file.read_bytes()
        base = 8 + int.from_bytes(data[:8], "little")
        spans = re.findall(r'"([^"]+)":\{[^}]*"data_offsets":\[(\d+),(\d+)\]', data[8:base].decode())
        return next((n for n, start, end in spans if int(start) <= position - base < int(end)), None)
    parts = file.relative_to(path).parts
    return NAMES[int(parts[1][1:])] if parts[0] == "orbax" and len(parts) == 3 else None


# ---------------------------------------------------------------------------- processes that die


def serve(go: int) -> None:
    """Fork a child for each line on stdin, ``save FOLDER`` or ``loop FOLDER``; say its pid, then its end."""
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        task, folder = line.rstrip("\n").split(" ", 1)
        if (pid := os.fork()) == 0:
            select.select([go], [], [])
            os._exit({"save": save_once, "loop": save_for_ever}[task](Path(folder)))
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


def save_once(folder: Path) -> int:
    """The save at which the faults aim: it adds step 2 and removes step 1."""
    try:
        with Checkpoints(folder, keep=1, asynchronous=False) as checkpoints:
            checkpoints.claim(resume=True)
            checkpoints.save(arrays(2), 2)
    except CheckpointError:
        return 3
    return 0


def save_for_ever(folder: Path) -> int:
    """Save step after step, and note each one that is certainly on the disk."""
    checkpoints, step = Checkpoints(folder, keep=2), 0
    with open(folder.with_suffix(".log"), "w") as log:
        while True:
            step += 1
            checkpoints.save(arrays(step % 256), step % 256)
            checkpoints.wait()
            print(step % 256, file=log, flush=True)


class Server:
    """The process that forks children; ``start`` gives the pid of one that waits for ``go``."""

    def __enter__(self) -> Server:
        self.read_end, self.go_end = os.pipe()
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.torture.checkpoint_faults",
            str(self.read_end),
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[self.read_end], **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=60)
        os.close(self.go_end)
        os.close(self.read_end)

    def start(self, task: str, folder: Path) -> int:
        self.process.stdin.write(f"{task} {folder}\n")
        return int(self.process.stdout.readline())

    def go(self) -> None:
        os.write(self.go_end, b"x")

    def end(self) -> int:
        """The exit status of the child, negative for a signal."""
        status = int(self.process.stdout.readline())
        os.read(self.read_end, 1)
        return os.waitstatus_to_exitcode(status)


def kills(server: Server, count: int, seed: int = 0) -> int:
    """Kill a saving process ``count`` times; how many times the last whole checkpoint, or a later, loads."""
    generator, survived = random.Random(seed), 0
    for _ in range(count):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "run"
            pid = server.start("loop", folder)
            server.go()
            log = folder.with_suffix(".log")
            while not (log.exists() and log.read_text()):
                time.sleep(0.001)
            time.sleep(generator.uniform(0, 0.3))
            os.kill(pid, signal.SIGKILL)
            assert server.end() == -signal.SIGKILL
            certain = int(log.read_text().split("\n")[-2])
            survived += (loaded_step(folder) - certain) % 256 in (0, 1)
            assert_next_save_is_clean(folder)
    return survived


def assert_next_save_is_clean(folder: Path) -> None:
    """A save after the accident works and leaves only checkpoints."""
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.claim(resume=True)
        checkpoints.save(arrays(7), 7)
    assert loaded_step(folder) == 7
    assert {p.path for p in checkpoints.entries()} == set(folder.iterdir())


# ---------------------------------------------------------------------------- faults of system calls


def why_no_strace() -> str | None:
    """Why strace cannot be used here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        command = ["strace", "-o", os.devnull, "-p", str(child.pid)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            line = tracer.stderr.readline()
            child.communicate(b"\n")
            tracer.communicate()
    return None if "attached" in line else f"strace may not attach to a process: {line.strip()}"


def run_traced(server: Server, folder: Path, *options: str) -> int:
    """One save of a child under strace; its exit status."""
    Checkpoints(folder, asynchronous=False).save(arrays(1), 1)
    pid = server.start("save", folder)
    command = ["strace", "-f", "-o", str(folder.with_suffix(".trace")), *options, "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        line = tracer.stderr.readline()
        assert "attached" in line, line
        server.go()
        status = server.end()
        tracer.communicate()
    return status


def count_calls(server: Server) -> dict[str, int]:
    """How many calls of each name one save makes, after the byte that lets it go."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        assert run_traced(server, folder, "-e", f"trace={known_calls()}") == 0
        trace = folder.with_suffix(".trace").read_text()
        return dict(Counter(re.findall(r"^\d+ +(\w+)\(", trace, re.MULTILINE)))


def known_calls() -> str:
    """The names as strace takes them; a question mark allows one that this machine does not have."""
    return ",".join(f"?{name}" for name in CALLS)


def fault(server: Server, call: str, which: str, what: str) -> str:
    """One save with one fault; whether the loader then returned the ``old`` or the ``new`` state."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        inject = f"inject={call}:{what}:when={which}"
        status = run_traced(server, folder, "-e", f"trace={call}", "-e", inject)
        step = loaded_step(folder)
        assert step in (1, 2), step
        assert step == 2 or status != 0, f"{inject}: save returned, and the old state was loaded"
        assert status in (0, 3, -signal.SIGKILL), f"{inject}: exit status {status}"
        left = [p.name for p in folder.iterdir() if p.name.startswith(".part")]
        assert status == -signal.SIGKILL or call in REMOVING or not left, f"{inject}: left {left}"
        assert_next_save_is_clean(folder)
    return {1: "old", 2: "new"}[step]


def every_fault(calls: dict[str, int]) -> Iterator[tuple[str, str, str]]:
    """Each call, once with each fault, and from there on a disk that stays full."""
    for call, count in calls.items():
        for n in range(1, count + 1):
            yield from ((call, str(n), what) for what in FAULTS)
            if call in ("write", "fsync", "mkdir"):
                yield call, f"{n}+", "error=ENOSPC"


# ---------------------------------------------------------------------------- the full counts


def report(title: str, run: Callable[[], str]) -> None:
    """Run one part and print what came of it."""
    start = time.perf_counter()
    print(f"{title:16} {run()}  ({time.perf_counter() - start:.0f} s)", flush=True)


def saved(folder: Path, backend: str = "safetensors") -> Path:
    """A small checkpoint to damage."""
    with Checkpoints(folder, backend=backend) as checkpoints:
        return checkpoints.save(arrays(5), 5, metrics={"loss": 0.5}, extra={"epoch": 1})


def report_damage(backend: str, count: int) -> None:
    """Flips and truncations of a checkpoint of one backend."""

    def flip() -> str:
        refused, named = flips(path, count)
        return f"{refused} of {count} refused; {named} of them lay in data, and the variable was named"

    with tempfile.TemporaryDirectory() as scratch:
        try:
            path = saved(Path(scratch), backend)
        except MissingExtraError as error:
            print(f"{backend}: NOT RUN, {error}")
            return
        print(f"{backend}:")
        report("  flips", flip)
        report("  truncations", lambda: f"{truncations(path, count)} of {count} refused")


def report_faults(server: Server) -> None:
    """Every fault at every call."""

    def sweep() -> str:
        states = Counter(fault(server, *f) for f in chosen)
        return f"{len(chosen)} faults: {states['old']} times the old state, {states['new']} times the new one"

    calls = count_calls(server)
    print("one save makes " + ", ".join(f"{n} {name}" for name, n in calls.items()))
    for what in FAULTS:
        chosen = [f for f in every_fault(calls) if f[2] == what]
        report(f"  {what}", sweep)


def main() -> None:
    """Everything, with the counts that the tests cut down."""
    for backend in BACKENDS:
        report_damage(backend, 1000)
    with Server() as server:
        report("kills", lambda: f"{kills(server, 20)} of 20: the last whole checkpoint loads")
        if reason := why_no_strace():
            print(f"faults: NOT RUN, {reason}")
        else:
            report_faults(server)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]))
    else:
        main()
