"""Trace of one request at its router: the span `generate`, and links between its attempts.

Recorded afterwards, from data that the answer has anyway; no message costs anything.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from opentelemetry.trace import Link, Span, SpanContext
from opentelemetry.util.types import AttributeValue

from baton.sampling import SamplingParams
from baton.serving.telemetry.stages import past_stage, stage, stage_of_call, wall_ns
from baton_router.call.failure import AttemptFailure, FailureKind
from baton_router.call.generate_call import Conversation, GenerateCall
from baton_router.call.request import Request, RequestOutcome
from baton_router.text.model_card import ModelCard

Attributes = dict[str, AttributeValue]

_current: "ContextVar[RequestTrace | None]" = ContextVar("baton_request_trace", default=None)

_CANNOT_TELL = (FailureKind.LOST, FailureKind.SILENT)


class RequestTrace:
    """Trace of one request that is sampled."""

    def __init__(
        self, span: Span, call: GenerateCall | None, card: ModelCard, *, with_content: bool
    ) -> None:
        self._span = span
        self._with_content = with_content
        self._call = call
        self._card = card
        self._num_attempts = 0
        self._placed: SpanContext | None = None
        self._admitted_at: float | None = None
        self._failure: AttemptFailure | None = None
        self._failed_at = 0.0
        span.set_attributes(_of_call(call, card))

    def ended(self, outcome: RequestOutcome) -> None:
        """Sets the attributes of a request that has ended."""
        account, arrived = outcome.account, outcome.account.timings.arrived
        first_token = account.timings.first_token
        self._span.set_attributes(_of_request(outcome.request))
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": account.num_prompt_tokens,
                "gen_ai.usage.output_tokens": account.num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": account.num_cached_prompt_tokens,
                "gen_ai.response.finish_reasons": _finish_reasons(outcome),
                "baton.num_attempts": self._num_attempts,
                "baton.num_migrations": account.num_migrations,
            }
        )
        if first_token is not None:
            self._span.set_attribute(
                "gen_ai.response.time_to_first_chunk", round(first_token - arrived, 6)
            )
            self._span.add_event("first token", timestamp=wall_ns(first_token))
        if self._with_content and self._call is not None:
            self._span.set_attributes(_content(self._call, outcome, self._card))

    @contextmanager
    def placing(self) -> Iterator[Span]:
        """Traces the next attempt's placement in the block, linked to the failed one before."""
        failure, self._failure = self._failure, None
        links: tuple[Link, ...] = ()
        if failure is not None:
            details = _of_failure(failure)
            past_stage("recover", self._failed_at, time.monotonic(), details)
            links = (Link(self._placed, details),) if self._placed is not None else ()
        self._num_attempts += 1
        with stage("place", {"baton.attempt": self._num_attempts}, links) as span:
            yield span
        self._placed, self._admitted_at = span.get_span_context(), None

    def admitted(self) -> None:
        """Records that all workers of this attempt have admitted it."""
        self._admitted_at = time.monotonic()

    def failed(
        self, failure: AttemptFailure, *, handed_over_at: float | None, is_prefilling: bool
    ) -> None:
        """Records a failed attempt. The router makes the spans of a worker that was lost.

        Args:
            handed_over_at: monotonic seconds when the decode worker had the prompt's blocks; None
                if it had not.
            is_prefilling: the prefill worker was computing the prompt.
        """
        self._failure, self._failed_at = failure, time.monotonic()
        if failure.kind not in _CANNOT_TELL or self._admitted_at is None:
            return
        source, decode = failure.pair
        began, now = self._admitted_at, self._failed_at
        details: Attributes = {"baton.worker": failure.worker, "baton.reported_by": "router"}
        if failure.worker == decode:
            before = "kv.transfer" if source else "prefill.queue"
            if handed_over_at is None:
                past_stage(before, began, now, details, failure.error)
                return
            past_stage(before, began, handed_over_at, details)
            past_stage("decode", handed_over_at, now, details, failure.error)
        else:
            name = "prefill.chunk" if is_prefilling else "prefill.queue"
            past_stage(name, began, now, details, failure.error)


@contextmanager
def tracing_request(
    call: GenerateCall | None, card: ModelCard, *, with_content: bool = False
) -> "Iterator[RequestTrace | None]":
    """Opens the span `generate` for the block, in the caller's trace or a new one. Yields None if
    it is not recorded.

    Args:
        call: None: the request is for a pooled output, or its call could not be read.
        with_content: the span includes the texts of prompt and answer.
    """
    with stage_of_call("generate") as span:
        is_seen = span.is_recording()
        begun = RequestTrace(span, call, card, with_content=with_content) if is_seen else None
        _current.set(begun)
        yield begun


@contextmanager
def placing() -> Iterator[Span]:
    """Opens a span `place` for the block, of the request that is being served."""
    request = _current.get()
    with stage("place") if request is None else request.placing() as span:
        yield span


def admitted() -> None:
    """Records that all workers of the request's present attempt have admitted it."""
    request = _current.get()
    if request is not None:
        request.admitted()


def failed(failure: AttemptFailure, *, handed_over_at: float | None, is_prefilling: bool) -> None:
    """Records a failure of the request's present attempt; arguments as of `RequestTrace.failed`."""
    request = _current.get()
    if request is not None:
        request.failed(failure, handed_over_at=handed_over_at, is_prefilling=is_prefilling)


def _of_failure(failure: AttemptFailure) -> Attributes:
    return {
        "baton.attempt_failure.kind": failure.kind.name.lower(),
        "baton.attempt_failure.worker": failure.worker,
        "baton.attempt_failure.reason": str(failure.error),
    }


def _of_call(call: GenerateCall | None, card: ModelCard) -> Attributes:
    operation = "chat" if call is not None and call.kind == "chat" else "text_completion"
    if card.pooling is not None:
        operation = "embeddings"
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": card.name,
        "baton.request.id": "" if call is None else call.request_id,
        "gen_ai.request.stream": True,
    }


def _of_request(request: Request) -> Attributes:
    params, tenant = request.params, request.tenant.name
    return {
        "gen_ai.response.id": request.request_id,
        "baton.request.id": request.request_id,
        "baton.tenant": tenant,
        "baton.request.priority": request.priority,
        "baton.request.num_received_tokens": sum(map(len, request.received)),
        **_of_params(params),
    }


def _of_params(params: SamplingParams) -> Attributes:
    """Returns the sampling parameters as attributes, without any text of the user's."""
    return {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature or 0.0,
        "gen_ai.request.top_k": float(params.top_k or 0),
        "gen_ai.request.top_p": params.top_p or 1.0,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.choice.count": params.n,
        # The seed is an unsigned 64-bit integer; attributes are signed.
        "gen_ai.request.seed": (params.seed or 0) & (2**63 - 1),
        "baton.request.num_sequences": params.num_sequences,
    }


def _content(call: GenerateCall, outcome: RequestOutcome, card: ModelCard) -> Attributes:
    details: Attributes = {}
    given = call.input
    if isinstance(given, str):
        details["gen_ai.input.messages"] = json.dumps([_part("user", given)])
    elif isinstance(given, Conversation):
        parts = [
            _part(turn.role, "\n".join(part for part in turn.parts if isinstance(part, str)))
            for turn in given.turns
        ]
        details["gen_ai.input.messages"] = json.dumps(parts)
    texts = [card.tokenizer.decode(token_ids) for token_ids in outcome.token_ids]
    details["gen_ai.output.messages"] = json.dumps(
        [
            _part("assistant", text) | {"finish_reason": reason}
            for text, reason in zip(texts, _finish_reasons(outcome), strict=True)
        ]
    )
    return details


def _finish_reasons(outcome: RequestOutcome) -> list[str]:
    return [reason.word for reason in outcome.finish_reasons]


def _part(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}
