"""Reader of a request's events as pieces of choices, from which both response formats are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from baton.v1 import inference_pb2 as pb
from baton_router.call.chunk import Chunk, ClientEvent
from baton_router.call.parts import Part
from baton_router.call.tokens import Tokens

_REASONS = {
    pb.FINISH_REASON_END_OF_SEQUENCE: "stop",
    pb.FINISH_REASON_STOP_TOKEN: "stop",
    pb.FINISH_REASON_STOP_STRING: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Token with its log-probability in nats, and the most likely ones at its position.

    `logprob` is None for a prompt's first token, which has no predecessor.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class SequenceDelta:
    """Piece of one choice, which follows the pieces before it. Made for each token, so it is not
    frozen, which is three times as fast.

    Attributes:
        index: index of the choice.
        tokens: empty unless log-probabilities were asked for; `text` may lag behind them.
        finish_reason: set on the choice's last piece.
        stop_reason: stop string or stop token that ended the choice, if one did.
        parts: of the parsed output; empty unless parsing was asked for.
    """

    index: int
    text: str = ""
    tokens: Sequence[ScoredToken] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    parts: Sequence[Part] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt that is repeated before each answer.

    Attributes:
        token_ids: the prompt, where its log-probabilities were asked for; else empty.
    """

    text: str
    token_ids: Sequence[int] = ()


class Reader:
    """Reader of the events of one request, whose choices are numbered from `first`.

    Attributes:
        accepted: the first event; None until it arrives.
        finished: the last event that ended a sequence, with the request's usage.
        num_output_tokens: tokens received so far.
        num_reasoning_tokens: those of reasoning among them.
    """

    def __init__(self, first: int, num_choices: int, echo: Prompt | None = None) -> None:
        self.accepted: pb.Accepted | None = None
        self.finished: pb.Finished | None = None
        self.num_output_tokens = self.num_reasoning_tokens = 0
        self.indices = range(first, first + num_choices)
        self._echo = echo
        self._scores: list[ScoredToken] = []

    def read(self, event: ClientEvent) -> Sequence[SequenceDelta]:
        if isinstance(event, Chunk):
            self.num_output_tokens += len(event.tokens)
            self.num_reasoning_tokens += event.num_reasoning_tokens
            return [self._written(event)]
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.accepted = event.accepted
            return self._repeated()
        if kind == "prompt_logprobs":
            return self._on_scores(event.prompt_logprobs)
        if kind != "finished":
            return []
        self.finished = finished = event.finished
        return [
            SequenceDelta(
                self.indices[finished.sequence_index],
                finish_reason=_REASONS.get(finished.reason, "stop"),
                stop_reason=_stop_reason(finished),
            )
        ]

    @property
    def num_prompt_tokens(self) -> int:
        return 0 if self.accepted is None else self.accepted.num_prompt_tokens

    def _written(self, chunk: Chunk) -> SequenceDelta:
        index = self.indices[chunk.sequence_index]
        tokens = _scored(chunk.tokens) if chunk.tokens.logprobs else ()
        return SequenceDelta(index, chunk.text, tokens, parts=chunk.parts)

    def _on_scores(self, message: pb.PromptLogprobs) -> Sequence[SequenceDelta]:
        if self._echo is None:
            return []
        begin = message.position
        ids = self._echo.token_ids[begin : begin + len(message.logprobs)]
        self._scores += _scored_prompt(ids, message)
        return self._repeated()

    def _repeated(self) -> Sequence[SequenceDelta]:
        """Returns the echoed prompt, once all its log-probabilities are known."""
        if self._echo is None or len(self._scores) < len(self._echo.token_ids) - 1:
            return []
        echo, self._echo = self._echo, None
        first = [ScoredToken(token_id, None) for token_id in echo.token_ids[:1]]
        tokens = (*first, *self._scores)
        return [SequenceDelta(index, echo.text, tokens) for index in self.indices]


def _stop_reason(finished: pb.Finished) -> str | int | None:
    if finished.HasField("stop_token_id"):
        return finished.stop_token_id
    return finished.stop_string or None


def _scored(tokens: Tokens) -> Sequence[ScoredToken]:
    tops = [tuple(zip(top.token_ids, top.logprobs, strict=True)) for top in tokens.tops]
    return list(map(ScoredToken, tokens.token_ids, tokens.logprobs, tops or repeat(())))


def _scored_prompt(token_ids: Sequence[int], message: pb.PromptLogprobs) -> tuple[ScoredToken, ...]:
    tops: list[tuple[tuple[int, float], ...]] = [
        tuple(zip(top.token_ids, top.logprobs, strict=True)) for top in message.top_logprobs
    ]
    tops = tops or [()] * len(token_ids)
    return tuple(map(ScoredToken, token_ids, message.logprobs, tops))
