"""Conversion between messages of workers and the router's data."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.duration_pb2 import Duration

from baton.errors import InternalError
from baton.rpc.attempt_id import attempt_id
from baton.rpc.encoder_inputs import encoder_input_to_message
from baton.rpc.params import params_to_message
from baton.sampling import SamplingParams
from baton.serving.deadline import Deadline
from baton.v1 import decode_pb2, encode_pb2, kv_sharing_pb2, kv_transfer_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb
from baton_router.call.ending import Ending, FinishReason
from baton_router.call.output_delta import OutputDelta
from baton_router.call.request import Request, Work
from baton_router.call.tokens import Tokens, TopLogprobs
from baton_router.lifecycle.attempts.return_cost import ReturnCost
from baton_router.lifecycle.worker_events import (
    Admitted,
    Draining,
    Encoded,
    KvReady,
    PoolResult,
    Preempted,
    PrefillResult,
    PrefillStarted,
    PromptScores,
    Received,
    Released,
    SequenceEnded,
    StartedAlone,
    Suspended,
    WorkerEvent,
)
from baton_router.routing.fleet.member import Member
from baton_router.routing.fleet.worker_model import WorkDone
from baton_router.routing.placement.encoder_sources import EncoderChoice

DecodeRequest = decode_pb2.DecodeGenerateRequest
PrefixSource = prefill_pb2.PrefixSource
EncoderSource = prefill_pb2.EncoderSource
EncodeRequest = encode_pb2.EncodeRequest
Response = (
    prefill_pb2.PrefillResponse
    | prefill_pb2.PoolResponse
    | decode_pb2.DecodeGenerateResponse
    | encode_pb2.EncodeResponse
)
"""Message of a worker that runs a request."""

_REASONS = {
    pb.FINISH_REASON_END_OF_SEQUENCE: FinishReason.END_OF_SEQUENCE,
    pb.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    pb.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_REASONS_TO_MESSAGE = {reason: message for message, reason in _REASONS.items()}


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9


def duration(length: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(length * 1e9))
    return duration


def _until(moment: Deadline | None) -> Duration | None:
    """Returns the time until a moment, negative once it has passed."""
    return None if moment is None else duration(moment.expires_at - moment.clock())


def new_lease_id() -> bytes:
    return secrets.token_bytes(16)


def handle(
    source: Member, lease_id: bytes, work: Work, block_hashes: list[bytes]
) -> kv_transfer_pb2.KvHandle:
    """Returns the handle by which the decode worker claims the lease of this attempt."""
    return kv_transfer_pb2.KvHandle(
        version=1,
        source_worker=source.record.id,
        source_endpoint=source.record.kv_endpoint,
        source_epoch=source.record.epoch,
        lease_id=lease_id,
        baton_version=source.record.version,
        fingerprint=source.record.fingerprint,
        layouts=source.layouts,
        num_tokens=len(work.token_ids),
        block_hashes=b"".join(block_hashes),
        integrity=kv_transfer_pb2.INTEGRITY_BY_CONNECTOR,
        tenant=work.request.tenant.name,
    )


def decode_request(
    work: Work,
    lease_id: bytes,
    kv_handle: kv_transfer_pb2.KvHandle | None,
    return_cost: ReturnCost | None = None,
    first_token_due: Deadline | None = None,
    encoder_sources: Sequence[prefill_pb2.EncoderSource] = (),
) -> decode_pb2.DecodeGenerateRequest:
    """Returns the call's request, without images. `kv_handle` None: the decode worker computes the
    prompt. `return_cost` None: it may not give the request back. `first_token_due` None: at any
    time. `encoder_sources`: without a handle only."""
    message = decode_pb2.DecodeGenerateRequest(
        request_id=attempt_id(work.request.request_id, lease_id),
        token_ids=work.token_ids,
        num_prompt_tokens=len(work.request.token_ids),
        sampling=params_to_message(work.params),
        handle=kv_handle,
        priority=work.request.priority,
        tenant=work.request.tenant.name,
        salt=work.request.tenant.salt,
        return_cost=None if return_cost is None else _return_cost(return_cost),
        outputs=map(_sequence_output, work.outputs),
        first_token_due=_until(first_token_due),
        encoder_sources=encoder_sources,
    )
    if kv_handle is not None:
        message.sampling.ClearField("prompt_logprobs")  # the source reports them
    return message


def _sequence_output(output: tuple[int, ...] | None) -> decode_pb2.SequenceOutput:
    return decode_pb2.SequenceOutput(token_ids=output or (), is_complete=output is None)


def _return_cost(cost: ReturnCost) -> decode_pb2.ReturnCost:
    return decode_pb2.ReturnCost(
        fixed=duration(cost.fixed),
        per_token=duration(cost.per_token),
        recompute_token=duration(cost.recompute_token),
    )


def end_sequence_request(
    request: decode_pb2.DecodeGenerateRequest,
    member: Member,
    index: int,
    reason: FinishReason,
) -> decode_pb2.EndSequenceRequest:
    """Returns the request to end one sequence of `request` on this worker."""
    return decode_pb2.EndSequenceRequest(
        request_id=request.request_id,
        epoch=member.record.epoch,
        sequence_index=index,
        reason=reason_to_message(reason),
    )


def share_request(
    lease_id: bytes, block_hashes: list[bytes], claimant: str, tenant: str
) -> kv_sharing_pb2.ShareRequest:
    return kv_sharing_pb2.ShareRequest(
        lease_id=lease_id,
        block_hashes=b"".join(block_hashes),
        claimant=claimant,
        tenant=tenant,
    )


def hand_over_request(
    request: decode_pb2.DecodeGenerateRequest, lease_id: bytes, claimant: str, tenant: str
) -> decode_pb2.HandOverRequest:
    """Returns the request to suspend `request` so that `claimant` can resume it."""
    return decode_pb2.HandOverRequest(
        request_id=request.request_id, lease_id=lease_id, claimant=claimant, tenant=tenant
    )


def prefix_source(holder: Member, lease_id: bytes, num_blocks: int) -> prefill_pb2.PrefixSource:
    return prefill_pb2.PrefixSource(
        worker=holder.record.id,
        endpoint=holder.record.kv_endpoint,
        epoch=holder.record.epoch,
        lease_id=lease_id,
        num_blocks=num_blocks,
    )


def encoder_source(index: int, holder: Member, lease_id: bytes) -> prefill_pb2.EncoderSource:
    """Returns the source of the output of the request's encoder input `index`."""
    return prefill_pb2.EncoderSource(
        input=index,
        worker=holder.record.id,
        endpoint=holder.record.kv_endpoint,
        epoch=holder.record.epoch,
        lease_id=lease_id,
    )


def encode_request(
    work: Work,
    lease_id: bytes,
    choice: EncoderChoice,
    claimant: str,
    first_token_due: Deadline | None = None,
) -> encode_pb2.EncodeRequest:
    """Returns the call's request, without the encoder input if it needs tensors. `first_token_due`
    None: at any time."""
    request = work.request
    message = encode_pb2.EncodeRequest(
        request_id=attempt_id(request.request_id, lease_id),
        lease_id=lease_id,
        claimant=claimant,
        tenant=request.tenant.name,
        priority=request.priority,
        first_token_due=_until(first_token_due),
        only_cached=choice.only_cached,
    )
    if choice.only_cached:
        cached = replace(request.encoder_inputs[choice.input], tensors={})
        message.encoder_input.CopyFrom(encoder_input_to_message(cached))
    return message


def prefill_request(
    work: Work,
    lease_id: bytes,
    decode_worker: str,
    source: prefill_pb2.PrefixSource | None = None,
    first_token_due: Deadline | None = None,
    encoder_sources: Sequence[prefill_pb2.EncoderSource] = (),
) -> prefill_pb2.PrefillRequest:
    """Returns the call's request, without images. `source` None: no prefix is fetched.
    `first_token_due` None: at any time."""
    params, has_several = work.params, work.params.num_sequences > 1
    if has_several:
        # Its token is not used, so compiling a grammar or searching beams would be in vain.
        params = SamplingParams(
            max_tokens=params.max_tokens, prompt_logprobs=params.prompt_logprobs
        )
    return prefill_pb2.PrefillRequest(
        request_id=attempt_id(work.request.request_id, lease_id),
        lease_id=lease_id,
        token_ids=work.token_ids,
        num_prompt_tokens=len(work.request.token_ids),
        sampling=params_to_message(params),
        decode_worker=decode_worker,
        has_several_sequences=has_several,
        priority=work.request.priority,
        tenant=work.request.tenant.name,
        salt=work.request.tenant.salt,
        source=source,
        first_token_due=_until(first_token_due),
        encoder_sources=encoder_sources,
    )


def pool_request(
    request: Request, lease_id: bytes, due: Deadline | None = None
) -> prefill_pb2.PoolRequest:
    """Returns the call's request. `due` None: at any time."""
    return prefill_pb2.PoolRequest(
        request_id=attempt_id(request.request_id, lease_id),
        token_ids=request.token_ids,
        priority=request.priority,
        salt=request.tenant.salt,
        first_token_due=_until(due),
    )


def event_of(message: Response) -> Received:
    """Returns the event of a message. Raises `InternalError` if it contradicts itself."""
    kind = message.WhichOneof("event")
    if kind == "tokens":
        return delta_of(message.tokens)  # type: ignore[union-attr]
    make = _EVENTS.get(kind or "")
    return WorkerEvent() if make is None else make(getattr(message, kind or ""))


def _result(
    message: prefill_pb2.PrefillResult | prefill_pb2.PoolResult,
) -> PrefillResult | PoolResult:
    done = work_done(message.work_done)
    if isinstance(message, prefill_pb2.PoolResult):
        return PoolResult(done, message.values)
    return PrefillResult(done, list(map(_first_token, message.first_tokens)))


def _first_token(message: prefill_pb2.FirstToken) -> OutputDelta:
    logprobs = [message.logprob] if message.HasField("logprob") else ()
    tops = [_top(message.top_logprobs)] if message.HasField("top_logprobs") else ()
    tokens = Tokens(message.position, [message.token_id], logprobs, tops)
    return OutputDelta(0, tokens, finish_reason=reason_of(message.finish_reason))


def _started(message: prefill_pb2.PrefillStarted) -> PrefillStarted:
    return PrefillStarted(
        seconds(message.queue_time), seconds(message.elapsed), message.num_cached_tokens
    )


def _kv_ready(message: decode_pb2.KvReady) -> KvReady:
    return KvReady(
        work_done(message.work_done),
        seconds(message.exposed),
        message.num_transferred_blocks,
        message.num_transferred_bytes,
        message.num_reused_blocks,
        message.connector,
    )


def _encoded(message: encode_pb2.Encoded) -> Encoded:
    return Encoded(
        work_done(message.work_done),
        message.was_cached,
        seconds(message.queue_time),
        seconds(message.elapsed),
    )


def _sequence_ended(message: decode_pb2.DecodeFinished) -> SequenceEnded:
    score = message.score if message.HasField("score") else None
    reason = reason_of(message.reason) or FinishReason.END_OF_SEQUENCE
    return SequenceEnded(message.sequence_index, Ending(reason, score=score))


def _prompt_scores(message: pb.PromptLogprobs) -> PromptScores:
    tops = list(map(_top, message.top_logprobs))
    return PromptScores(message.position, message.logprobs[:], tops)


_EVENTS: dict[str, Callable[[Any], WorkerEvent]] = {
    "admitted": lambda _: Admitted(),
    "started": _started,
    "prefill_started": lambda m: StartedAlone(work_done(m.work_done), _started(m)),
    "prompt_logprobs": _prompt_scores,
    "result": _result,
    "kv_ready": _kv_ready,
    "finished": _sequence_ended,
    "draining": lambda _: Draining(),
    "suspended": lambda m: Suspended(m.lease_id, m.num_tokens),
    "preempted": lambda _: Preempted(),
    "encoded": _encoded,
    "released": lambda _: Released(),
}


def work_done(message: prefill_pb2.WorkDone) -> WorkDone:
    return WorkDone(
        message.num_steps,
        message.num_prompt_tokens,
        message.num_prompt_pairs,
        message.num_decode_tokens,
        seconds(message.busy),
        message.num_encoder_tokens,
    )


def num_shared_blocks(message: kv_sharing_pb2.ShareResponse) -> int:
    """Returns how many blocks another worker keeps."""
    return message.shared.num_blocks


def decoded(data: bytes) -> OutputDelta | decode_pb2.DecodeGenerateResponse:
    """Parses an event of a decode worker for a request without log-probabilities. Its tokens become
    a delta at once, and no message object crosses the router."""
    event = decode_pb2.DecodeGenerateResponse.FromString(data)
    return _plain_delta(event.tokens) if event.HasField("tokens") else event


def delta_of(message: decode_pb2.DecodeTokens) -> OutputDelta:
    """Returns the tokens with their log-probabilities, still without text. Raises `InternalError`
    if some of them are missing."""
    delta = _plain_delta(message)
    tokens = delta.tokens
    if message.logprobs or message.top_logprobs:
        tokens.logprobs = list(message.logprobs)
        tokens.tops = list(map(_top, message.top_logprobs))
        if not {len(tokens.logprobs), len(tokens.tops)} <= {0, len(tokens)}:
            raise InternalError(
                f"{len(tokens)} tokens came with {len(tokens.logprobs)} log-probabilities and "
                f"those of {len(tokens.tops)} most likely ones"
            )
    return delta


def _plain_delta(message: decode_pb2.DecodeTokens) -> OutputDelta:
    # A slice of repeated numbers is a list, made twice as fast as by `list`.
    tokens = Tokens(message.position, message.token_ids[:])
    return OutputDelta(message.sequence_index, tokens, "", reason_of(message.finish_reason))


def reason_of(message: pb.FinishReason.ValueType) -> FinishReason | None:
    """Returns a reason, None if it is unspecified. One that only the sender knows, which may be
    newer, counts as the model's own end."""
    return _REASONS.get(message, FinishReason.END_OF_SEQUENCE) if message else None


def reason_to_message(reason: FinishReason) -> pb.FinishReason.ValueType:
    return _REASONS_TO_MESSAGE[reason]


def _top(message: pb.TopLogprobs) -> TopLogprobs:
    return TopLogprobs(tuple(message.token_ids), tuple(message.logprobs))
