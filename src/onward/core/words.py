"""The closed sets of words that describe Variables and Ops."""

from enum import StrEnum


class Kind(StrEnum):
    """What a Variable is for."""

    DATA = "data"
    PARAMETER = "parameter"
    STATE = "state"
    CONSTANT = "constant"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Placement(StrEnum):
    """Where a state Variable lives when a Program runs on many devices."""

    REPLICATED = "replicated"
    PER_REPLICA = "per_replica"
    SHARDED = "sharded"


class Pass(StrEnum):
    """The pass that made an Op."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    UPDATE = "update"


class UpdateType(StrEnum):
    """How far an update rule looks: what may be packed, sharded or cut is decided by this.

    ``ELEMENTWISE``: each number by itself. ``PER_MATRIX``: one parameter as a whole.
    ``ACROSS``: several parameters at once. ``BOOKKEEPING``: no parameter (step counter, schedules).
    """

    ELEMENTWISE = "elementwise"
    PER_MATRIX = "per matrix"
    ACROSS = "across parameters"
    BOOKKEEPING = "bookkeeping"
