"""The command line: ``onward COMMAND``."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onward.core.errors import OnwardError
from onward.execute.host_memory import keep_host_memory
from onward.shell.bench import bench
from onward.shell.demo import demo
from onward.shell.doctor import doctor
from onward.shell.launch.launch import Plan, launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (OnwardError, OSError) as error:
        print(f"onward: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onward", description="You write the forward pass. Onward derives the rest."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_bench(commands)
    _add_demo(commands)
    _add_doctor(commands)
    _add_launch(commands)
    return parser


def _add_bench(commands: Any) -> None:
    command = commands.add_parser(
        "bench",
        help="measure what Onward costs, beside the step by hand and other libraries (in a checkout)",
        add_help=False,
        prefix_chars="\0",  # nothing is an option here: all of them are those of python -m benchmarks
    )
    command.add_argument("arguments", nargs="*")
    command.set_defaults(run=lambda options: bench(options.arguments))


def _add_demo(commands: Any) -> None:
    command = commands.add_parser(
        "demo",
        help="train a small convolutional network on handwritten digits",
        description="Train a small convolutional network on the 1,797 handwritten digits that come with "
        "scikit-learn, show the training program, and write the learned parameters to a file.",
    )
    command.add_argument("--epochs", type=_positive, default=30, help="passes over the data (default: 30)")
    command.add_argument(
        "--out",
        type=Path,
        default=Path("onward-demo.safetensors"),
        metavar="FILE",
        help="where to write the parameters (default: %(default)s)",
    )
    command.set_defaults(run=_demo)


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="say what is here to compute with, and what would make it faster",
        description="Say which device, extras and settings are here, and what would make steps faster.",
    )
    command.set_defaults(run=_doctor)


def _add_launch(commands: Any) -> None:
    command = commands.add_parser(
        "launch",
        help="run a script in several processes, as one computation",
        description="Run a script in several processes of this machine, joined into one JAX computation: "
        "jax.devices() shows the devices of all. The script is written as for one process. Each line that a "
        "process prints begins with its number. When one fails, all are ended.",
    )
    command.add_argument(
        "-n", "--processes", type=_positive, required=True, metavar="N", help="how many processes"
    )
    command.add_argument(
        "--devices",
        type=_positive,
        metavar="M",
        help="host devices of each process (default: what JAX shows, as a rule 1)",
    )
    command.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="K",
        help="how often to start all again when one fails; the script goes on from its last checkpoint "
        "(default: 0)",
    )
    command.add_argument(
        "--deadline",
        type=_seconds,
        default=os.environ.get("ONWARD_DEADLINE", "300"),
        metavar="SECONDS",
        help="how long a step may take, with all its waiting for other processes (default: %(default)s)",
    )
    command.add_argument("script", type=Path, help="a Python file")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    command.set_defaults(run=_launch)


def _demo(options: argparse.Namespace) -> int:
    keep_host_memory()
    demo(options.epochs, options.out)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    doctor()
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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0 and below 10,000,000")
    return seconds
