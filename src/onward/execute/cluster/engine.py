"""Processes that host an object each, and calls of its methods: the only file that touches Ray.

What trainers and servers say to each other is decided elsewhere; here it is only carried. An ``Engine``
starts processes, a ``Link`` reaches the object in one of them, a ``Pending`` is a call that is under way::

    with Engine() as engine:                                # Ray on this machine, on loopback only
        link = engine.spawn(Counter, 5, name="counter")     # Counter(5), in a process of its own
        link.call("add", 3).result(timeout=10.0)            # 8

Methods that are ``async def`` run on the one event loop of their process, so between two ``await`` nothing
else of the kind runs. Other methods run in a thread each: one that blocks holds up nobody.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any, ClassVar, NamedTuple, Protocol, Self, cast

from onward.core.errors import ClusterError
from onward.core.extras import require

THREADS = 64  # calls that one hosted object serves at a time
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
Variables = Mapping[str, str | None]  # of the environment; None: absent

QUICK: Variables = {"RAY_timeout_ms_task_wait_for_death_info": "50"}  # a loss is told after 0.5 s, not 1.5 s
HERE: Variables = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray listens on every interface
ALONE: Variables = {
    **QUICK,
    **HERE,
    "RAY_ADDRESS": None,
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
COLOUR = re.compile(r"\x1b\[\d+m")
NEWS = r"A worker died or was killed"  # Ray tells it to people; here it becomes Unreachable

GONE = "{name} cannot be reached: its process or its machine died, or starts again ({found})"
CLOSED = "{name} cannot be reached: the Engine that started it is closed"
LATE = "{name} has not answered in time"
RAISED = "raised in {name}:\n{traceback}"
BROKEN = "{name} cannot go on: {found}"
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
NO_START = "Ray does not start on this machine: {error}. Expected room in /tmp and /dev/shm, and free ports"
NO_ROOM = (
    "{name} asks for {asked}, and no machine of the cluster has that: all together have {found}. Ask for "
    "less, or add a machine"
)
SLOW = (
    "{name} is not there after {timeout:g} s. Either no machine has room for it now (free are {found}), or "
    "its start takes longer: give it more time, or ask for less"
)


class Unreachable(Exception):  # noqa: N818
    """The process is dead, restarting, or its node is gone; a call may or may not have been carried out."""


class Pending(Protocol):
    """A call that is under way."""

    def result(self, timeout: float | None = None) -> Any:
        """What the method returned.

        Raises:
            Unreachable: the process died before it could tell.
            TimeoutError: nothing came within ``timeout`` seconds.
            Exception: what the method raised there, as it was raised.
        """

    def done(self) -> bool:
        """Whether ``result`` would return, or raise, at once."""


class Link(Protocol):
    """The way to a hosted object; may be pickled and handed to another hosted object."""

    def call(self, method: str, *arguments: Any) -> Pending:
        """Call a method of the object; large arrays should be NumPy arrays, and arguments of their own."""


class Place(NamedTuple):
    """Where a hosted object lives."""

    pid: int
    host: str
    node: str


def is_reborn() -> bool:
    """Whether this process hosts an object that was lost with the process before, and made anew.

    >>> is_reborn()
    False
    """
    return _Host.reborn


class Engine:
    """Hosts objects in processes, on this machine or on those of a Ray cluster; a context manager.

    Ray that already runs in this process is used as it is, and left running.

    Args:
        address: ``host:port`` of a Ray cluster that this machine belongs to; None: start Ray here, reachable
            from this machine alone and only with a token that is made for it.
        token: the file with the token of that cluster; None: what the environment says.
        memory: bytes for arrays on their way; None: what Ray thinks right, 30 % of the memory.
        prints: whether what hosted objects print is printed here too.

    Raises:
        MissingExtraError: on entry; Ray is not installed.
        ClusterError: on entry; Ray cannot be started or joined.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | os.PathLike[str] | None = None,
        *,
        memory: int | None = None,
        prints: bool = True,
    ) -> None:
        self.address, self.token, self.memory, self.prints = address, token, memory, prints
        self._links: list[_RayLink] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        ray = require("ray", "cluster")
        with ExitStack() as stack:
            if not ray.is_initialized():
                (self._start if self.address is None else self._join)(ray, stack)
            stack.callback(self._end_all)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def spawn(
        self,
        factory: Callable[..., Any],
        *arguments: Any,
        name: str,
        restart: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Link:
        """Host ``factory(*arguments)`` in a new process; what the factory raises, every call raises.

        Args:
            factory: is called there, and again whenever the process was lost and is started again.
            arguments: of the factory.
            name: what people call it.
            restart: whether the process is started again when it is lost.
            options: of the Ray actor, such as ``{"num_gpus": 1}``.

        Returns:
            the way to it, at once; ``place`` waits for it.

        Raises:
            ClusterError: no machine has what the options ask for.
        """
        ray = require("ray", "cluster")
        chosen = {
            "num_cpus": 0,
            "max_concurrency": THREADS,
            "max_restarts": -1 if restart else 0,
            "max_task_retries": 0,
            "scheduling_strategy": "SPREAD",
            **(options or {}),
        }
        _check_room(name, chosen, ray)
        link = _RayLink(name, ray.remote(_Host).options(**chosen).remote(name, factory, *arguments))
        self._links.append(link)
        return link

    def place(self, link: Link, timeout: float = 60.0) -> Place:
        """Where the object lives, once it is there.

        Raises:
            ClusterError: it is not there in time.
            Unreachable: its process died.
            Exception: what its factory raised.
        """
        own = cast("_RayLink", link)
        try:
            return cast("Place", _RayPending(own.name, own.actor.place.remote()).result(timeout))
        except TimeoutError as error:
            free = _text(require("ray", "cluster").available_resources())
            raise ClusterError(SLOW.format(name=own.name, timeout=timeout, found=free)) from error

    def kill(self, link: Link, restart: bool = False) -> None:
        """End the process of the object whether it reacts or not; start it again only if asked to."""
        require("ray", "cluster").kill(cast("_RayLink", link).actor, no_restart=not restart)

    def _start(self, ray: Any, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(_folder()))
        _configure({**ALONE, **_with_token(_write_token(folder))}, stack)
        self._init(
            ray,
            stack,
            address="local",
            include_dashboard=False,
            object_store_memory=self.memory,
            _temp_dir=str(folder / "ray"),  # Ray opens it to everybody, so what is around it is private
        )

    def _join(self, ray: Any, stack: ExitStack) -> None:
        address = str(self.address)
        changes = {**JOINED, **(HERE if _knock(address) in LOOPBACK else {})}
        if self.token is not None:
            changes |= _with_token(_check_token(Path(self.token)))
        _configure(changes, stack)
        self._init(ray, stack, address=address)

    def _init(self, ray: Any, stack: ExitStack, **how: Any) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        stack.callback(_handle_sigterm, handler)
        stack.callback(ray.shutdown)
        job = ray.job_config.JobConfig(_py_driver_sys_path=_own_code())
        quiet = {"log_to_driver": self.prints, "logging_level": "ERROR", "job_config": job}
        try:
            ray.init(**how, **quiet)
        except Exception as error:
            raise ClusterError(_why(self.address, self.token, error)) from error
        _handle_sigterm(_leave if handler is signal.SIG_DFL else handler)
        require("ray._private.ray_logging", "cluster").stdout_deduplicator.skip_re = re.compile(NEWS)

    def _end_all(self) -> None:
        ray = require("ray", "cluster")
        for link in self._links:
            with suppress(Exception):  # a cluster that is gone has ended them
                ray.kill(link.actor)


@dataclass(frozen=True, eq=False)
class _RayLink:
    name: str
    actor: Any

    def call(self, method: str, *arguments: Any) -> _RayPending:
        if not require("ray", "cluster").is_initialized():  # or Ray would start itself
            raise Unreachable(CLOSED.format(name=self.name))
        return _RayPending(self.name, self.actor.call.remote(method, *arguments))


@dataclass(frozen=True, eq=False)
class _RayPending:
    name: str
    ref: Any

    def result(self, timeout: float | None = None) -> Any:
        ray = require("ray", "cluster")
        if not ray.is_initialized():
            raise Unreachable(CLOSED.format(name=self.name))
        try:
            return ray.get(self.ref, timeout=timeout)
        except ray.exceptions.RayError as error:
            raise _translated(error, self.name) from None

    def done(self) -> bool:
        ray = require("ray", "cluster")
        return not ray.is_initialized() or bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])


class _Host:
    """What runs in the process of an object."""

    reborn: ClassVar[bool] = False
    _name = "a hosted object"  # until its factory has arrived

    def __init__(self, name: str, factory: Callable[..., Any], *arguments: Any) -> None:
        self._name, self._error = name, None
        _Host.reborn = _was_restarted()
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="onward-methods", daemon=True).start()
        try:
            self._hosted = factory(*arguments)
        except Exception as error:  # Ray would tell it as a text
            self._error = error

    def __repr__(self) -> str:
        return self._name

    def call(self, method: str, *arguments: Any) -> Any:
        if self._error is not None:
            raise self._error
        found = getattr(self._hosted, method)(*arguments)
        if inspect.iscoroutine(found):
            return asyncio.run_coroutine_threadsafe(found, self._loop).result()
        return found

    def place(self) -> Place:
        if self._error is not None:
            raise self._error
        node = require("ray", "cluster").get_runtime_context().get_node_id()
        return Place(os.getpid(), socket.gethostname(), node)


def _was_restarted() -> bool:
    with warnings.catch_warnings():  # what Ray calls here it calls deprecated itself
        warnings.simplefilter("ignore")
        return bool(require("ray", "cluster").get_runtime_context().was_current_actor_reconstructed)


def _translated(error: Any, name: str) -> Exception:
    """What Ray says, in our words."""
    kinds = require("ray", "cluster").exceptions
    lost = kinds.RayActorError, kinds.ObjectLostError, kinds.NodeDiedError, kinds.LocalRayletDiedError
    said = textwrap.shorten(str(error), 600)
    if isinstance(error, kinds.RayTaskError):
        return _raised_there(error, name)
    if isinstance(error, TimeoutError):
        return TimeoutError(LATE.format(name=name))
    if isinstance(error, lost) and not getattr(error, "actor_init_failed", False):
        return Unreachable(GONE.format(name=name, kind=type(error).__name__, found=said))
    lines = str(error).strip().splitlines()
    return ClusterError(BROKEN.format(name=name, found="; ".join(dict.fromkeys((lines[0], lines[-1])))))


def _raised_there(error: Any, name: str) -> Exception:
    """What the method raised, with the lines where it did as a note."""
    ray = require("ray", "cluster")
    cause = error.cause
    if isinstance(cause, ray.exceptions.RayError):
        return _translated(cause, name)
    cause.add_note(RAISED.format(name=name, traceback=COLOUR.sub("", str(error))))
    return cast("Exception", cause)


def _check_room(name: str, options: Mapping[str, Any], ray: Any) -> None:
    """Ray would wait for ever for a machine that has more than any has."""
    units = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    asked = {units[k]: v for k, v in options.items() if k in units and v} | dict(
        options.get("resources") or {}
    )
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(machine.get(k, 0) >= v for k, v in asked.items()) for machine in machines):
        raise ClusterError(
            NO_ROOM.format(name=name, asked=_text(asked), found=_text(ray.cluster_resources()))
        )


def _text(resources: Mapping[str, float]) -> str:
    """What a person may ask for."""
    told = {k: f"{v / 2**30:.1f} GiB" if k == "memory" else f"{v:g}" for k, v in sorted(resources.items())}
    hidden = ("node:", "object_store_memory")
    return ", ".join(f"{k} {v}" for k, v in told.items() if not k.startswith(hidden)) or "nothing"


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
        return NO_START.format(error=error)
    if "Unauthenticated" in repr(error.__cause__) or "AuthToken" in f"{error} {error.__cause__}":
        told = "what the environment says" if token is None else f"the token in {token}"
        return REFUSED.format(address=address, told=told)
    return NO_JOIN.format(address=address, error=error)


def _own_code() -> list[str]:
    """Where modules are found here that are not installed; Ray tells others only of the script's folder."""
    installed = (sys.prefix, sys.base_prefix)
    return [path for path in sys.path if path and not path.startswith(installed)]


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


def _configure(changes: Variables, stack: ExitStack) -> None:
    """Environment variables as they are to be, until the end; None: absent."""
    stack.callback(_read_environment)
    stack.callback(_set, {name: os.environ.get(name) for name in (*changes, *TOUCHED)})
    _set(changes)
    _read_environment()


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
