"""A process that runs one set of options when it is told to; that it dies or hangs is a finding."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

import numpy as np

from onward.execute.disk.encoding import ArrayForm, decode
from onward.execute.trials.child import JOB, RESULTS

_CHILD = "onward.execute.trials.child"


class TrialError(Exception):
    """The process died, or did not answer in time; in words, why."""


class OptionsProcess:
    """One set of options in a process of its own, which has run its first step.

    Args:
        folder: of its own, for its results.
        job: what to run, under which options; see ``trials.child``.
        limit: seconds that it may take for any answer.

    Raises:
        TrialError: it died or hung before that.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], limit: float) -> None:
        self.folder, self._limit = folder, limit
        folder.mkdir()
        (folder / JOB).write_text(json.dumps(job))
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", _CHILD, str(folder)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: SimpleQueue[str] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            first = self._answer()
        except BaseException:
            self.close()
            raise
        self.temporary: int = first["temporary"]
        self._forms = [ArrayForm(d, tuple(s), g) for d, s, g in first["forms"]]

    def results(self, prefix: str = "") -> list[Any]:
        """The arrays that a step returned."""
        with np.load(self.folder / f"{prefix}{RESULTS}") as stored:
            return [decode(form, stored[str(i)]) for i, form in enumerate(self._forms)]

    def seconds(self, steps: int) -> float:
        """How long one of so many steps takes."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise TrialError(self._last_words()) from error
        return float(self._answer())

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with suppress(OSError):  # what was not written yet has no reader any more
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> Any:
        try:
            line = self._lines.get(timeout=self._limit)
        except Empty:
            raise TrialError(f"no answer in {self._limit:g} seconds") from None
        if not line:
            raise TrialError(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        code = self._process.wait(10)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:200]}" if lines else ""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}{last}"
        return f"ended with {code}{last}"
