"""The socket, the signals, the end: what touches the operating system, and nothing else.

At SIGTERM or SIGINT the socket is closed, every request that was accepted is answered, clients that keep a
connection are told by their next answer that it ends, and the process goes on behind ``serve``.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from ipaddress import ip_address
from threading import Event, Thread, current_thread, main_thread
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from onward.core.errors import ServeError
from onward.core.extras import require

LOG = logging.getLogger("onward.serve")
_LEAVING = 0.25  # seconds in which clients that keep a connection are told that it ends
_QUIET = 5.0  # seconds for which a connection may be kept without a request


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, for port 0 at any port that is free.

    Raises:
        ServeError: the port is taken or may not be used, or there is no such host.
    """
    if not 0 <= port < 2**16:
        raise ServeError(f"There is no port {port}; expected a number from 0, any free one, to 65535.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ServeError(
            f"{host!r} is not an address of this machine ({error}); write host='127.0.0.1'."
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServeError(_not_bound(host, port, error)) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The address of a socket as a browser takes it."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_local(listener: socket.socket) -> bool:
    """Whether nobody but this machine reaches a socket."""
    return ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def is_known_host(host: str, names: Collection[str]) -> bool:
    """Whether a ``Host`` header is one of these names, or means this machine.

    A page that a browser shows may lead its own name to 127.0.0.1 and ask what listens there (DNS
    rebinding); the header then holds that name.

    >>> [is_known_host(host, ["mine"]) for host in ("localhost:80", "[::1]:8", "Mine", "evil.com")]
    [True, True, True, False]
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        known = {"localhost", *(n.lower() for n in names)}
        return "*" in names or name in known or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False


def serve(
    application: Any, listener: socket.socket, bound_to_end: float, on_hangup: Callable[[], None]
) -> None:
    """Answer at a socket until SIGTERM or SIGINT.

    Args:
        application: an Endpoint.
        listener: what ``bound`` gave.
        bound_to_end: seconds that requests which were accepted may take once the end is asked for.
        on_hangup: called, in a thread of its own, at SIGHUP.
    """
    server = _server(application, bound_to_end)
    with _signals(on_hangup):
        server.run(sockets=[listener])


@contextmanager
def served_aside(application: Any, listener: socket.socket, bound_to_end: float) -> Iterator[None]:
    """Answer at a socket, from a thread of its own, while the block runs."""
    server, ended = _server(application, bound_to_end), Event()

    def work() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            ended.set()

    thread = Thread(target=work, name="onward-server", daemon=True)
    thread.start()
    while not server.started and not ended.wait(0.01):
        pass
    try:
        if not server.started:
            raise ServeError("The server ended before it began to answer; the log of uvicorn says why.")
        yield
    finally:
        server.should_exit = True
        thread.join()


def _server(application: Any, bound_to_end: float) -> Any:
    uvicorn = require("uvicorn", "serve")
    config = uvicorn.Config(
        application,
        http=_half_closing(),
        lifespan="on",
        log_config=None,  # uvicorn's own would close every handler of this process
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=_QUIET,
        timeout_graceful_shutdown=max(1, round(bound_to_end)),
        timeout_notify=1,
    )
    server = uvicorn.Server(config)
    config.callback_notify = _Silent(server, application.timeout).close
    server.shutdown = partial(_leave, application, server, server.shutdown)
    return server


def _half_closing() -> Any:
    """The protocol of uvicorn, in which a client that has sent its request may close its half."""
    protocol: Any = require("uvicorn.protocols.http.auto", "serve").AutoHTTPProtocol

    class HalfClosing(protocol):  # type: ignore[misc]
        def eof_received(self) -> bool:
            """Keep the connection for the answer if the request came whole."""
            cycle = self.cycle
            whole = cycle is not None and not cycle.response_complete and not cycle.more_body
            if whole:
                cycle.keep_alive = False
            return whole

    return HalfClosing


class _Silent:
    """Closes connections on which a request has begun, or none ever came, and whose head does not get whole.

    uvicorn bounds how long a connection is kept between requests, the application how long a body may take;
    this is for what lies between.
    """

    def __init__(self, server: Any, seconds: float) -> None:
        self._server, self._seconds = server, seconds
        self._since: dict[Any, tuple[Any, float]] = {}

    async def close(self) -> None:
        """Look at all connections; called about once a second."""
        now, before = monotonic(), self._since
        self._since = {}
        for connection in list(self._server.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                continue
            last, since = before.get(connection, (cycle, now))
            since = since if last is cycle else now
            self._since[connection] = cycle, since
            if now - since > self._seconds:
                connection.transport.close()


async def _leave(application: Any, server: Any, shutdown: Any, sockets: Any = None) -> None:
    """End as uvicorn does, after clients that keep a connection had a moment to be told."""
    application.draining = True
    for listening in server.servers:
        listening.close()
    await asyncio.sleep(_LEAVING)
    await shutdown(sockets=sockets)


@contextmanager
def _signals(on_hangup: Callable[[], None]) -> Iterator[None]:
    """While the block runs, the signals that end a server do only that, and SIGHUP reloads.

    uvicorn raises the signal that ended it once more when it is done, so that the process would die of it.
    """
    if current_thread() is not main_thread():
        yield
        return
    with ExitStack() as stack:
        hangup = [] if sys.platform == "win32" else [signal.SIGHUP]
        for number in (signal.SIGTERM, signal.SIGINT, *hangup):
            stack.callback(signal.signal, number, signal.getsignal(number))
            signal.signal(number, _aside(on_hangup) if number in hangup else _nothing)
        yield


def _aside(function: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: Thread(target=function, name="onward-reload", daemon=True).start()


def _nothing(*_: Any) -> None:
    """Take note of a signal."""


def _not_bound(host: str, port: int, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"Port {port} needs more rights than this process has; take one from 1024 on, or 0."
    if "in use" in str(error).lower():
        return f"Port {port} of {host} is taken by another server. Take another port; 0 for any free one."
    return f"No server can listen at {host}:{port}: {error}."
