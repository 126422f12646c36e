"""Which training wrote a checkpoint.

Two trainings in one folder have the same steps and the same names of files; only their identity tells them
apart. It is made at random when a training begins, stands in every manifest, and is taken over by a run that
resumes.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True)
class Identity:
    """Who a training is: a random id, and when it began, in UTC.

    >>> Identity.new() == Identity.new()
    False
    """

    id: str
    begun: str

    @classmethod
    def new(cls) -> Identity:
        """That of a training which begins now."""
        return cls(secrets.token_hex(8), moment(datetime.now(UTC).timestamp()))


def moment(seconds: float) -> str:
    """A time since 1970 as people read it.

    >>> moment(0)
    '1970-01-01 00:00:00 UTC'
    """
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


UNKNOWN = Identity("", "")  # of checkpoints that were written before there were identities
