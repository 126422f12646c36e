"""One process of ``onward launch``: joins the others, then runs the script as if it was started by itself.

``python -m onward.shell.launch.worker script.py arguments...``; the environment says what else it must know.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Thread
from types import ModuleType, TracebackType
from typing import NoReturn

import jax

from onward.core.errors import PeerError
from onward.execute.host_memory import keep_host_memory
from onward.execute.peers.peers import Peers

VARIABLE = "ONWARD_WORKER"  # in the environment: a Place
GAVE_UP = 75  # the status of a process that ended because of another one (EX_TEMPFAIL)
_INTERRUPTED = 130  # the status of a process that Ctrl-C ended, as shells count


@dataclass(frozen=True)
class LaunchedProcess:
    """The settings that the launcher passes to one process.

    Args:
        index: which of the processes it is.
        count: how many there are.
        coordinator: where it finds the coordinator, "HOST:PORT".
        bind: where process 0 opens it.
        deadline: how many seconds the processes wait for each other in a step.
        lifeline: a file descriptor that ends when the launcher does.
    """

    index: int
    count: int
    coordinator: str
    bind: str
    deadline: float
    lifeline: int

    def to_text(self) -> str:
        """As text, for the environment."""
        return json.dumps(asdict(self))


def main() -> None:
    """Join, run the script, end."""
    if VARIABLE not in os.environ:
        sys.exit("onward.shell.launch.worker is started by the launcher: onward launch -n 2 script.py")
    place = LaunchedProcess(**json.loads(os.environ.pop(VARIABLE)))
    os.set_inheritable(place.lifeline, False)
    Thread(target=_end_with, args=(place.lifeline,), name="onward-lifeline", daemon=True).start()
    keep_host_memory()
    try:
        join(place)
        run(sys.argv[1:])
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        _end(place, stop)
    except BaseException as error:
        trace = _of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        _end(place, error)


def join(place: LaunchedProcess) -> None:
    """Make this process one of several; alone it stays as it is."""
    if place.count == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=place.coordinator,
        num_processes=place.count,
        process_id=place.index,
        cluster_detection_method="deactivate",
        # Peers notices who is missing and says who; JAX would abort the others, so it should come later.
        heartbeat_timeout_seconds=max(100, int(place.deadline) + 60),
        shutdown_timeout_seconds=max(300, int(place.deadline)),
        coordinator_bind_address=place.bind,
    )


def run(arguments: list[str]) -> None:
    """Run a script as ``python script.py arguments...`` does.

    Its module stays ``__main__`` to the end of the process, so that what it defined can be pickled by threads
    and at exit as well; ``runpy`` would take it away.
    """
    path = os.path.abspath(arguments[0])
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv[:] = arguments
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec"), module.__dict__)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the script."""
    path = sys.modules["__main__"].__file__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    return trace


def _status(error: BaseException) -> int:
    """The exit status of a process that ends by this."""
    if isinstance(error, SystemExit):
        code = error.code
        return code & 0xFF if isinstance(code, int) else int(code is not None)
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    return GAVE_UP if isinstance(error, PeerError) else 1


def _end(place: LaunchedProcess, error: BaseException) -> NoReturn:
    """End by an error, one of several at once: at the usual end JAX waits for all, and one may be dead."""
    status = _status(error)
    if status == 0 or place.count == 1:
        sys.exit(status)
    if Peers.met is not None:
        Peers.met.leave(error)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _end_with(lifeline: int) -> None:
    """End this process, and those it started, when the launcher has died."""
    with suppress(OSError):
        os.read(lifeline, 1)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
