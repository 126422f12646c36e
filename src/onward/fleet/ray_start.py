"""How Ray is started on this machine, for it alone, or joined on others: environment, token, folder.

Ray is configured by environment variables, which it reads once; here they are set, read, and put back before
anything else is started from here: a Ray of its own that a script starts, or joins, is not to take them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer, current_thread, main_thread
from typing import Any

from onward.core.errors import ClusterError
from onward.core.extras import require

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
Variables = Mapping[str, str | None]  # of the environment; None: absent

QUICK: Variables = {"RAY_timeout_ms_task_wait_for_death_info": "50"}  # a loss is told after 0.5 s, not 1.5 s
HERE: Variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray listens on every interface
ALONE: Variables = {
    **QUICK,
    **HERE,
    "RAY_ADDRESS": None,
    "RAY_worker_niceness": "0",  # else 15: on a busy machine servers and trainers would starve
    "RAY_kill_worker_timeout_milliseconds": "100",  # until a process that does not react is killed; else 5 s
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of what it may do one day
}
JOINED: Variables = {
    **QUICK,
    "RAY_gcs_server_port_wait_time_s": "3",  # until a wrong token is an error; else 20 s
}
TOUCHED = ("PYTHONBREAKPOINT", "RAY_USAGE_STATS_ENABLED")  # Ray sets these
WATCH = """
read -r closed ||
    find /proc/[0-9]*/fd -lname "$0/*" 2>/dev/null | cut -d/ -f3 | sort -u | xargs -r kill -9
rm -rf "$0"
"""
NEWS = r"A worker died or was killed"  # Ray tells it to people; here it becomes Unreachable

CLIENT = (
    "The address is {address!r}, one of a Ray client, through which arrays pass a hundred times slower. Run "
    "this on a machine of the cluster, and give its address as host:port"
)
NOBODY = (
    "Nobody listens at {address}: {error}. Expected the first machine of a Ray cluster, as host:port. Start "
    "one there (ray start --head --port 6379), or leave out the address: then Ray runs on this machine alone"
)
NO_TOKEN = (
    "There is no token for Ray in {path}: {error}. Expected the file that the cluster was started with: what "
    "RAY_AUTH_TOKEN_PATH names on its first machine, or ~/.ray/auth_token. Write Engine(address, token=path)"
)
REFUSED = (
    "The Ray cluster at {address} refuses {told}. Expected the token that the cluster was started with: what "
    "RAY_AUTH_TOKEN_PATH names on its first machine, or ~/.ray/auth_token. Write Engine(address, token=path)"
)
NO_JOIN = (
    "The Ray cluster at {address} cannot be joined: {error}. Expected a cluster of the same versions of Ray "
    "and Python that this machine belongs to; to make it one: ray start --address {address}"
)
NO_START = "Ray does not start on this machine: {error}. {advice}"
LATE = "Its processes were too slow: {why}. Start again when the machine has less to do"
FULL = "There are {free} MiB free in {folder}, and Ray needs {needed}: make room there"
OTHER = "Expected a machine on which it may open ports on loopback, and start processes"
SLOW = "Ray has been starting for {seconds:.0f} s: its processes have yet to answer{why}."
BUSY = "{load:.0f} processes want the {count} processors of this machine"
ROOM = {"/tmp": 100, "/dev/shm": 100}  # MiB without which Ray does not start
PATIENCE = 10.0  # seconds after which a start that is not done says so


@dataclass(frozen=True)
class RayStart:
    """Where Ray should run, and how; see ``Engine``."""

    address: str | None
    token: str | os.PathLike[str] | None
    memory: int | None
    prints: bool

    def enter(self, ray: Any, stack: ExitStack) -> Path | None:
        """Start or join Ray; the stack undoes it.

        Returns:
            a private folder that vanishes with Ray; None where it was joined.

        Raises:
            ClusterError: it cannot be started or joined.
        """
        if self.address is None:
            return self._start(ray, stack)
        self._join(ray, stack)
        return None

    def _start(self, ray: Any, stack: ExitStack) -> Path:
        folder = Path(stack.enter_context(_folder()))
        with _configured({**ALONE, **_with_token(_write_token(folder))}, stack):
            self._init(
                ray,
                stack,
                address="local",
                include_dashboard=False,
                object_store_memory=self.memory,
                _temp_dir=str(folder / "ray"),  # Ray opens it to everybody, so what is around it is private
            )
        return folder

    def _join(self, ray: Any, stack: ExitStack) -> None:
        address = str(self.address)
        changes = {**JOINED, **(HERE if _knock(address) in LOOPBACK else {})}
        if self.token is not None:
            changes |= _with_token(_check_token(Path(self.token)))
        with _configured(changes, stack):
            self._init(ray, stack, address=address)

    def _init(self, ray: Any, stack: ExitStack, **how: Any) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        stack.callback(_handle_sigterm, handler)
        stack.callback(ray.shutdown)
        job = ray.job_config.JobConfig(_py_driver_sys_path=_own_code())
        quiet = {"log_to_driver": self.prints, "logging_level": "ERROR", "job_config": job}
        try:
            with warnings.catch_warnings():  # JAX warns of the fork in which Ray begins; it ends in an exec
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                with _patient():
                    ray.init(**how, **quiet)
        except Exception as error:
            raise ClusterError(_why(self.address, self.token, error)) from error
        _handle_sigterm(_leave if handler is signal.SIG_DFL else handler)
        require("ray._private.ray_logging", "cluster").stdout_deduplicator.skip_re = re.compile(NEWS)


def _knock(address: str) -> str:
    """The host of an address where somebody listens."""
    if "://" in address:
        raise ClusterError(CLIENT.format(address=address))
    host, _, port = address.rpartition(":")
    if not port.isdigit():  # "auto"
        return address
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(NOBODY.format(address=address, error=error)) from error
    return host


def _why(address: str | None, token: Any, error: Exception) -> str:
    """Why there is no Ray, as a sentence."""
    if address is None:
        return NO_START.format(error=error, advice=_advice(error))
    if "Unauthenticated" in repr(error.__cause__) or "AuthToken" in f"{error} {error.__cause__}":
        told = "what the environment says" if token is None else f"the token in {token}"
        return REFUSED.format(address=address, told=told)
    return NO_JOIN.format(address=address, error=error)


def _advice(error: Exception) -> str:
    """Advice on a start that failed, by the cause that is found."""
    for folder, needed in ROOM.items():
        with suppress(OSError):
            if (free := shutil.disk_usage(folder).free >> 20) < needed:
                return FULL.format(folder=folder, free=free, needed=needed)
    if "timed out" in str(error) or "timeout" in str(error).lower():
        return LATE.format(why=busy() or "they did not answer in time")
    return OTHER


def busy() -> str:
    """A sentence on the load if more processes want to run here than can; else an empty string."""
    load, count = getattr(os, "getloadavg", lambda: (0.0,))()[0], os.cpu_count() or 1
    return BUSY.format(load=load, count=count) if load > 1.5 * count else ""


@contextmanager
def _patient() -> Iterator[None]:
    """Say so on stderr where the block takes long."""

    def tell() -> None:
        why = f"; {busy()}" if busy() else ""
        print(SLOW.format(seconds=PATIENCE, why=why), file=sys.stderr, flush=True)

    timer = Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _own_code() -> list[str]:
    """The folders of modules here that are not installed; Ray tells others only of the script's folder.

    The last one comes first: each is put before those that are there.
    """
    installed = (sys.prefix, sys.base_prefix)
    return [path for path in reversed(sys.path) if path and not path.startswith(installed)]


def _write_token(folder: Path) -> Path:
    path = folder / "token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _check_token(path: Path) -> Path:
    try:
        found = path.read_text().strip()
    except OSError as error:
        raise ClusterError(NO_TOKEN.format(path=path, error=error)) from error
    if not found:
        raise ClusterError(NO_TOKEN.format(path=path, error="it is empty"))
    return path


def _with_token(path: Path) -> dict[str, str | None]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_TOKEN": None}


@contextmanager
def _configured(changes: Variables, stack: ExitStack) -> Iterator[None]:
    """Environment variables as they are to be in the block (None: absent), and for Ray until the end."""
    stack.callback(_read_environment)
    before = {name: os.environ.get(name) for name in (*changes, *TOUCHED)}
    try:
        _set(changes)
        _read_environment()
        yield
    finally:
        _set(before)


def _read_environment() -> None:
    """Ray does so when it is imported, which may have been long ago."""
    raylet, constants = require("ray._raylet", "cluster"), require("ray._private.ray_constants", "cluster")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    several = constants.env_bool(constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not constants.IS_WINDOWS_OR_OSX)
    constants.ENABLE_RAY_CLUSTER = several


def _set(variables: Variables) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _folder() -> Iterator[str]:
    """A private folder for Ray, and a shell that clears up behind it, even when this process is killed.

    Ray's own agents survive that for a minute; they are known by the files of the folder that they have open.
    """
    posix = os.name == "posix"
    folder = tempfile.mkdtemp(prefix="onward-", dir="/tmp" if posix else None)  # sockets have short names
    command = ["sh", "-c", WATCH, folder] if posix else [sys.executable, "-c", "input()"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=quiet, start_new_session=True) as watch:
        yield folder
        watch.communicate(b"closed\n")
    shutil.rmtree(folder, ignore_errors=True)


def _handle_sigterm(handler: Any) -> None:
    """Ray replaces the handler, and prints its own stack where one expects nothing."""
    if handler is not None and current_thread() is main_thread():
        signal.signal(signal.SIGTERM, handler)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)
