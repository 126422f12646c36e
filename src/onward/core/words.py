"""The closed sets of words that describe Variables and Ops."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from onward.core.errors import UnknownNameError, nearest


def some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are.

    >>> some(["w1", "w2", "w3"], 2)
    'w1, w2 and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Words(StrEnum):
    """A closed set of words; any other word raises an error that offers the nearest ones."""

    @classmethod
    def _missing_(cls, value: Any) -> None:
        words = [str(word) for word in cls]
        raise UnknownNameError(f"There is no {cls.__name__} {value!r}. {nearest(str(value), words)}")


class Kind(Words):
    """The role of a Variable in a Program."""

    DATA = "data"
    PARAMETER = "parameter"
    FROZEN = "frozen"  # a parameter, or what is kept of one, that no step changes
    STATE = "state"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Placement(Words):
    """Where a state Variable lives when a Program runs on many devices."""

    REPLICATED = "replicated"
    PER_REPLICA = "per_replica"
    SHARDED = "sharded"


class Pass(Words):
    """The pass that made an Op."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    UPDATE = "update"


class UpdateType(Words):
    """How far an update rule looks: what may be packed, sharded or cut is decided by this.

    ``ELEMENTWISE``: each number by itself. ``PER_MATRIX``: one parameter as a whole.
    ``ACROSS``: several parameters at once. ``BOOKKEEPING``: no parameter (step counter, schedules).
    """

    ELEMENTWISE = "elementwise"
    PER_MATRIX = "per matrix"
    ACROSS = "across parameters"
    BOOKKEEPING = "bookkeeping"
