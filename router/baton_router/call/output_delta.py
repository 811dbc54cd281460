"""Piece of one sequence of an answer as its client gets it, in the form of no API."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton_router.call.ending import FinishReason
from baton_router.call.parts import Part, joined
from baton_router.call.tokens import Tokens


@dataclass(slots=True)
class OutputDelta:
    """Consecutive tokens of one sequence with what they complete. One crosses the router for each
    message: made of a worker's tokens alone, completed by `Answer`, and sent to the client.

    Attributes:
        tokens: empty if only text or parts are left, which were held back.
        text: may lag behind the tokens.
        finish_reason: why the sequence is complete with them; None if it continues, or if only its
            ending has the reason.
        parts: of a parsed output; may lag behind the text. Adjacent pieces are one part.
        num_reasoning_tokens: tokens of reasoning among them.
    """

    sequence_index: int
    tokens: Tokens
    text: str = ""
    finish_reason: FinishReason | None = None
    parts: Sequence[Part] = ()
    num_reasoning_tokens: int = 0

    def append(self, more: "OutputDelta") -> None:
        """Adds the tokens that follow, at least one."""
        self.tokens.extend(more.tokens)
        self.text += more.text
        self.finish_reason = more.finish_reason
        self.parts = joined([*self.parts, *more.parts])
        self.num_reasoning_tokens += more.num_reasoning_tokens
