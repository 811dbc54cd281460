"""State of one generation, accumulated from its events over all its calls. Awaits nothing."""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.client.router_messages import accepted_of, chunk_of, finished_of, prompt_logprobs_of
from baton.client.types import (
    Accepted,
    Chunk,
    Completion,
    Finished,
    FinishReason,
    Part,
    Received,
    TokenLogprobs,
)
from baton.errors import BatonError, InternalError
from baton.v1 import inference_pb2 as pb


@dataclass(slots=True)
class _SequenceProgress:
    """Accumulated chunks of one sequence.

    Attributes:
        has_rest: its last text and parts, which have no token of their own, have arrived.
        finish_reason: as it came with the last token.
    """

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    has_rest: bool = False
    finish_reason: FinishReason = FinishReason.UNSPECIFIED
    finished: Finished | None = None

    def add(self, chunk: Chunk) -> bool:
        """Adds a chunk; returns False for one that another router has delivered already."""
        if self.finished is not None or (self.has_rest and not chunk.token_ids):
            return False
        if chunk.token_ids and chunk.position != len(self.token_ids):
            raise InternalError(
                f"tokens came for position {chunk.position}, where {len(self.token_ids)} was next"
            )
        self.has_rest = not chunk.token_ids
        if chunk.token_ids:
            self.finish_reason = chunk.finish_reason
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.top_logprobs.extend(chunk.top_logprobs)
        self.parts.extend(chunk.parts)
        return True

    def completion(self) -> Completion:
        assert self.finished is not None, "a stream that was not complete"
        return Completion(
            "".join(self.texts),
            tuple(self.token_ids),
            tuple(self.logprobs),
            tuple(self.top_logprobs),
            self.finished,
            tuple(self.parts),
        )


class Progress:
    """Progress of one generation, of one or several sequences.

    Attributes:
        accepted: acceptance by the latest router that accepted.
        is_accepted: the present router has accepted.
        num_accepted: routers that have accepted, one after the other.
        unread: chunks that the caller has not got yet.
    """

    def __init__(self, num_sequences: int) -> None:
        self.accepted: Accepted | None = None
        self.is_accepted = False
        self.num_accepted = 0
        self.finished: Finished | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.unread: deque[Chunk] = deque()
        self._num_sequences = num_sequences
        self._num_unfinished = num_sequences
        self._sequences: defaultdict[int, _SequenceProgress] = defaultdict(_SequenceProgress)
        self._failure: BatonError | None = None

    @property
    def received(self) -> list[Received]:
        """Tokens of each sequence, and its finish reason if it is complete."""
        sequences = [self._sequences[index] for index in range(self._num_sequences)]
        return [Received(s.token_ids, s.finish_reason) for s in sequences]

    @property
    def num_received(self) -> int:
        """Number of tokens received, of all sequences."""
        return sum(len(received.token_ids) for received in self.received)

    def begin_call(self) -> None:
        """Prepares for a call that asks another router for the rest."""
        self.is_accepted = False
        if not self.num_received:
            self.prompt_logprobs.clear()  # they are sent again, from the first one on

    def add(self, event: pb.GenerateResponse) -> None:
        """Adds an event. Raises `InternalError` for one that contradicts those before it, which
        ends the generation."""
        try:
            self._add(event)
        except InternalError as error:
            self.fail(error)
            raise

    def _add(self, event: pb.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.accepted, self.is_accepted = accepted_of(event.accepted), True
            self.num_accepted += 1
        elif not self.is_accepted:
            raise InternalError(f"the stream began with {kind}, not with accepted")
        elif kind == "prompt_logprobs":
            self.prompt_logprobs += prompt_logprobs_of(event.prompt_logprobs)
        elif kind == "tokens":
            chunk = chunk_of(event.tokens)
            if self._sequences[chunk.sequence_index].add(chunk):
                self.unread.append(chunk)
        elif kind == "finished":
            self._finish(finished_of(event.finished))

    def text_of(self, index: int) -> str:
        return "".join(self._sequences[index].texts)

    def token_ids_of(self, index: int) -> list[int]:
        return list(self._sequences[index].token_ids)

    def completions(self) -> list[Completion]:
        """Returns the sequences ordered by index. Valid once the stream is complete."""
        return [self._sequences[index].completion() for index in sorted(self._sequences)]

    def check_complete(self) -> None:
        """Raises `InternalError` if the stream ended before the generation."""
        if self.finished is None:
            raise InternalError("the stream ended before the generation did")

    def fail(self, error: BatonError) -> BatonError:
        """Stores and returns the error, which later reads raise again."""
        self._failure = error
        return error

    def check_not_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _finish(self, finished: Finished) -> None:
        sequence = self._sequences[finished.sequence_index]
        if sequence.finished is None:
            self._num_unfinished -= 1
        sequence.finished = finished
        if self._num_unfinished == 0:
            self.finished = finished
