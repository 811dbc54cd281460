"""Embeddings in OpenAI's format, and scores of pairs of texts in that of other servers."""

import base64
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from starlette.types import Send

from baton.errors import InvalidArgumentError
from baton.serving.deadline import Deadline
from baton.serving.tenant import Caller
from baton_router.apis.answers.http_call import ERROR_GRACE_SECONDS, Held, in_trace_of
from baton_router.apis.edge.body.field_names import InTerms
from baton_router.apis.openai.field_names import score_fields
from baton_router.apis.openai.schemas import (
    BatonOptions,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
    TokenUsage,
)
from baton_router.call.generate_call import EmbedCall, ScoreCall
from baton_router.served.served_models import Models


class PooledHttpCall:
    """Call over HTTP: one request and its answer, which is written at once.

    Args:
        request_id: the ids of its requests begin with it.
        answer: computes the answer.
    """

    def __init__(
        self,
        caller: Caller,
        deadline: Deadline,
        request_id: str,
        answer: Callable[[], Awaitable[Struct]],
    ) -> None:
        self._caller = caller
        self._deadline = deadline
        self.request_id = request_id
        self._answer = answer

    async def write(self, send: Send, _in_terms: InTerms, body: Held) -> None:
        """Writes the answer. Raises if the request is refused or fails. Leaves `body` at once."""
        async with body:
            pass
        with in_trace_of(self._caller):
            async with self._deadline.limit(ERROR_GRACE_SECONDS):
                content = msgspec.json.encode(await self._answer())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


class PooledOutputs:
    """Factory of exchanges of `/v1/embeddings`, `/v1/score` and rerank requests.

    Args:
        timeout: deadline in seconds of requests without one.
    """

    def __init__(self, models: Models, timeout: float) -> None:
        self._models = models
        self._timeout = timeout

    async def embed(self, body: EmbeddingRequest, caller: Caller) -> PooledHttpCall:
        """Makes the exchange of `/v1/embeddings`. Raises `InvalidArgumentError`."""
        deadline = self._deadline(body.baton)
        call = EmbedCall(
            _inputs(body.input),
            body.model,
            secrets.token_hex(8),
            body.baton.priority,
            body.dimensions,
        )

        async def answer() -> EmbeddingResponse:
            response = await self._models.embed(call, caller, deadline)
            is_base64 = body.encoding_format == "base64"
            data = [
                Embedding(index=i, embedding=_base64(vector) if is_base64 else vector.tolist())
                for i, vector in enumerate(response.vectors.astype("<f4"))
            ]
            usage = _usage(response.num_prompt_tokens)
            return EmbeddingResponse(data=data, model=response.model, usage=usage)

        return PooledHttpCall(caller, deadline, call.request_id, answer)

    async def score(self, body: ScoreRequest, caller: Caller) -> PooledHttpCall:
        """Makes the exchange of `/v1/score`. Raises `InvalidArgumentError`."""
        deadline = self._deadline(body.baton)
        call = ScoreCall(_pairs(body), body.model, secrets.token_hex(8), body.baton.priority)

        async def answer() -> ScoreResponse:
            response = await self._models.score(call, caller, deadline)
            return ScoreResponse(
                id=response.request_id,
                created=int(time.time()),
                model=response.model,
                data=[Score(index=i, score=score) for i, score in enumerate(response.scores)],
                usage=_usage(response.num_prompt_tokens),
            )

        return PooledHttpCall(caller, deadline, call.request_id, answer)

    async def rerank(
        self, body: RerankRequest, caller: Caller, *, has_documents: bool
    ) -> PooledHttpCall:
        """Makes the exchange of a rerank request. `has_documents`: the answer has the documents
        unless the request says. Raises `InvalidArgumentError`."""
        deadline = self._deadline(body.baton)
        texts = [given if isinstance(given, str) else given.text for given in body.documents]
        pairs = [(body.query, text) for text in texts]
        call = ScoreCall(pairs, body.model, secrets.token_hex(8), body.baton.priority)
        is_told = has_documents if body.return_documents is None else body.return_documents

        async def answer() -> RerankResponse:
            response = await self._models.score(call, caller, deadline)
            ranked = sorted(enumerate(response.scores), key=lambda scored: -scored[1])
            return RerankResponse(
                id=response.request_id,
                model=response.model,
                results=[
                    RerankResult(
                        index=at,
                        relevance_score=score,
                        document=RerankDocument(texts[at]) if is_told else None,
                    )
                    for at, score in ranked[: body.top_n]
                ],
                usage=_usage(response.num_prompt_tokens),
            )

        return PooledHttpCall(caller, deadline, call.request_id, answer)

    def _deadline(self, options: BatonOptions) -> Deadline:
        given = options.timeout_s
        return Deadline.after(self._timeout if given is None else given)


def _inputs(given: str | list[Any]) -> Sequence[str | Sequence[int]]:
    """Returns the inputs: of a text or a list of token ids, one."""
    items: Sequence[Any] = [given] if isinstance(given, str) else given
    return [items] if items and isinstance(items[0], int) else items


def _pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    names = score_fields(body)
    firsts, seconds = (_texts(name, getattr(body, name)) for name in names)
    for name in {"text_1", "text_2", "queries", "documents"} - set(names):
        if getattr(body, name) is not None:
            raise InvalidArgumentError(name, f"is set beside {names[0]}; give one pair of fields")
    if len(firsts) == 1:
        firsts *= len(seconds)
    if len(firsts) != len(seconds):
        raise InvalidArgumentError(
            names[0],
            f"has {len(firsts)} texts for {len(seconds)} of {names[1]}; expected 1 or as many",
        )
    return list(zip(firsts, seconds, strict=True))


def _texts(name: str, given: str | list[str] | None) -> list[str]:
    if given is None:
        raise InvalidArgumentError(name, "is missing; set text_1 and text_2")
    return [given] if isinstance(given, str) else given


def _base64(vector: "np.ndarray[Any, np.dtype[np.float32]]") -> str:
    return base64.b64encode(vector.tobytes()).decode()


def _usage(num_tokens: int) -> TokenUsage:
    return TokenUsage(num_tokens, num_tokens)
