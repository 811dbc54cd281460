"""Chunks: tokens of one sequence as its client gets them, in the form of no API."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.v1 import inference_pb2 as pb
from baton_router.call.parts import Part, joined
from baton_router.call.tokens import Tokens


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence with what they complete. One crosses the router for each
    message: made of a worker's tokens alone, completed by `Answer`, and sent to the client.

    Attributes:
        tokens: empty if only text or parts are left, which were held back.
        text: may lag behind the tokens.
        finish_reason: why the sequence is complete with them; unspecified if it continues, or if
            only `finished` has the reason.
        parts: of a parsed output; may lag behind the text. Adjacent pieces are one part.
        num_reasoning_tokens: tokens of reasoning among them.
    """

    sequence_index: int
    tokens: Tokens
    text: str = ""
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    parts: Sequence[Part] = ()
    num_reasoning_tokens: int = 0

    def append(self, more: "Chunk") -> None:
        """Adds the tokens that follow, at least one."""
        self.tokens.extend(more.tokens)
        self.text += more.text
        self.finish_reason = more.finish_reason
        self.parts = joined([*self.parts, *more.parts])
        self.num_reasoning_tokens += more.num_reasoning_tokens


ClientEvent: TypeAlias = Chunk | pb.GenerateResponse
"""Event of a request as its client gets it: tokens, or a message that has none."""


def coalesced(events: list[ClientEvent]) -> Iterator[ClientEvent]:
    """Yields fewer events: adjacent tokens of a sequence become one chunk. Text or parts without
    tokens, held back to the end, stay by themselves: by them a client that resumes knows that it
    has all the text, and the finish reason came with the tokens before it."""
    held: dict[int, Chunk] = {}
    for event in events:
        if not isinstance(event, Chunk):
            yield from held.values()
            held.clear()
            yield event
            continue
        index = event.sequence_index
        if index in held and event.tokens:
            held[index].append(event)
        else:
            if index in held:
                yield held.pop(index)
            held[index] = event
    yield from held.values()
