"""Bounds of what workers may send for one request, which the router checks before it uses any of
it: a worker that breaks them is faulty or forged."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from baton.errors import UnavailableError
from baton_router.call.output_delta import OutputDelta
from baton_router.call.request import Request
from baton_router.call.tokens import TopLogprobs
from baton_router.lifecycle.worker_events import (
    PrefillResult,
    PromptScores,
    Received,
    SequenceEnded,
)

# Tokens of one message: four times those that workers send in one, so that the event loop is never
# held for long by a message.
MAX_MESSAGE_TOKENS = 4096
# Bytes of a message beyond its tokens. A pooled output has 4 for each dimension.
_OTHER_BYTES = 64 * 2**10
# Of a token id, and of a log-probability; lists of most likely tokens have headers beside.
_ID_BYTES, _LOGPROB_BYTES, _LIST_BYTES = 5, 4, 16

_Message = TypeVar("_Message")


class ViolationError(UnavailableError):
    """Worker that sent what no worker may send for the request. Another one may serve it."""


class Unreadable:
    """Message of a worker that was not parsed. `problem`: what it is, after "sent"."""

    def __init__(self, problem: str) -> None:
        self.problem: Final = problem


def bounded(
    deserialize: Callable[[bytes], _Message], max_bytes: int = _OTHER_BYTES
) -> "Callable[[bytes], _Message | Unreadable]":
    """Returns a deserializer that parses messages of up to `max_bytes` alone, and raises nothing:
    gRPC would log the traceback."""

    def parse(data: bytes) -> "_Message | Unreadable":
        if len(data) > max_bytes:
            return Unreadable(f"a message of {len(data)} bytes; expected at most {max_bytes}")
        if not data:
            return Unreadable("an event without a kind")
        try:
            return deserialize(data)
        except DecodeError:
            return Unreadable("a message that does not parse")

    return parse


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """Bounds of what workers may send for one request.

    Attributes:
        num_sequences: sequences that the client gets.
        max_tokens: output tokens of each of them.
        max_message_bytes: bytes of one message of a worker.
    """

    vocab_size: int
    num_prompt_tokens: int
    num_sequences: int
    max_tokens: int
    max_message_bytes: int

    @classmethod
    def of(cls, request: Request, vocab_size: int) -> "WorkBounds":
        """Returns the bounds of a request to a model with this vocabulary."""
        params, num_prompt_tokens = request.params, len(request.token_ids)
        num_top = max(params.top_logprobs, params.prompt_logprobs or 0)
        has_logprobs = params.logprobs or params.prompt_logprobs is not None
        per_token = _ID_BYTES + has_logprobs * (
            _LOGPROB_BYTES + _LIST_BYTES + num_top * (_ID_BYTES + _LOGPROB_BYTES)
        )
        num_tokens = min(MAX_MESSAGE_TOKENS, max(params.max_tokens, num_prompt_tokens))
        num_bytes = _OTHER_BYTES + num_tokens * per_token
        return cls(vocab_size, num_prompt_tokens, params.n, params.max_tokens, num_bytes)

    def check(self, event: Received) -> None:
        """Raises `ViolationError` if no worker may send this event for the request."""
        match event:
            case OutputDelta():
                self._check_tokens(event)  # hot path
            case SequenceEnded():
                self._check_index(event.sequence_index)
            case PrefillResult():
                if len(event.first_tokens) > 1:
                    raise ViolationError(f"{len(event.first_tokens)} first tokens; expected one")
                for first_token in event.first_tokens:
                    self._check_tokens(first_token)
            case PromptScores():
                self._check_scores(event)

    def _check_tokens(self, delta: OutputDelta) -> None:
        self._check_index(delta.sequence_index)
        tokens = delta.tokens
        num_tokens, end = len(tokens), tokens.position + len(tokens)
        if end > self.max_tokens:
            raise ViolationError(f"output token {end}; expected at most {self.max_tokens}")
        if num_tokens > MAX_MESSAGE_TOKENS:
            raise ViolationError(
                f"{num_tokens} tokens in a message; expected at most {MAX_MESSAGE_TOKENS}"
            )
        self._check_ids(tokens.token_ids)
        self._check_tops(tokens.tops)

    def _check_scores(self, scores: PromptScores) -> None:
        end = scores.position + len(scores.logprobs)
        if end > self.num_prompt_tokens:
            raise ViolationError(
                f"the log-probability of prompt token {end}; expected at most "
                f"{self.num_prompt_tokens}"
            )
        self._check_tops(scores.tops)

    def _check_index(self, index: int) -> None:
        if index >= self.num_sequences:
            raise ViolationError(
                f"tokens of sequence {index}; expected one below {self.num_sequences}"
            )

    def _check_tops(self, tops: Iterable[TopLogprobs]) -> None:
        for top in tops:
            self._check_ids(top.token_ids)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        if token_ids and (largest := max(token_ids)) >= self.vocab_size:
            raise ViolationError(f"token id {largest}; the vocabulary has {self.vocab_size}")


def any_event(_event: Any) -> None:
    """Check of a call whose events are checked by their readers."""
