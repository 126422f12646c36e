"""Check the arguments of a store of checkpoints as soon as they are given."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from onward.core.errors import ArgumentError, CheckpointError
from onward.core.structure import describe
from onward.execute.checkpoint.manifest import MANIFEST


def expect_numbers(every: Any, keep: Any, grace: Any) -> None:
    """Raise ``ArgumentError`` unless these can be counts, and seconds."""
    for name, value in {"every": every, "keep": keep}.items():
        if value is not None and (not is_whole(value) or value < 1):
            raise ArgumentError(
                f"Checkpoints: {name} is {describe(value)}; expected a whole number, at least 1, or None."
            )
    if not grace > 0:
        raise ArgumentError(f"Checkpoints: grace is {grace}; expected a number of seconds, such as 25.")


def expect_word(name: str, value: str, known: Iterable[str]) -> None:
    """Raise ``ArgumentError`` unless the value is among the words that are known."""
    if value not in known:
        raise ArgumentError(
            f"Checkpoints: {name} is {value!r}; expected one of {', '.join(map(repr, known))}."
        )


def folder_of(folder: Any) -> Path:
    """The path of a folder of checkpoints.

    Raises:
        ArgumentError: it is not a path.
        CheckpointError: it is a file, or one checkpoint.
    """
    if not isinstance(folder, str | PathLike):
        raise ArgumentError(
            f"Checkpoints was given {describe(folder)}; expected the path of a "
            "folder: Checkpoints('runs/one')."
        )
    path = Path(folder)
    if path.is_file():
        raise CheckpointError(
            f"{folder} is a file; checkpoints are kept in a folder. One file without the code of the "
            "network is written by onward.save(model, path) and read by onward.load(path)."
        )
    if (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} is one checkpoint; expected the folder of all of them, {path.parent}. "
            "trainer.restore and step.restore take the path of one."
        )
    return path


def is_whole(value: Any) -> bool:
    """Whether it is a whole number."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def named(argument: str, name: Any) -> str:
    """The name of an array or a number; raises ``ArgumentError`` if it is none."""
    if not isinstance(name, str):
        raise ArgumentError(f"Checkpoints.save: {argument}= has a name that is not a string, {name!r}.")
    return name


def json_data(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A copy by way of JSON; raises ``ArgumentError`` if that changes anything."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(extra, allow_nan=False))
        unchanged = copy == extra
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"Checkpoints.save: extra= is not JSON data: {error}.") from error
    if not unchanged:
        raise ArgumentError(
            f"Checkpoints.save: extra={extra!r} would come back as {copy!r}. Write lists in place "
            "of tuples, and strings as the keys of dicts."
        )
    return copy
