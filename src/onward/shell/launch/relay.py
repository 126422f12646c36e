"""A door to the coordinator of ``jax.distributed`` that stays open when the coordinator dies.

The coordinator lives in process 0. When the connection to it breaks, JAX aborts a process within
milliseconds, before Python can say what happened. Here each process connects to the launcher, which passes
everything on; when the coordinator is gone its door stays open and silent, and the others end by an error of
their own.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Thread

_PIECE = 1 << 16  # bytes
_RETRY = 0.05  # seconds


class Relay:
    """Passes connections to ``address`` on to ``target``, until it is closed.

    Attributes:
        address: where to connect, "127.0.0.1:PORT".
        target: where connections are passed on to, a free port at first.

    Example:
        >>> with Relay() as relay, socket.create_server(_pair(relay.target)) as server:
        ...     client = socket.create_connection(_pair(relay.address))
        ...     served, _ = server.accept()
        ...     client.sendall(b"question")
        ...     print(served.recv(100))
        ...     served.sendall(b"answer")
        ...     print(client.recv(100))
        ...     served.close()
        ...     client.close()
        b'question'
        b'answer'
    """

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = _name(self._server)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.target = _name(free)
        self._open = True
        self._connections: list[socket.socket] = []
        Thread(target=self._accept, name="onward-relay", daemon=True).start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the door, and all connections."""
        self._open = False
        for connection in (self._server, *self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while self._open:
                client, _ = self._server.accept()
                self._connections.append(client)
                Thread(target=self._serve, args=(client,), name="onward-relay", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Pass on what one client sends, and in another thread what it is answered."""
        target = self._reach()
        if target is None:
            return
        self._connections.append(target)
        for connection in (client, target):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Thread(target=_pass_on, args=(target, client), name="onward-relay", daemon=True).start()
        _pass_on(client, target)
        with suppress(OSError):  # the client has gone; the coordinator may know
            target.shutdown(socket.SHUT_RDWR)

    def _reach(self) -> socket.socket | None:
        """A connection to the target, which may not be up yet; None if the relay is closed first."""
        while self._open:
            try:
                return socket.create_connection(_pair(self.target))
            except OSError:
                time.sleep(_RETRY)
        return None


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Send on until the source ends; when the sink is gone, read on and forget."""
    with suppress(OSError):
        while piece := source.recv(_PIECE):
            with suppress(OSError):
                sink.sendall(piece)


def _name(server: socket.socket) -> str:
    host, port = server.getsockname()
    return f"{host}:{port}"


def _pair(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)
