"""How every command speaks: the shape of its help, and the numbers it takes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from difflib import get_close_matches
from textwrap import fill
from typing import Any, NoReturn

from onward.core.amounts import whole_bytes
from onward.core.errors import nearest

_WIDTH = 78


def add_command(
    commands: Any, name: str, summary: str, description: str, examples: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """A command, with its line in the list of commands, its own text, and examples below its options."""
    shown = "".join(f"\n  {line}" for line in examples)
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description="\n\n".join(fill(part, _WIDTH) for part in description.split("\n\n")),
        epilog=f"examples:{shown}" if shown else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return command


def refuse_unknown(command: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """End with a sentence about the first option that a command has not, before it asks for one it needs.

    What follows the script of ``launch`` is the script's own; where help is asked for first, it is given.
    """
    actions = {name: action for action in command._actions for name in action.option_strings}
    ends_at_first = any(action.nargs == argparse.REMAINDER for action in command._actions)
    texts = iter(given if "-" in command.prefix_chars else ())
    for text in texts:
        name, equals, _ = text.partition("=")
        if text == "--" or (ends_at_first and not text.startswith("-")):
            return
        action = actions.get(name) or actions.get(text[:2])
        if isinstance(action, argparse._HelpAction):
            return
        if action is not None and action.nargs is None and not equals and name in actions:
            next(texts, None)  # its value
        elif action is None and text[:1] == "-" and text[1:2].strip("0123456789"):
            refuse_rest(command, [text])


def refuse_rest(command: argparse.ArgumentParser, rest: Sequence[str]) -> NoReturn:
    """End with a sentence about arguments that a command does not take, and its usage."""
    option = next((text.partition("=")[0] for text in rest if text.startswith("-")), None)
    if option is None:
        command.error(f"{rest[0]!r} is an argument too many")
    options = [name for action in command._actions for name in action.option_strings]
    close = get_close_matches(option.lstrip("-"), [name.lstrip("-") for name in options], cutoff=0.5)
    near = [name for name in options if name.lstrip("-") in close]  # the dashes are alike in all
    command.error(f"there is no option {option!r}. {nearest(option if near else '', near or options)}")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 1")
    return int(text)


def amount(text: str) -> int:
    """A number of bytes, with a unit or without."""
    found = whole_bytes(int(text) if text.isdecimal() else text)
    if found is None or found < 1:
        raise argparse.ArgumentTypeError(f"{text} is neither a number of bytes nor one with a unit, as 16MiB")
    return found


def count(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return int(text)


def seconds(text: str) -> float:
    """A duration above 0."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0 and below 10,000,000")
    return found
