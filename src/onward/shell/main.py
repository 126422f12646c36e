"""The command line: ``onward COMMAND``."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from onward.core.errors import OnwardError, nearest
from onward.execute.host_memory import keep_host_memory
from onward.shell.bench import bench
from onward.shell.demo import demo
from onward.shell.doctor import devices_in_words, doctor
from onward.shell.launch.launch import LaunchPlan, launch
from onward.shell.options import add_command, count, positive, refuse_rest, refuse_unknown, seconds
from onward.shell.serve_options import add_serve
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
    parser, commands = _parser()
    if given[:1] in ([], ["help"]):
        given = [*given[1:2], "--help"]
    if not given[0].startswith("-") and given[0] not in commands:
        parser.error(f"there is no command {given[0]!r}. {nearest(given[0], commands)}")
    command = commands.get(given[0], parser)
    refuse_unknown(command, given[1:] if given[0] in commands else given[:1])
    options, rest = parser.parse_known_args(given)
    if rest:
        refuse_rest(command, rest)
    status: int = options.run(options)
    return status


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands by name."""
    parser = argparse.ArgumentParser(
        prog="onward",
        description="You write the forward pass. Onward derives the rest.",
        epilog="onward COMMAND --help tells what a command takes, with examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Versions, help="show what is used, and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    add_show(commands)
    _add_bench(commands)
    add_serve(commands)
    _add_launch(commands)
    _add_doctor(commands)
    return parser, commands.choices


class Versions(argparse.Action):
    """``--version``: of Onward and of what it computes with; devices are looked for only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        # Suppressed, for it is not an argument of any command.
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *given: Any, **options: Any) -> None:
        """Print one line, and end."""
        print(
            f"onward {version('onward')}, jax {version('jax')}, jaxlib {version('jaxlib')}, "
            f"Python {platform.python_version()}, {devices_in_words()}"
        )
        parser.exit()


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


def _launch(options: argparse.Namespace) -> int:
    return launch(
        LaunchPlan(
            options.script,
            tuple(options.arguments),
            options.processes,
            options.devices,
            options.restarts,
            options.deadline,
        )
    )
