"""Conversion of the decode service's requests and responses from and to messages of `baton.v1`."""

from collections.abc import Iterator

from google.protobuf.duration_pb2 import Duration

from baton.engine.metering.step_times import StepTimes
from baton.engine.metering.work_meter import WorkDone
from baton.engine.outputs import SequenceUpdate
from baton.engine.ranking import ranked
from baton.engine.request import FinishReason, ReturnCost
from baton.errors import InvalidArgumentError
from baton.sampling import SamplingParams
from baton.v1 import decode_pb2 as pb
from baton.v1 import prefill_pb2
from baton.worker.engine_messages import (
    finish_reason_to_message,
    prefill_started,
    top_logprobs_to_messages,
    work_done_to_message,
)
from baton_kvtransfer.lease.handle import FirstToken, TransferReport

# A ranked sequence is sent as a whole, and so is what has waited for a slow stream. Routers take
# four times as many.
_TOKENS_PER_MESSAGE = 1024


def return_cost(message: pb.DecodeGenerateRequest) -> ReturnCost | None:
    """Returns the return cost, if set. Raises `InvalidArgumentError` for negative seconds."""
    if not message.HasField("return_cost"):
        return None
    cost = message.return_cost
    return ReturnCost(
        _seconds("fixed", cost.fixed),
        _seconds("per_token", cost.per_token),
        _seconds("recompute_token", cost.recompute_token),
    )


def _seconds(field: str, duration: Duration) -> float:
    seconds = duration.seconds + duration.nanos * 1e-9
    if seconds < 0:
        raise InvalidArgumentError(f"return_cost.{field}", f"is {seconds:g} s; must be at least 0")
    return seconds


def outputs(message: pb.DecodeGenerateRequest) -> tuple[tuple[int, ...] | None, ...]:
    """Returns the output tokens so far of each of several sequences; None for a complete one."""
    return tuple(None if o.is_complete else tuple(o.token_ids) for o in message.outputs)


def admitted() -> pb.DecodeGenerateResponse:
    return pb.DecodeGenerateResponse(admitted=pb.DecodeAdmitted())


def prefill_is_here(
    num_cached_tokens: int, arrival_time: float, step: StepTimes, done: WorkDone
) -> pb.DecodeGenerateResponse:
    """Builds the `prefill_started` response of a prompt that this worker computes itself."""
    started = prefill_started(num_cached_tokens, arrival_time, step)
    started.work_done.CopyFrom(work_done_to_message(done))
    return pb.DecodeGenerateResponse(prefill_started=started)


def kv_ready(
    report: TransferReport, num_reused_blocks: int, done: WorkDone
) -> pb.DecodeGenerateResponse:
    exposed = Duration()
    exposed.FromNanoseconds(int(report.exposed_s * 1e9))
    ready = pb.KvReady(
        num_transferred_blocks=report.num_blocks,
        num_transferred_bytes=report.num_bytes,
        num_reused_blocks=num_reused_blocks,
        exposed=exposed,
        connector=report.connector,
        connector_reason=report.reason,
        work_done=work_done_to_message(done),
    )
    return pb.DecodeGenerateResponse(kv_ready=ready)


def first_token(token: FirstToken, params: SamplingParams) -> pb.DecodeGenerateResponse:
    """Builds the response with the only sequence's token that came with the blocks."""
    logprobs = token.logprobs
    tokens = pb.DecodeTokens(
        sequence_index=0,
        position=token.position,
        token_ids=[token.token_id],
        logprobs=[] if logprobs is None else [logprobs.logprob],
        top_logprobs=top_logprobs_to_messages([logprobs], params.top_logprobs),
    )
    return pb.DecodeGenerateResponse(tokens=tokens)


def draining() -> pb.DecodeGenerateResponse:
    return pb.DecodeGenerateResponse(draining=pb.DecodeDraining())


def suspended(num_tokens: int, lease_id: bytes) -> pb.DecodeGenerateResponse:
    suspended = pb.DecodeSuspended(num_tokens=num_tokens, lease_id=lease_id)
    return pb.DecodeGenerateResponse(suspended=suspended)


def preempted() -> pb.DecodeGenerateResponse:
    return pb.DecodeGenerateResponse(preempted=pb.DecodePreempted())


def released() -> pb.DecodeGenerateResponse:
    return pb.DecodeGenerateResponse(released=prefill_pb2.LeaseReleased())


def responses(
    updates: list[SequenceUpdate], params: SamplingParams
) -> Iterator[pb.DecodeGenerateResponse]:
    """Yields the responses for a batch of updates, grouped by sequence."""
    if params.num_sequences == 1:
        yield from _of_sequence(0, updates, params)
        return
    of_each: dict[int, list[SequenceUpdate]] = {}
    for update in updates:
        of_each.setdefault(update.index, []).append(update)
    for index, of_one in of_each.items():
        yield from _of_sequence(index, of_one, params)


def ranked_responses(
    updates: list[SequenceUpdate], params: SamplingParams
) -> Iterator[pb.DecodeGenerateResponse]:
    """Yields the returned sequences of a finished request, best first, from all its updates."""
    for place, of_one in enumerate(ranked(updates, params)):
        yield from _of_sequence(place, of_one, params)


def _of_sequence(
    index: int, updates: list[SequenceUpdate], params: SamplingParams
) -> Iterator[pb.DecodeGenerateResponse]:
    """Yields the messages of a sequence's updates."""
    for start in range(0, len(updates), _TOKENS_PER_MESSAGE):
        yield from _of_part(index, updates[start : start + _TOKENS_PER_MESSAGE], params)


def _of_part(
    index: int, updates: list[SequenceUpdate], params: SamplingParams
) -> Iterator[pb.DecodeGenerateResponse]:
    """Yields one message with a sequence's tokens, then its finish reason or `preempted`. Skips a
    SUSPENDED update, which is no end and repeats a token."""
    if updates[-1].finish_reason is FinishReason.SUSPENDED:
        updates = updates[:-1]
    sampled = [u for u in updates if u.token_id is not None]
    last = updates[-1] if updates else None
    if sampled:
        tokens = pb.DecodeTokens(
            sequence_index=index,
            position=sampled[0].position,
            token_ids=[u.token_id for u in sampled if u.token_id is not None],
            logprobs=[u.logprob or 0.0 for u in sampled] if params.logprobs else [],
            top_logprobs=top_logprobs_to_messages(
                [u.logprobs for u in sampled], params.top_logprobs
            ),
            # Sent with the token that ends the sequence, so that neither arrives without the other.
            finish_reason=finish_reason_to_message(sampled[-1].finish_reason),
        )
        yield pb.DecodeGenerateResponse(tokens=tokens)
    if last is not None and last.finish_reason is FinishReason.RETURNED:
        yield preempted()
    elif last is not None and last.finish_reason is not None:
        finished = pb.DecodeFinished(
            sequence_index=index,
            reason=finish_reason_to_message(last.finish_reason),
            score=last.score,
        )
        yield pb.DecodeGenerateResponse(finished=finished)
