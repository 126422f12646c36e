"""The options of ``onward show``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from onward.shell.options import add_command, positive
from onward.shell.show import ShowRequest, show


def add_show(commands: Any) -> None:
    """Add the command with its options."""
    purpose = "show the training program of a function in a file of yours"
    command = add_command(commands, "show", purpose, ABOUT, EXAMPLES)
    command.add_argument("target", metavar="TARGET", help="train.py:loss, package.train:loss, trained.model")
    _add_traced(command)
    _add_shown(command)
    command.set_defaults(run=_show)


def _add_traced(command: argparse.ArgumentParser) -> None:
    traced = command.add_argument_group("what it is traced with")
    traced.add_argument(
        "--feed",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=WHAT",
        help="what an argument, or declared data, is: a type as a listing shows it, 'x=f32[32,4]', or the "
        "name of something in the file (a function without arguments is called); containers by path: "
        "'params/layers/0/w=f32[4,8]'",
    )
    traced.add_argument(
        "--args",
        metavar="NAME",
        help="a function, in the same file or FILE:NAME, that returns the arguments as a tuple, or the one",
    )
    traced.add_argument(
        "--batch", type=positive, metavar="N", help="examples in a batch of declared data (default: 2)"
    )
    traced.add_argument("--has-aux", action="store_true", help="the function returns (loss, anything else)")
    traced.add_argument(
        "--optimizer",
        metavar="NAME",
        help="derive the backward pass and the update too: Adam, SGD, ... with their defaults, or the name "
        "of an optimizer in the file",
    )


def _add_shown(command: argparse.ArgumentParser) -> None:
    shown = command.add_argument_group("what is shown (default: the listing)")
    shown.add_argument("--depth", type=positive, metavar="N", help="fold scopes below this level")
    shown.add_argument("--source", action="store_true", help="add your file and line to every operator")
    shown.add_argument("--summary", action="store_true", help="a table of arithmetic and memory by scope")
    shown.add_argument("--memory", action="store_true", help="what lies in memory at the peak, in bytes")
    shown.add_argument("--draw", type=Path, metavar="FILE", help="write a picture: .svg, .html or .dot")
    shown.add_argument("--diff", metavar="OTHER", help="what is different in another one, named as TARGET is")


def _show(options: argparse.Namespace) -> int:
    show(ShowRequest(**{field.name: getattr(options, field.name) for field in fields(ShowRequest)}))
    return 0


ABOUT = (
    "Show the program of a function: every operator with its types, the pass that made it in the margin. "
    "Nothing is compiled or trained.\n\n"
    "TARGET is FILE:NAME or module:NAME. NAME is a network that declares its data (onward.data, "
    "onward.layer); a loss function, with its arguments told by --feed or --args; a Program, Step, Model "
    "or Trainer; or a function without arguments that returns one. The file is imported, so what trains "
    'in it belongs under: if __name__ == "__main__":\n\n'
    "TARGET may also be a file that onward.save wrote; its code is not needed."
)
EXAMPLES = [
    "onward show train.py:network --batch 32 --optimizer Adam",
    "onward show train.py:loss --feed params=init 'x=f32[32,4]' 'y=i32[32]'",
    "onward show train.py:loss --feed 'params/w=f32[4,1]' 'x=f32[32,4]' 'y=f32[32,1]'",
    "onward show train.py:loss --args example --optimizer SGD --draw step.svg",
    "onward show train.py:small --diff train.py:large --batch 32",
    "onward show trained.model --summary",
]
