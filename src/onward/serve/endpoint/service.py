"""A Model that is ready to answer, as the routes of an endpoint ask it."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any

from onward.core.amounts import bytes_of
from onward.core.errors import ArgumentError
from onward.core.extras import require
from onward.core.structure import describe, expect_count, is_number
from onward.serve.endpoint.batcher import Batcher
from onward.serve.endpoint.metrics import Counters
from onward.serve.endpoint.room import Room
from onward.serve.endpoint.served import Served
from onward.serve.endpoint.source import Source, opened


class ModelService:
    """A served Model with its limits and counts: the part of an ``Endpoint`` that knows nothing of HTTP."""

    def __init__(
        self,
        model: Source,
        *,
        outputs: Iterable[str] = (),
        name: str | None = None,
        max_batch: int = 32,
        join: bool = True,
        latency: float = 0.002,
        timeout: float = 30.0,
        max_body: int | str = 16 * 2**20,
        max_memory: int | str = 2**30,
        max_waiting: int = 1024,
        reload_token: str | None = None,
        hosts: Iterable[str] = (),
        allow_nonfinite: bool = False,
    ) -> None:
        expect_count(max_batch, "max_batch")
        expect_count(max_waiting, "max_waiting")
        _expect_seconds(timeout, latency)
        require("starlette.applications", "serve")
        self._outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        self.max_batch, self.timeout, self.max_body = max_batch, timeout, bytes_of(max_body, "max_body")
        self.join, self.reload_token = join, reload_token
        self.room = Room(bytes_of(max_memory, "max_memory"))
        self._hosts = (hosts,) if isinstance(hosts, str) else tuple(hosts)
        self.names: tuple[str, ...] | None = None
        self._allow_nonfinite = allow_nonfinite
        self.draining = False
        self.counts = Counters()
        self.batcher = Batcher(latency, max_waiting, self.counts)
        self._reloading = Lock()
        self._reload_error: str | None = None
        self.served = self._made(model)
        self.name = name or self.served.source.model.topology.name

    def warm_up(self) -> None:
        """Compile what is asked for by default, and find whether requests may be joined.

        Raises:
            OnwardError: the model takes no batch.
        """
        self.draining = False
        self.batcher.open()
        self.served.ask().result()

    def reload(self, model: Source | None = None) -> None:
        """Exchange the model; requests that came before are answered by the one that they came to.

        The new one is loaded, compared and compiled beside the old one, which answers until that is done and
        goes on answering if it fails.

        Args:
            model: a Model or a path; without it the file that the endpoint was made from.

        Raises:
            ArgumentError: other inputs or outputs than before, or there is no file.
            ModelFileError: the file holds no model.
        """
        with self._reloading:
            try:
                new = self._made(self._again() if model is None else model)
                self.served.expect_same_interface(new)
                new.ask().result()
            except Exception as error:
                self._reload_error = f"{type(error).__name__}: {error}"
                self.counts.add("onward_reloads_total", result="failed")
                raise
            self.served, self._reload_error = new, None
            self.counts.add("onward_reloads_total", result="done")

    def health(self) -> dict[str, Any]:
        """Whether it answers, with which model, and how requests are joined."""
        served, asked = self.served, self.served.ask()
        joining = asked.result().joining if asked.done() and not asked.exception() else None
        return {
            "ready": joining is not None and not self.draining,
            "name": self.name,
            "version": served.source.version,
            "inputs": [str(x) for x in served.plan.inputs],
            "outputs": list(served.plan.fetch),
            "batch_sizes": list(joining.sizes) if joining else [],
            "joined": joining is not None and not joining.alone,
            "alone_because": (joining.alone or None) if joining else None,
            "waiting": self.batcher.waiting,
            "reload_error": self._reload_error,
        }

    def metrics(self) -> str:
        """The metrics of the endpoint, in the text format of Prometheus."""
        return self.counts.text(
            onward_waiting=(self.batcher.waiting, "Requests that wait to be computed."),
            onward_memory_bytes=(self.room.taken, "Memory set aside for the requests in flight."),
        )

    def close(self) -> None:
        """Compute what waits, and end the threads that compute and compile."""
        self.served.close()
        self.batcher.close(self.timeout)

    def _made(self, model: Source) -> Served:
        return Served(opened(model, self._allow_nonfinite), self._outputs, self.max_batch, self.join)

    def _again(self) -> Source:
        path = self.served.source.path
        if path is None:
            raise ArgumentError("The endpoint was made from a Model, not from a file; write reload(model).")
        return path


def _expect_seconds(timeout: float, latency: float) -> None:
    if not is_number(timeout) or not timeout > 0:
        raise ArgumentError(f"timeout is {describe(timeout)}; expected seconds, a number above 0.")
    if not is_number(latency) or not 0 <= latency < timeout:
        raise ArgumentError(
            f"latency is {describe(latency)}; expected seconds from 0 to below the timeout, {timeout}."
        )
