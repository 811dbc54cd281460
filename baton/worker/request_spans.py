"""Spans of one request on one worker: its call, its waiting times, and the computation for it.

Made of the engine's step reports, and only for a request whose trace is sampled. While nothing is
computed or fetched for it, the request waits; so its spans leave no gap.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from opentelemetry import context as otel_context
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.util.types import AttributeValue

from baton.engine.client import SequenceStream
from baton.engine.metering.step_times import StepTimes, TimeSpent
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose
from baton.engine.scheduler.sequences.config import Preemption
from baton.serving.telemetry.stages import begun_stage, failed, is_sampled, past_stage, wall_ns

# A gap of fewer seconds than this between two consecutive steps is not waiting.
_BETWEEN_STEPS = 0.001

Attributes = Mapping[str, AttributeValue]


def request_spans(
    worker: str, request: EngineRequest, stream: SequenceStream
) -> AbstractContextManager[object]:
    """Records spans of a request for the length of the block, if its trace is sampled."""
    return RequestSpans(worker, request, stream) if is_sampled() else nullcontext()


class RequestSpans:
    """Watcher of a request's stream. Spans: `prefill.call` or `decode.call` from the request's
    arrival to the end of the call, in which the block runs; as its children `prefill.queue` or
    `decode.queue` until computation begins, `prefill.chunk` for each chunk of the prompt, and
    `decode` from the step after the prompt to the end of the call."""

    def __init__(self, worker: str, request: EngineRequest, stream: SequenceStream) -> None:
        self._request = request
        self._stream = stream
        self._common = {"baton.worker": worker, "baton.attempt.id": request.request_id}
        self._covered_until = request.arrival_time
        self._prefills = request.purpose is Purpose.PREFILL or request.kv_source is KvSource.LOCAL
        self._generates = request.purpose is not Purpose.PREFILL and not request.is_pooled
        name = "decode.call" if self._generates else "prefill.call"
        began = request.arrival_time
        self._call = begun_stage(name, began, self._common, kind=SpanKind.SERVER)
        self._context = set_span_in_context(self._call)
        self._num_computed: int | None = None
        self._is_fetching = False
        self._decode: _Decode | None = None

    def __enter__(self) -> Self:
        self._stream.watcher = self
        self._attached = otel_context.attach(self._context)
        return self

    def __exit__(self, _type: object, error: BaseException | None, *_: object) -> None:
        self._stream.watcher = None
        otel_context.detach(self._attached)
        if self._decode is not None:
            self._decode.end(error)
        elif error is not None and not self._is_fetching:
            self._wait_until(time.monotonic(), error)
        if error is not None:
            failed(self._call, error)
        self._call.end()

    def allocated(self) -> None:
        self._wait_until(time.monotonic())
        self._is_fetching = True  # covered by the transfer's own span

    def fetch_ended(self) -> None:
        self._covered_until = time.monotonic()
        self._is_fetching = False

    def preempted(self, mode: Preemption, times: StepTimes) -> None:
        if self._decode is not None:
            self._decode.preempted(mode, times)

    def stepped(self, update: SequenceUpdate, times: StepTimes) -> None:
        self._is_fetching = False
        if self._decode is not None:
            self._decode.stepped(update, times)
        elif self._prefills and update.num_computed_tokens <= len(self._request.token_ids):
            self._computed_chunk(update, times)
        else:
            self._wait_until(times.started)
            self._decode = self._begin_decode(self._covered_until, times)
            self._decode.stepped(update, times)

    def _computed_chunk(self, update: SequenceUpdate, times: StepTimes) -> None:
        if self._num_computed is None or times.started - self._covered_until > _BETWEEN_STEPS:
            self._wait_until(times.started)
        begin = update.num_cached_tokens if self._num_computed is None else self._num_computed
        end = max(begin, min(update.num_computed_tokens, len(self._request.token_ids)))
        details = {
            "baton.prefill.begin": begin,
            "baton.prefill.end": end,
            "baton.prefill.num_cached_tokens": update.num_cached_tokens,
            **_times(times.spent),
        }
        self._record_span("prefill.chunk", times.ended, details)
        self._num_computed = end
        if update.token_id is not None and self._generates:
            self._decode = self._begin_decode(times.ended, times)
            self._decode.follows(update, times)

    def _begin_decode(self, began: float, times: StepTimes) -> "_Decode":
        span = begun_stage("decode", began, self._common, self._context)
        return _Decode(span, self._request, began, times)

    def _wait_until(self, moment: float, error: BaseException | None = None) -> None:
        name = "prefill.queue" if self._prefills else "decode.queue"
        self._record_span(name, moment, {}, error)

    def _record_span(
        self, name: str, until: float, details: Attributes, error: BaseException | None = None
    ) -> None:
        """Records a span from the end of the previous one to `until`."""
        began, self._covered_until = self._covered_until, max(until, self._covered_until)
        if until > began:
            attributes = {**self._common, **details}
            past_stage(name, began, until, attributes, error, self._context)


class _Decode:
    """Span `decode`. The engine's step times are attributes, since a span for every token would be
    too many."""

    def __init__(self, span: Span, request: EngineRequest, began: float, times: StepTimes) -> None:
        self._span = span
        self._began = began
        self._before = self._after = times.before
        self._num_tokens = 0
        self._reasons: list[FinishReason] = []
        num_received = len(request.token_ids) - request.num_prompt_tokens
        num_received += sum(map(len, request.unfinished))
        if num_received:
            self._event("migration", began, {"baton.num_received_tokens": num_received})

    def stepped(self, update: SequenceUpdate, times: StepTimes) -> None:
        """Adds a step to the span."""
        self._after = times.after
        self._note(update, times)

    def preempted(self, mode: Preemption, times: StepTimes) -> None:
        """Records the preemption of one of its sequences in a step."""
        self._event("preemption", times.started, {"baton.preemption.mode": mode.value})

    def follows(self, update: SequenceUpdate, times: StepTimes) -> None:
        """Begins the span after a step that computed its first token."""
        self._before = self._after = times.after
        self._note(update, times)

    def end(self, error: BaseException | None) -> None:
        """Ends the span now."""
        now = time.monotonic()
        spent = self._after.since(self._before)
        details = {
            "baton.decode.num_tokens": self._num_tokens,
            "baton.decode.num_steps": spent.num_steps,
            **_times(spent),
            "baton.time.stream_wait": max(0.0, now - self._began - spent.seconds),
            "baton.decode.finish_reasons": [reason.name.lower() for reason in self._reasons],
        }
        self._span.set_attributes(details)
        if error is not None and not self._reasons:  # else the stream was read to its end
            failed(self._span, error)
        self._span.end(wall_ns(now))

    def _note(self, update: SequenceUpdate, times: StepTimes) -> None:
        if update.token_id is not None:
            if not self._num_tokens:
                self._event("first token", times.ended, {})
            self._num_tokens += 1
        reason = update.finish_reason
        if reason is None:
            return
        self._reasons.append(reason)
        if reason is FinishReason.SUSPENDED:
            self._event("migration", times.ended, {"baton.num_given_tokens": update.position + 1})

    def _event(self, name: str, moment: float, details: Attributes) -> None:
        self._span.add_event(name, details, wall_ns(moment))


def _times(spent: TimeSpent) -> dict[str, AttributeValue]:
    """Returns the step times in seconds, as attributes."""
    return {
        "baton.time.schedule": spent.schedule,
        "baton.time.forward": spent.forward,
        "baton.time.sample": spent.sample,
    }
