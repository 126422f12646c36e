"""Processes that host an object each, and calls of its methods: with ``ray_start`` all that touches Ray.

What trainers and servers say to each other is decided elsewhere; here it is only carried. An ``Engine``
starts processes, a ``Link`` reaches the object in one of them, a ``Pending`` is a call that is under way::

    with Engine() as engine:                                # Ray on this machine, on loopback only
        link = engine.spawn(Counter, 5, name="counter")     # Counter(5), in a process of its own
        link.call("add", 3).result(timeout=10.0)            # 8
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self, cast

from onward.core.errors import ArgumentError, ClusterError
from onward.core.extras import require
from onward.core.structure import describe
from onward.fleet.host import Host
from onward.fleet.link import HostAddress, Link, Unreachable
from onward.fleet.ray_start import RayStart, busy

THREADS = 64  # calls that one hosted object serves at a time
COLOUR = re.compile(r"\x1b\[\d+m")


GONE = "{name} cannot be reached: its process or its machine died, or starts again ({found})"
CLOSED = "{name} cannot be reached: the Engine that started it is closed"
NO_PROCESS = "Ray has yet to start its process"
NO_OBJECT = "pid {pid} on {host} imports JAX and makes its graph"
LATE = "{name} has not answered in time"
RAISED = "raised in {name}:\n{traceback}"
BROKEN = "{name} cannot go on: {found}"
UNSENT = (
    "What {name} is made of cannot be sent to another process: {found}. Expected functions and objects "
    "without open files, locks, connections and generators: open them where they are used"
)
NO_ROOM = (
    "{name} asks for {asked}, and no machine of the cluster has that: all together have {found}. Ask for "
    "less, or add a machine"
)
SLOW = (
    "{name} is not there after {timeout:g} s. Either no machine has room for it now (free are {found}), or "
    "its start takes longer: give it more time, or ask for less"
)


class _Home:
    """Ray in this process, for all Engines that use it: the first one starts it, the last one ends it.

    Ray that somebody else started is left running.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._lock = Lock()
        self._guests = 0
        self._stack = ExitStack()

    @contextmanager
    def used(self, start: RayStart) -> Iterator[None]:
        """Ray, from now until the end of the block."""
        ray = require("ray", "cluster")
        with self._lock:
            if not self._guests and not ray.is_initialized():
                with ExitStack() as stack:
                    self.folder = start.enter(ray, stack)
                    self._stack = stack.pop_all()
            self._guests += 1
        try:
            yield
        finally:
            with self._lock:
                self._guests -= 1
                if not self._guests:
                    self.folder = None
                    self._stack.close()


_home = _Home()


class Engine:
    """Hosts objects in processes, on this machine or on those of a Ray cluster; a context manager.

    Ray that already runs in this process is used as it is, and left running. Several Engines share one Ray,
    which ends with the last of them.

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
        self.start = RayStart(address, token, memory, prints)
        self._links: list[_RayLink] = []
        self._kept: list[Any] = []
        self._stack = ExitStack()
        self._door = _Door()

    def __enter__(self) -> Self:
        self._door = _Door()
        with ExitStack() as stack:
            stack.enter_context(_home.used(self.start))
            stack.callback(self._end_all)
            self._stack = stack.pop_all()
        return self

    @property
    def machines(self) -> int:
        """How many machines Ray has."""
        return sum(node["Alive"] for node in require("ray", "cluster").nodes())

    @property
    def folder(self) -> Path | None:
        """A private folder that vanishes with Ray; None where Ray was not started here."""
        return _home.folder

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
            ArgumentError: an argument that cannot be sent, or an option that Ray does not know.
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
        try:
            made = ray.put((factory, arguments))  # kept: Ray forgets large arguments of a restarted actor
            actor = ray.remote(Host).options(**chosen).remote(name, ray.cloudpickle.dumps(made))
        except TypeError as error:
            found = next(filter(None, (_culprit("argument", x) for x in arguments)), str(error))
            raise ArgumentError(UNSENT.format(name=name, found=found)) from error
        except ValueError as error:
            raise ArgumentError(f"{name}: {error}") from error
        link = _RayLink(name, actor, self._door)
        self._links.append(link)
        self._kept.append(made)
        return link

    def place(self, link: Link, timeout: float = 60.0) -> HostAddress:
        """The address of the object, once it is there.

        Raises:
            ClusterError: it is not there in time.
            Unreachable: its process died.
            Exception: what its factory raised.
        """
        own = cast("_RayLink", link)
        try:
            return cast("HostAddress", _RayPending(own.name, own.actor.place.remote()).result(timeout))
        except TimeoutError as error:
            free = _text(require("ray", "cluster").available_resources())
            raise ClusterError(SLOW.format(name=own.name, timeout=timeout, found=free)) from error

    def awaited(self, link: Link) -> str:
        """Describe what the start of an object waits for, as far as is known here."""
        own = cast("_RayLink", link)
        try:
            place: HostAddress = _RayPending(own.name, own.actor.process.remote()).result(1.0)
            found = NO_OBJECT.format(pid=place.pid, host=place.host)
        except (TimeoutError, Unreachable):
            found = NO_PROCESS
        return f"{found}; {busy()}" if busy() else found

    def kill(self, link: Link, restart: bool = False) -> None:
        """End the process of the object whether it reacts or not; start it again only if asked to."""
        require("ray", "cluster").kill(cast("_RayLink", link).actor, no_restart=not restart)

    def _end_all(self) -> None:
        self._door.is_open = False
        ray = require("ray", "cluster")
        for link in self._links:
            with suppress(Exception):  # a cluster that is gone has ended them
                ray.kill(link.actor)


@dataclass
class _Door:
    """Whether the Engine that started a process is still open; its kill may land later than a call."""

    is_open: bool = True


@dataclass(frozen=True, eq=False)
class _RayLink:
    name: str
    actor: Any
    door: _Door

    def call(self, method: str, *arguments: Any) -> _RayPending:
        if not self.door.is_open or not require("ray", "cluster").is_initialized():  # or Ray starts itself
            raise Unreachable(CLOSED.format(name=self.name))
        asked = method, arguments  # one argument: Ray takes its time for each
        return _RayPending(self.name, self.actor.call.remote(asked))


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


def _translated(error: Any, name: str) -> Exception:
    """The exception to raise for one of Ray's, with a message in Onward's terms."""
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
    """The exception that the method raised, with its remote traceback as a note."""
    ray = require("ray", "cluster")
    cause = error.cause
    if isinstance(cause, ray.exceptions.RayError):
        return _translated(cause, name)
    cause.add_note(RAISED.format(name=name, traceback=COLOUR.sub("", str(error))))
    return cast("Exception", cause)


def _culprit(name: str, value: Any) -> str:
    """The innermost part of a value that cannot be pickled, and why; nothing, if all of it can be."""
    try:
        require("ray.cloudpickle", "cluster").dumps(value)
    except Exception as error:
        parts = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {}
        inner = (found for n, part in parts.items() if (found := _culprit(n, part)))
        what = getattr(value, "__qualname__", None) or describe(value)
        return next(inner, f"{name} ({what}): {error}")
    return ""


def _check_room(name: str, options: Mapping[str, Any], ray: Any) -> None:
    """Ray would wait forever for a machine that has more than any has."""
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
    """Format the resources that a user may ask for, leaving out those that only Ray uses."""
    told = {k: f"{v / 2**30:.1f} GiB" if k == "memory" else f"{v:g}" for k, v in sorted(resources.items())}
    hidden = ("node:", "object_store_memory")
    return ", ".join(f"{k} {v}" for k, v in told.items() if not k.startswith(hidden)) or "nothing"
