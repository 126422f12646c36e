"""The options of ``onward serve``."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from onward.serve.endpoint.endpoint import Endpoint
from onward.shell.options import add_command, amount, count, positive, seconds


def add_serve(commands: Any) -> None:
    """Add the command with its options."""
    command = add_command(
        commands,
        "serve",
        "answer over HTTP with a saved model",
        "Answer over HTTP with the model in a file that onward.save wrote. Requests that come while others "
        "are computed are joined into batches. The address is printed; open it in a browser to see what can "
        "be asked. SIGTERM and Ctrl-C end it once every accepted request is answered; SIGHUP reads the file "
        "again, without dropping a request.",
        [
            "onward serve trained.model",
            "onward serve trained.model --port 0 --outputs head --watch",
            "curl -s localhost:8000/predict -H 'content-type: application/json' -d '{\"x\": [[1, 2]]}'",
        ],
    )
    command.add_argument(
        "path", type=Path, metavar="FILE", help="a model that onward.save(model, FILE) wrote"
    )
    _add_where(command)
    _add_what(command)
    _add_limits(command)
    command.set_defaults(run=_serve)


def _add_where(command: argparse.ArgumentParser) -> None:
    where = command.add_argument_group("where")
    where.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen at; 0.0.0.0 for other machines too (default: %(default)s)",
    )
    where.add_argument(
        "--port", type=count, default=8000, metavar="N", help="0 for any free one (default: %(default)s)"
    )
    where.add_argument(
        "--allow-host",
        dest="hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names to answer to where only this machine can ask, beside localhost; * for any (a page in a "
        "browser could ask under a name of its own)",
    )


def _add_what(command: argparse.ArgumentParser) -> None:
    what = command.add_argument_group("what")
    what.add_argument(
        "--outputs",
        nargs="+",
        default=[],
        metavar="NAME",
        help="layers or other Variables to answer (default: what the network returns for each example)",
    )
    what.add_argument("--name", help="what the page and /health call it (default: that of the file)")
    what.add_argument("--watch", action="store_true", help="read the file again whenever it has changed")
    what.add_argument(
        "--allow-nonfinite", action="store_true", help="serve parameters that hold NaN or infinity as well"
    )
    what.add_argument(
        "--reload-token",
        default=os.environ.get("ONWARD_RELOAD_TOKEN"),
        metavar="TOKEN",
        help="let POST /reload read the file again for those who send this (default: what "
        "ONWARD_RELOAD_TOKEN says; without it nobody can)",
    )


def _add_limits(command: argparse.ArgumentParser) -> None:
    limits = command.add_argument_group("how much, how long")
    for flag, kind, default, metavar, text in LIMITS:
        limits.add_argument(
            flag, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)"
        )
    limits.add_argument(
        "--no-join",
        dest="join",
        action="store_false",
        help="compute each request by itself, even where a trial found that they do not depend on each other",
    )


LIMITS: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("--max-batch", positive, 32, "N", "examples computed at once, and in one request at most"),
    ("--latency", seconds, "0.002", "SECONDS", "how long a request may wait for others to be computed with"),
    ("--timeout", seconds, "30", "SECONDS", "for a body to come, and for an answer to be computed"),
    ("--max-body", amount, 16 * 2**20, "BYTES", "that a request may have"),
    (
        "--max-memory",
        amount,
        2**30,
        "BYTES",
        "that the bodies of all requests and what they are read into may take",
    ),
    ("--max-waiting", positive, 1024, "N", "requests that may wait before further ones are refused"),
)


_OF_RUN = ("run", "host", "port", "watch")  # the others are options of the Endpoint


def _serve(options: argparse.Namespace) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = {name: value for name, value in vars(options).items() if name not in _OF_RUN}
    endpoint = Endpoint(given.pop("path"), **{**given, "name": options.name or options.path.stem})
    endpoint.run(options.host, options.port, watch=options.watch)
    return 0
