"""A request that is answered by an error."""

from __future__ import annotations

from collections.abc import Mapping


class Refusal(Exception):  # noqa: N818
    """A request is answered by an error.

    Attributes:
        status: of the answer.
        sentence: what was found, what was expected, what to send instead.
        headers: of the answer, beside those that every answer has.
    """

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, dict(headers or {})


def later(status: int, sentence: str, seconds: int = 1) -> Refusal:
    """A refusal of something that may be asked again after some seconds."""
    return Refusal(status, sentence, {"retry-after": str(seconds)})
