"""The command line: ``onward COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from onward.core.errors import OnwardError
from onward.shell.demo import demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (OnwardError, OSError) as error:
        print(f"onward: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onward", description="You write the forward pass. Onward derives the rest."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
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
    command.set_defaults(run=lambda options: demo(options.epochs, options.out))
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)
