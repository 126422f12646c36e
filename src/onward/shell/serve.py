"""``onward serve``: a saved model answers over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from onward.serve.endpoint.endpoint import Endpoint


def serve(
    path: Path,
    *,
    host: str,
    port: int,
    watch: bool,
    outputs: Sequence[str],
    name: str | None,
    join: bool,
    max_batch: int,
    latency: float,
    timeout: float,
    max_body: int,
    max_memory: int,
    max_waiting: int,
    reload_token: str | None,
    hosts: Sequence[str],
    allow_nonfinite: bool,
) -> None:
    """Answer with the model of a file until SIGTERM or Ctrl-C."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    endpoint = Endpoint(
        path,
        outputs=outputs,
        name=name or path.stem,
        join=join,
        max_batch=max_batch,
        latency=latency,
        timeout=timeout,
        max_body=max_body,
        max_memory=max_memory,
        max_waiting=max_waiting,
        reload_token=reload_token,
        hosts=hosts,
        allow_nonfinite=allow_nonfinite,
    )
    endpoint.run(host, port, watch=watch)
