"""Writer of one answer over HTTP, whole or as a stream of server-sent events: the seam between the
exchange, which reads the events of requests, and the formats of the APIs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from baton.sampling import SamplingDefaults
from baton_router.apis.answers.sequence_reader import Reader, SequenceDelta
from baton_router.apis.edge.errors import Failure
from baton_router.text.token_bytes import TokenBytes

Json = dict[str, Any]
Extra = Callable[[Sequence[Reader]], Json]
"""Function that makes the answer's field `baton`, given its requests that have ended."""

COMMENT = b": keep-alive\n\n"
"""Server-sent comment, which clients skip."""

DONE = b"data: [DONE]\n\n"
"""Last words of a stream of OpenAI's and Open Responses' APIs."""

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class AnswerStart:
    """Beginning of an answer: what is known of it before the first event.

    Attributes:
        request_id: of the answer; the ids of its requests begin with it.
        model: name of the model that answers.
        readers: one for each request.
        is_parsed: its pieces have parts.
        defaults: values of sampling parameters that the request leaves unset.
        make_extra: makes the answer's field `baton`; None: there is none.
        tokens: bytes of the model's tokens, for log-probabilities; None: none are told.
    """

    request_id: str
    model: str
    readers: Sequence[Reader]
    is_parsed: bool
    defaults: SamplingDefaults
    make_extra: Extra | None
    tokens: TokenBytes | None = None


WriterOf = Callable[[AnswerStart], "AnswerWriter"]
"""Function that makes the writer of an answer."""


class AnswerWriter(Protocol):
    """Writer of one answer in the format of an API.

    Attributes:
        keep_alive: piece of a stream without content, for one that is silent.
        opens_with_usage: the beginning of a stream tells the tokens of the prompt that were cached.
    """

    keep_alive: bytes
    opens_with_usage: bool

    def opening(self) -> bytes:
        """Returns the beginning of a stream. The first request is accepted; if `opens_with_usage`,
        a prompt is computed, too."""

    def part(self, update: SequenceDelta) -> bytes:
        """Returns a piece of a stream; empty if the client gets nothing of it."""

    async def closing(self) -> bytes:
        """Returns the end of a stream, after all pieces."""

    def failed(self, failure: Failure) -> bytes:
        """Returns the end of a stream that failed after it had begun."""

    async def whole(self, updates: Sequence[SequenceDelta]) -> Json:
        """Returns a whole answer from all its pieces."""


def encoded(content: Any) -> bytes:
    """Returns the JSON text of an answer."""
    return _ENCODER.encode(content)


def event(content: Mapping[str, Any]) -> bytes:
    """Returns a server-sent event without a name."""
    return b"data: " + encoded(content) + b"\n\n"


def named_event(content: Json) -> bytes:
    """Returns a server-sent event that is named by its field `type`."""
    name: str = content["type"]
    return b"event: " + name.encode() + b"\n" + event(content)
