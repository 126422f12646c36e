"""The checkpoint of a user's own loop: a State, the position in the data, a random key, a history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.structure import describe
from onward.core.words import Placement
from onward.execute.loop.history import History
from onward.execute.loop.reader import position_of
from onward.execute.state import State

PLACEMENTS = "placements"  # under which a checkpoint says how what is not replicated lies over the devices
COPIES = "copies"  # under which it says where each device has its own of a parameter
POSITION = "position"  # of the reader
KEY = "(random key of the loop)"
HISTORY = "(history of the loop)"
_SPREAD = (Placement.PER_REPLICA, Placement.SHARDED)


def contents(
    given: Any, extra: Mapping[str, Any], reader: Any, key: Any, history: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays and the JSON data of a checkpoint.

    Raises:
        ArgumentError: neither a State nor arrays by name; something that is not a reader, key or History.
        StateError: a State that was given to a step.
    """
    arrays, extra = _arrays(given), dict(extra)
    if isinstance(given, State):
        placed = {PLACEMENTS: placements(given), COPIES: dict(given.layout.copies)}
        extra |= {key: named for key, named in placed.items() if named}
    if reader is not None:
        extra[POSITION] = position_of(reader)
    if key is not None:
        arrays[KEY] = _key(key)
    if history is not None:
        columns = _columns(history)
        arrays[HISTORY], extra[HISTORY] = np.array([*columns.values()], np.float64), list(columns)
    return arrays, extra


def placements(state: State) -> dict[str, str]:
    """How what is not replicated lies over the devices, by name."""
    return {v.name: str(v.placement) for v in state.layout.variables if v.placement in _SPREAD}


def _arrays(given: Any) -> dict[str, Any]:
    if isinstance(given, State):
        given.expect_whole()
        return {v.name: x for v, x in zip(given.layout.variables, given.values, strict=True)}
    if isinstance(given, Mapping):
        return dict(given)
    raise ArgumentError(
        f"Checkpoints.save was given {describe(given)}; expected the State that a step returned, "
        "checkpoints.save(state, 120), or arrays by name. A Trainer saves itself: "
        "trainer.checkpoint(folder); a Model too: model.save(folder)."
    )


def _key(key: Any) -> Any:
    if isinstance(key, jax.Array | np.ndarray):
        return key
    raise ArgumentError(
        f"Checkpoints.save: key= is {describe(key)}; expected a random key, jax.random.key(0)."
    )


def _columns(history: Any) -> dict[str, np.ndarray]:
    if isinstance(history, History):
        return history.columns()
    raise ArgumentError(
        f"Checkpoints.save: history= is {describe(history)}; expected a History: history = "
        "onward.History(), then history.record(step=1, epoch=0, loss=out.loss). Other data that "
        "JSON can hold goes into extra=."
    )
