"""Conversion of `baton.v1` messages to engine data and back, for all roles."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence

from baton.cluster.prefix import HASH_BYTES, BlockHash
from baton.engine.executor.cache.kv_layout import KvLayout, LayerLayout
from baton.engine.metering.step_times import StepTimes
from baton.engine.metering.work_meter import WorkDone
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose, ReturnCost
from baton.engine.scheduler.plan import TokenLogprobs
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.engine.scheduler.scheduling.policy import DEFAULT_DEADLINE_SECONDS
from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.rpc.encoder_inputs import encoder_input_of
from baton.rpc.params import params_of
from baton.sampling import SamplingParams
from baton.v1 import decode_pb2, encode_pb2, kv_transfer_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb

# A step may score more; routers take four times as many in a message.
_SCORES_PER_MESSAGE = 1024

_FINISH_REASONS = {
    FinishReason.END_OF_SEQUENCE: pb.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_REASONS_OF = {message: reason for reason, message in _FINISH_REASONS.items()}


def finish_reason_to_message(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """Returns UNSPECIFIED for a sequence that continues, here or on another worker."""
    if reason is None:
        return pb.FINISH_REASON_UNSPECIFIED
    return _FINISH_REASONS.get(reason, pb.FINISH_REASON_UNSPECIFIED)


def finish_reason_of(message: pb.FinishReason.ValueType) -> FinishReason:
    """Returns ABORTED for an unspecified or unknown reason."""
    return _REASONS_OF.get(message, FinishReason.ABORTED)


def engine_request(
    message: "prefill_pb2.PrefillRequest | decode_pb2.DecodeGenerateRequest",
    time_remaining: float | None,
    *,
    purpose: Purpose = Purpose.GENERATE,
    kv_source: KvSource = KvSource.LOCAL,
    num_external_tokens: int = 0,
    outputs: tuple[tuple[int, ...] | None, ...] = (),
    block_hashes: tuple[bytes, ...] = (),
    return_cost: ReturnCost | None = None,
) -> EngineRequest:
    """Returns the request in a message, with the present as its arrival time.

    `time_remaining` is that of the call, in seconds; None: it has no deadline. The first token is
    due by then at the latest, and by default as the deadline policy has it. `outputs` and
    `block_hashes` are those of `EngineRequest`. Raises `InvalidArgumentError` for parameters out of
    bounds; the engine checks the rest.
    """
    arrival = time.monotonic()
    return EngineRequest(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        params=params_of(message.sampling, default_seed=0),
        num_prompt_tokens=message.num_prompt_tokens,
        purpose=purpose,
        kv_source=kv_source,
        num_external_tokens=num_external_tokens,
        outputs=outputs,
        block_hashes=block_hashes,
        salt=message.salt,
        tenant=message.tenant,
        priority=message.priority,
        arrival_time=arrival,
        return_cost=return_cost,
        first_token_deadline=arrival + first_token_due(message, time_remaining),
        encoder_inputs=tuple(
            encoder_input_of(each, f"encoder_inputs[{i}]")
            for i, each in enumerate(message.encoder_inputs)
        ),
    )


def encode_job(message: encode_pb2.EncodeRequest, time_remaining: float | None) -> EncodeJob:
    """Returns the job in a message, ranked as `engine_request` ranks the request that needs it.
    Raises `InvalidArgumentError` for a malformed input."""
    arrival = time.monotonic()
    return EncodeJob(
        encoder_input_of(message.encoder_input, "encoder_input"),
        priority=message.priority,
        arrival_time=arrival,
        first_token_deadline=arrival + first_token_due(message, time_remaining),
    )


def hashes_of(joined: bytes, field: str) -> tuple[BlockHash, ...]:
    """Splits joined chain hashes. Raises `InvalidArgumentError` for a partial hash."""
    if len(joined) % HASH_BYTES:
        raise InvalidArgumentError(
            field, f"has {len(joined)} bytes; must be a multiple of {HASH_BYTES}"
        )
    return tuple(joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES))


def first_token_due(
    message: "prefill_pb2.PrefillRequest | prefill_pb2.PoolRequest | "
    "decode_pb2.DecodeGenerateRequest | encode_pb2.EncodeRequest",
    time_remaining: float | None,
) -> float:
    """Returns the seconds until the first token is due; negative if it is late."""
    if message.HasField("first_token_due"):
        return message.first_token_due.ToNanoseconds() * 1e-9
    return min(DEFAULT_DEADLINE_SECONDS, math.inf if time_remaining is None else time_remaining)


def work_done_to_message(done: WorkDone) -> prefill_pb2.WorkDone:
    message = prefill_pb2.WorkDone(
        num_steps=done.num_steps,
        num_prompt_tokens=done.num_prompt_tokens,
        num_prompt_pairs=done.num_prompt_pairs,
        num_decode_tokens=done.num_decode_tokens,
        num_encoder_tokens=done.num_encoder_tokens,
    )
    message.busy.FromNanoseconds(int(done.seconds * 1e9))
    return message


def top_logprobs_to_message(logprobs: TokenLogprobs) -> pb.TopLogprobs:
    return pb.TopLogprobs(token_ids=logprobs.top_token_ids, logprobs=logprobs.top_logprobs)


def top_logprobs_to_messages(
    logprobs: Sequence[TokenLogprobs | None], num_top: int
) -> list[pb.TopLogprobs]:
    """Returns one message per token; none if `num_top` is 0."""
    if not num_top:
        return []
    return [pb.TopLogprobs() if p is None else top_logprobs_to_message(p) for p in logprobs]


class PromptScores:
    """Prompt scores of one request, as messages in order and without gaps."""

    def __init__(self, params: SamplingParams) -> None:
        self._num_top = params.prompt_logprobs or 0
        self._num_scored = 1  # the first token of a prompt has no log-probability

    def messages(self, updates: Iterable[SequenceUpdate]) -> Iterator[pb.PromptLogprobs]:
        """Yields the log-probabilities of prompt tokens in the engine's next updates, if any."""
        for scored in _parts(updates):
            yield pb.PromptLogprobs(
                position=self._num_scored,
                logprobs=[each.logprob for each in scored],
                top_logprobs=top_logprobs_to_messages(scored, self._num_top),
            )
            self._num_scored += len(scored)


def _parts(updates: Iterable[SequenceUpdate]) -> Iterator[Sequence[TokenLogprobs]]:
    """Yields the prompt scores of updates, in parts of what a message may have."""
    for scored in (update.prompt_logprobs for update in updates):
        for start in range(0, len(scored), _SCORES_PER_MESSAGE):
            yield scored[start : start + _SCORES_PER_MESSAGE]


def prefill_started(
    num_cached_tokens: int, arrival_time: float, step: StepTimes
) -> prefill_pb2.PrefillStarted:
    """Returns the message that computation began with `step`; it is sent after that step."""
    # On Linux requests and steps have the same clock.
    started = prefill_pb2.PrefillStarted(num_cached_tokens=num_cached_tokens)
    started.queue_time.FromNanoseconds(int(max(0.0, step.started - arrival_time) * 1e9))
    started.elapsed.FromNanoseconds(int((time.perf_counter() - step.started) * 1e9))
    return started


def layouts_to_messages(layouts: Iterable[KvLayout]) -> list[kv_transfer_pb2.KvLayout]:
    return [
        kv_transfer_pb2.KvLayout(
            dtype=layout.dtype,
            block_size=layout.block_size,
            block_bytes=layout.block_bytes,
            layers=[
                kv_transfer_pb2.KvLayerLayout(
                    offset=layer.key_offset,
                    value_offset=layer.value_offset,
                    head_stride=layer.head_stride,
                    num_kv_heads=layer.num_kv_heads,
                    key_head_dim=layer.key_head_dim,
                    value_head_dim=layer.value_head_dim,
                )
                for layer in layout.layers
            ],
            tensor_parallel_rank=0,
            tensor_parallel_size=1,
            window=layout.window,
        )
        for layout in layouts
    ]


def serialize_layouts(layouts: Iterable[KvLayout]) -> bytes:
    """Returns the layouts as a worker's record has them; equal bytes for equal layouts."""
    message = kv_transfer_pb2.KvLayouts(layouts=layouts_to_messages(layouts))
    return message.SerializeToString(deterministic=True)


def layouts_of(messages: Iterable[kv_transfer_pb2.KvLayout]) -> tuple[KvLayout, ...]:
    return tuple(map(_layout_of, messages))


def _layout_of(message: kv_transfer_pb2.KvLayout) -> KvLayout:
    if (message.tensor_parallel_rank, message.tensor_parallel_size) != (0, 1):
        raise FailedPreconditionError(
            f"the other pool is divided over {message.tensor_parallel_size} ranks, this one is not"
        )
    return KvLayout(
        message.dtype,
        message.block_size,
        message.block_bytes,
        tuple(
            LayerLayout(
                m.offset,
                m.value_offset,
                m.head_stride,
                m.num_kv_heads,
                m.key_head_dim,
                m.value_head_dim,
            )
            for m in message.layers
        ),
        message.window if message.HasField("window") else None,
    )
