"""One side in a process of its own, which computes only when it is told to.

What a side does to its process (how memory is kept, which threads there are, what is imported) falls on no
other; a side that crashes takes no other with it. A worker builds its side, takes the first steps, reports,
and then reads from its input how many steps to take. It ends when its input ends, so with its parent.

    with Worker("torch", "MLP, Adam") as worker:
        print(worker.report.losses, worker.seconds(steps=100))
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import IO, Any

import numpy as np

from benchmarks.sides import SIDES
from benchmarks.workloads import WORKLOADS, Workload

_ROOT = Path(__file__).parents[1]
_TEMPORARY = "temporary"
_CHECKED = 10  # steps whose losses are reported
_DEADLINE = 1200.0  # seconds


class SideError(Exception):
    """A side crashed, or did not answer; the last line that it wrote."""


@dataclass(frozen=True)
class Report:
    """The losses of the first ten steps, and the seconds from nothing to the first of them."""

    losses: list[float]
    first: float


class Local:
    """A side in this process: built, and its first steps taken.

    ``cores`` is how many of them it kept busy when it was last measured: CPU seconds in a second.
    """

    cores = 0.0

    def __init__(self, side: str, work: Workload) -> None:
        model, entry = work.model(), SIDES[side]
        build = entry.builder_function()
        begin = perf_counter()
        self.running = build(work, model)
        losses = self._losses()
        first = perf_counter() - begin
        while len(losses) < _CHECKED:
            losses += self._losses()
        self.report = Report(losses[:_CHECKED], first)

    def seconds(self, steps: int) -> float:
        """How long one step takes on average, each call waited for."""
        calls = -(-steps // self.running.steps)
        begin, computed = perf_counter(), process_time()
        for _ in range(calls):
            _wait(self.running.advance())
        passed = perf_counter() - begin
        self.cores = (process_time() - computed) / passed
        return passed / (calls * self.running.steps)

    def temporary(self) -> int | None:
        """The bytes of temporary memory that the compiled step asks for, where it is known."""
        return self.running.temporary and self.running.temporary()

    def close(self) -> None:
        """Nothing to end."""

    def _losses(self) -> list[float]:
        return [float(x) for x in np.ravel(np.asarray(self.running.advance()))]


class Worker:
    """The same in a new process."""

    cores = 0.0

    def __init__(self, side: str, work: str, deadline: float = _DEADLINE) -> None:
        self._side, self._deadline = side, deadline
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", side, work],
            cwd=_ROOT,
            env=dict(os.environ, **SIDES[side].environment, JAX_ENABLE_COMPILATION_CACHE="false"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            self.report = Report(**self._answer())
        except BaseException:
            self.close()
            raise

    def seconds(self, steps: int) -> float:
        """How long one step takes on average, each call waited for."""
        seconds, self.cores = self._asked(str(steps))
        return float(seconds)

    def temporary(self) -> int | None:
        """The bytes of temporary memory that the compiled step asks for, where it is known."""
        found: int | None = self._asked(_TEMPORARY)
        return found

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _asked(self, question: str) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{question}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise SideError(self._last_words()) from error
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], self._deadline)
        if not ready:
            raise SideError(f"no answer in {self._deadline:.0f} seconds")
        line = self._process.stdout.readline()
        if not line:
            raise SideError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        self._process.wait(10)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with {self._process.returncode}"


def main(side: str, work: str) -> None:
    """Be the process of a Worker: what libraries print goes where errors go."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        local = Local(side, WORKLOADS[work])
        print(json.dumps(asdict(local.report)), file=answers, flush=True)
        for line in sys.stdin:
            asks_memory = line.strip() == _TEMPORARY
            answer = local.temporary() if asks_memory else (local.seconds(int(line)), local.cores)
            print(json.dumps(answer), file=answers, flush=True)


def _wait(loss: Any) -> None:
    """Until it is computed; what is not a JAX array is already."""
    if hasattr(loss, "block_until_ready"):
        loss.block_until_ready()


if __name__ == "__main__":
    main(*sys.argv[1:])
