"""The command line: ``onward COMMAND``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onward.core.errors import OnwardError, nearest
from onward.execute.host_memory import keep_host_memory
from onward.shell.bench import bench
from onward.shell.demo import demo
from onward.shell.doctor import doctor
from onward.shell.launch.launch import Plan, launch
from onward.shell.options import add_command, count, positive, seconds
from onward.shell.serve import serve
from onward.shell.show_options import add_show

_INTERRUPTED = 128 + signal.SIGINT
_NO_READER = 128 + 13  # what the shell reports of a command that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # as in: onward show ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the rest of it goes
        return _NO_READER
    except (OnwardError, OSError) as error:
        print(f"onward: {error}", file=sys.stderr)
        return 1


def _run(given: list[str]) -> int:
    parser, names = _parser()
    if given[:1] in ([], ["help"]):
        given = [*given[1:2], "--help"]
    if not given[0].startswith("-") and given[0] not in names:
        parser.error(f"there is no command {given[0]!r}. {nearest(given[0], names)}")
    options = parser.parse_args(given)
    status: int = options.run(options)
    return status


def _parser() -> tuple[argparse.ArgumentParser, Sequence[str]]:
    """The parser, and the names of the commands."""
    parser = argparse.ArgumentParser(
        prog="onward",
        description="You write the forward pass. Onward derives the rest.",
        epilog="onward COMMAND --help tells what a command takes, with examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"onward {version('onward')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    add_show(commands)
    _add_bench(commands)
    _add_serve(commands)
    _add_launch(commands)
    _add_doctor(commands)
    return parser, list(commands.choices)


def _add_demo(commands: Any) -> None:
    command = add_command(
        commands,
        "demo",
        "train a small convolutional network on handwritten digits",
        "Train a small convolutional network on the 1,797 handwritten digits that come with scikit-learn, "
        "show the training program, and write the learned parameters to a file. It needs no network and "
        "about ten seconds.",
        ["onward demo", "onward demo --epochs 5 --out digits.safetensors"],
    )
    command.add_argument(
        "--epochs", type=positive, default=30, metavar="N", help="passes over the data (default: %(default)s)"
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("onward-demo.safetensors"),
        metavar="FILE",
        help="where to write the parameters, as safetensors (default: %(default)s)",
    )
    command.set_defaults(run=_demo)


def _add_bench(commands: Any) -> None:
    command = commands.add_parser(
        "bench",
        help="measure what Onward costs, beside the step by hand and other libraries (in a checkout)",
        add_help=False,
        prefix_chars="\0",  # nothing is an option here: all of them are those of python -m benchmarks
    )
    command.add_argument("arguments", nargs="*")
    command.set_defaults(run=lambda options: bench(options.arguments))


def _add_serve(commands: Any) -> None:
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
    where = command.add_argument_group("where")
    where.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen at; 0.0.0.0 for other machines too (default: %(default)s)",
    )
    where.add_argument(
        "--port", type=count, default=8000, metavar="N", help="0 for any free one (default: %(default)s)"
    )
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
        "--reload-token",
        default=os.environ.get("ONWARD_RELOAD_TOKEN"),
        metavar="TOKEN",
        help="let POST /reload read the file again for those who send this (default: what "
        "ONWARD_RELOAD_TOKEN says; without it nobody can)",
    )
    limits = command.add_argument_group("how much, how long")
    limits.add_argument(
        "--max-batch",
        type=positive,
        default=32,
        metavar="N",
        help="examples computed at once, and in one request at most (default: %(default)s)",
    )
    limits.add_argument(
        "--latency",
        type=seconds,
        default="0.002",
        metavar="SECONDS",
        help="how long a request may wait for others to be computed with (default: %(default)s)",
    )
    limits.add_argument(
        "--timeout",
        type=seconds,
        default="30",
        metavar="SECONDS",
        help="for a body to come, and for an answer to be computed (default: %(default)s)",
    )
    limits.add_argument(
        "--max-body",
        type=positive,
        default=16 * 2**20,
        metavar="BYTES",
        help="that a request may have (default: %(default)s)",
    )
    limits.add_argument(
        "--max-waiting",
        type=positive,
        default=1024,
        metavar="N",
        help="requests that may wait before further ones are refused (default: %(default)s)",
    )
    command.set_defaults(run=_serve)


def _add_launch(commands: Any) -> None:
    command = add_command(
        commands,
        "launch",
        "run a script in several processes, as one computation",
        "Run a script in several processes of this machine, joined into one JAX computation: jax.devices() "
        "shows the devices of all. The script is written as for one process. Each line that a process prints "
        "begins with its number. When one fails, all are ended.",
        [
            "onward launch -n 2 train.py",
            "onward launch -n 4 --devices 2 --restarts 3 train.py --epochs 10",
        ],
    )
    command.add_argument(
        "-n", "--processes", type=positive, required=True, metavar="N", help="how many processes"
    )
    command.add_argument(
        "--devices",
        type=positive,
        metavar="M",
        help="host devices of each process (default: what JAX shows, as a rule 1)",
    )
    command.add_argument(
        "--restarts",
        type=count,
        default=0,
        metavar="K",
        help="how often to start all again when one fails; the script goes on from its last checkpoint "
        "(default: 0)",
    )
    command.add_argument(
        "--deadline",
        type=seconds,
        default=os.environ.get("ONWARD_DEADLINE", "300"),
        metavar="SECONDS",
        help="how long a step may take, with all its waiting for other processes (default: %(default)s, or "
        "what ONWARD_DEADLINE says)",
    )
    command.add_argument("script", type=Path, help="a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    command.set_defaults(run=_launch)


def _add_doctor(commands: Any) -> None:
    command = add_command(
        commands,
        "doctor",
        "say what is installed here, what is missing, and what would make it faster",
        "Say which versions, devices, extras and settings are here, which of them do not go together, and "
        "what would make steps faster. It changes nothing; what follows -> is advice.",
    )
    command.set_defaults(run=_doctor)


def _demo(options: argparse.Namespace) -> int:
    keep_host_memory()
    demo(options.epochs, options.out)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    doctor()
    return 0


def _serve(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name != "run"}
    serve(**given)
    return 0


def _launch(options: argparse.Namespace) -> int:
    return launch(
        Plan(
            options.script,
            tuple(options.arguments),
            options.processes,
            options.devices,
            options.restarts,
            options.deadline,
        )
    )
