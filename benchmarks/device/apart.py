"""A case of a part in a process of its own, which tells line by line, and ends when its time is up.

On an accelerator a process is what memory is counted by, and what a failed allocation or a crash of a
compiler takes down.

    python -m benchmarks.device.apart '{"part": "right", "case": "gradients", "seconds": 60, ...}'
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import IO, Any

from benchmarks.device.part import Part, Sheet, reason_of

ROOT = Path(__file__).parents[2]
PROBE = "probe"
_ENDED = 5.0  # seconds that a case which told all has to end

Write = Callable[[str, Any], None]


@dataclass(frozen=True)
class Order:
    """Which case is to run, in how many seconds."""

    part: str
    case: str
    seconds: float
    tiny: bool
    rounds: int


def part_named(name: str) -> Part:
    """The part that a file of this folder holds."""
    found: Part = import_module(f"benchmarks.device.{name}").PART
    return found


def here(order: Order, write: Write) -> None:
    """Run a case in this process; what it raises is written as the reason why it is left out."""
    try:
        case = part_named(order.part).cases[order.case]
        case(Sheet(write, order.seconds, order.tiny, order.rounds))
    except Exception as error:
        write("left out", (order.case, reason_of(error)))


def in_a_process(order: Order, write: Write) -> None:
    """Run a case in a new process; it is ended when its time is up, and what it told until then stays."""
    with tempfile.TemporaryFile() as errors, _started(asdict(order), errors) as process:
        try:
            is_whole = _followed(process, order.seconds, write)
            status = _status(process) if is_whole else None
        finally:
            process.kill()
        if not is_whole:
            write("left out", (order.case, f"ended after the {order.seconds:.0f} s that were left for it"))
        elif status:
            write("left out", (order.case, f"its process ended with {status}: {_last_words(errors)}"))


def probe(seconds: float = 120.0) -> dict[str, Any]:
    """What a process that starts JAX finds: the environment, the platform, how many devices."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryFile() as errors, _started({"part": PROBE}, errors) as process:
        try:
            _followed(process, seconds, lambda kind, content: found.update(content))
        finally:
            process.kill()
        if not found:
            raise SystemExit(f"JAX did not start within {seconds:.0f} s: {_last_words(errors)}")
    return found


def _started(order: dict[str, Any], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Memory of a GPU is taken as it is needed, so that torch beside JAX finds some, and peaks are true."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.device.apart", json.dumps(order)],
        env={**given, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
    )


def _followed(process: subprocess.Popen[bytes], seconds: float, write: Write) -> bool:
    """Whether it told all within the time."""
    assert process.stdout is not None
    end, pending, pipe = monotonic() + seconds, b"", process.stdout.fileno()
    while select.select([pipe], [], [], max(0.0, end - monotonic()))[0]:
        read = os.read(pipe, 1 << 16)
        if not read:
            return True
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            write(*json.loads(line))
    return False


def _status(process: subprocess.Popen[bytes]) -> int:
    """Of a process that told all: one that takes long to end has done so well enough."""
    try:
        return process.wait(_ENDED)
    except subprocess.TimeoutExpired:
        return 0


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def main(text: str) -> None:
    """Be the process of a case: what libraries print goes where errors go."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

        def write(kind: str, content: Any) -> None:
            print(json.dumps((kind, content)), file=answers, flush=True)

        order = json.loads(text)
        if order["part"] == PROBE:
            write("environment", import_module("benchmarks.device.found").found())
        else:
            here(Order(**order), write)


if __name__ == "__main__":
    main(*sys.argv[1:])
