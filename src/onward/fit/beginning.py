"""How a test over several processes begins: each tells of its first batch, and all take one for the first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onward.core.errors import ArgumentError
from onward.develop.over_batch.from_parts import Shape


@dataclass(frozen=True)
class Beginning:
    """The first batch with an example that a process tests on, as it tells the others of it.

    Args:
        program: a digest of the test Program.
        names: of the data of its batches; empty if it has no batch.
        shapes: of that batch, for as many examples as was traced; None if all batches are empty.
    """

    program: str
    names: tuple[str, ...] = ()
    shapes: Mapping[str, Shape] | None = None

    def to_bytes(self) -> bytes:
        """It as JSON."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def of(cls, told: bytes) -> Beginning:
        """It from ``to_bytes``."""
        found = json.loads(told)
        shapes = found["shapes"] and {name: tuple(shape) for name, shape in found["shapes"].items()}
        return cls(found["program"], tuple(found["names"]), shapes)


def first_of(told: Sequence[bytes], program: str) -> Beginning:
    """The Beginning that all processes begin with, of what each told; one without a batch has a part of 0.

    Raises:
        ArgumentError: none has a batch, or they have different Programs or data.
    """
    found = [Beginning.of(one) for one in told]
    if len({one.program for one in found}) > 1:
        raise ArgumentError(_OTHER_PROGRAMS.format(program=program))
    having = [(i, one) for i, one in enumerate(found) if one.names]
    if not having:
        raise ArgumentError(_NO_BATCH)
    i, first = next(((i, one) for i, one in having if one.shapes is not None), having[0])
    for j, other in having:
        if other.names != first.names:
            ours, theirs = (", ".join(one.names) for one in (first, other))
            raise ArgumentError(_OTHER_DATA.format(program=program, i=i, ours=ours, j=j, theirs=theirs))
    return first


_NO_BATCH = (
    "The test reader yielded no batch. If it can be read only once, pass a callable that makes a new one: "
    "test=lambda: read(files)."
)
_OTHER_PROGRAMS = (
    "{program}: the processes test different networks, and a test is one of all. Build the same one in each."
)
_OTHER_DATA = (
    "{program}: the test reader yields {ours} in process {i} and {theirs} in process {j}. A test is one of "
    "all processes: let each yield the same data by name."
)
