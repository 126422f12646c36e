"""Endpoint: a Model answers over HTTP, the requests of many clients computed together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from socket import socket
from typing import Any

from onward.core.errors import ArgumentError, OnwardError
from onward.serve.endpoint.routes import Routes
from onward.serve.endpoint.server import bound, is_local, serve, served_aside, url_of
from onward.serve.endpoint.service import ModelService
from onward.serve.endpoint.watch import FileWatch

LOG = logging.getLogger("onward.serve")


class Endpoint(ModelService):
    """An ASGI application that answers what a Model computes; any ASGI server runs it, ``run`` brings one.

    Requests that come while others are computed are joined into one batch, where a trial on made-up numbers
    has found no example whose answer depends on its neighbours. A trial proves nothing: a network that looks
    at the other examples for rare values alone passes it, and ``join=False`` is for such. All share the
    parameters of the model, which are read when a batch is computed: what a Trainer publishes meanwhile is
    answered from then on.

    Args:
        model: a Model, or the path of a file that ``ow.save`` wrote.
        outputs: names of Variables to answer; without them what the network returns for each example.
        name: what the endpoint is called; the network's name unless given.
        max_batch: examples that are computed at once, and that one request may hold.
        join: whether requests may be computed together; if not, each is computed by itself.
        latency: seconds for which a request waits for others at most. It waits only where others were there
            lately: a client that is alone never does.
        timeout: seconds that a body may take to come, and an answer to be computed.
        max_body: bytes that a request may have, a whole number or such as ``"16MiB"``.
        max_memory: bytes that the bodies of all requests in flight, and what they are read into, may take
            together; further ones are refused, to be asked again later. A body of JSON takes up to 10 times
            its size while it is read (its first 256 KiB 32 times), npy and npz 4 times.
        max_waiting: requests that may wait; further ones are refused at once, to be asked again later.
        reload_token: who knows it may exchange the model by ``POST /reload``; nobody without it.
        hosts: names under which it may be asked where it listens at this machine alone, beside ``localhost``:
            that of a proxy before it, ``"*"`` for any. Others are refused, as a page in a browser may send
            them.
        allow_nonfinite: serve a model whose parameters hold NaN or infinity.

    Raises:
        NonFiniteError, ModelFileError: parameters that are not numbers, of a Model and in a file.
        ArgumentError: nothing that could be served is returned or named; the message lists layers.
        UnknownNameError: no Variable has the name of an output.
        MissingExtraError: starlette is not installed.

    Example:
        >>> import json, urllib.request
        >>> import onward as ow
        >>> def network():
        ...     return ow.layer.fc(ow.data("x", (None, 4)), 2)
        >>> endpoint = Endpoint(ow.Model(network), max_batch=4)
        >>> with endpoint.running() as url:
        ...     body = json.dumps({"x": [[0, 0, 0, 0]]}).encode()
        ...     request = urllib.request.Request(url + "/predict", body, {"content-type": "application/json"})
        ...     print(urllib.request.urlopen(request).read().decode())
        {"outputs":{"fc_0":[[0.0,0.0]]}}
    """

    @cached_property
    def _application(self) -> Any:
        return Routes(self).application()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer as the ASGI protocol says."""
        await self._application(scope, receive, send)

    def run(self, host: str = "127.0.0.1", port: int = 8000, *, watch: bool = False) -> None:
        """Answer at an address until SIGTERM or Ctrl-C; every request that was accepted is answered first.

        At SIGHUP the model is read from its file again.

        Args:
            host: the address to listen at; ``"0.0.0.0"`` for all of this machine.
            port: 0 for any that is free; the one that was found is printed.
            watch: read the file again as well whenever it has changed.

        Raises:
            ServeError: the port is taken or may not be used.
            ArgumentError: there is no file to watch.
        """
        path = self.served.source.path
        if watch and path is None:
            raise ArgumentError("There is no file to watch: the endpoint was made from a Model, not a path.")
        with self._bound(host, port) as listener:
            self.warm_up()
            listener.listen(2048)  # who reads the address may connect at once
            print(f"{self.name} answers at {url_of(listener)}  ({self._manner()})", flush=True)
            looking = (
                FileWatch(path, self._reload_or_say, self.served.source.mark)
                if watch and path is not None
                else None
            )
            try:
                serve(self, listener, self.timeout + 5, self._reload_or_say)
            finally:
                if looking is not None:
                    looking.close()
        answered = self.counts.total("onward_requests_total")
        print(f"{self.name} has ended; {answered:,.0f} requests were answered", flush=True)

    @contextmanager
    def running(self, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
        """Answer from a thread while a block runs, which gets the address: for tests and notebooks.

        Raises:
            ServeError: the port is taken or may not be used.
        """
        with self._bound(host, port) as listener:
            self.warm_up()
            with served_aside(self, listener, self.timeout + 5):
                yield url_of(listener)

    def _bound(self, host: str, port: int) -> socket:
        """A socket; where it is reached from this machine alone, the names that it answers to are known."""
        listener = bound(host, port)
        self.names = (host, *self._hosts) if is_local(listener) else None
        return listener

    def _reload_or_say(self) -> None:
        """Reload; what goes wrong is said in the log and by ``/health``."""
        try:
            self.reload()
            LOG.warning("%s: the model was exchanged for version %s", self.name, self.served.source.version)
        except (OnwardError, OSError) as error:
            LOG.error("%s: the model was not exchanged: %s", self.name, error)
        except Exception:
            LOG.exception("%s: the model was not exchanged", self.name)

    def _manner(self) -> str:
        """How requests are computed, in words."""
        joining = self.served.ask().result().joining
        return (
            f"one request at a time: {joining.alone}" if joining.alone else f"batches of up to {joining.most}"
        )

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r}, version {self.served.source.version})"
