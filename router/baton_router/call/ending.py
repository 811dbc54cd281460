"""Ending of one sequence of an answer, and its reason."""

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Reason for the end of a sequence."""

    END_OF_SEQUENCE = enum.auto()
    STOP_TOKEN = enum.auto()
    STOP_STRING = enum.auto()
    LENGTH = enum.auto()

    @property
    def word(self) -> str:
        """The word of OpenAI's API, and of conventions for traces."""
        return "length" if self is FinishReason.LENGTH else "stop"


@dataclass(frozen=True, slots=True)
class Ending:
    """Ending of one sequence. A stop string or stop token is given if it was the reason; only beams
    have a `score`."""

    reason: FinishReason
    stop_string: str | None = None
    score: float | None = None
    stop_token_id: int | None = None
