"""Messages of `baton.v1` to engine data and back, for both roles."""

from baton.engine.core.sequence import FinishReason, KvSource, Purpose
from baton.engine.engine import EngineRequest
from baton.params_wire import from_proto
from baton.v1 import decode_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb

_FINISH_REASONS = {
    FinishReason.END_OF_SEQUENCE: pb.FINISH_REASON_END_OF_SEQUENCE,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


def finish_reason_to_message(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """Unspecified for a sequence that goes on, here or elsewhere."""
    if reason is None:
        return pb.FINISH_REASON_UNSPECIFIED
    return _FINISH_REASONS.get(reason, pb.FINISH_REASON_UNSPECIFIED)


def engine_request(
    message: "prefill_pb2.PrefillRequest | decode_pb2.DecodeGenerateRequest",
    *,
    purpose: Purpose = Purpose.GENERATE,
    kv_source: KvSource = KvSource.LOCAL,
) -> EngineRequest:
    """The sequence a message asks for. Raises `InvalidArgumentError` for parameters out of bounds;
    the engine checks the rest."""
    return EngineRequest(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        params=from_proto(message.sampling, default_seed=0),
        num_prompt_tokens=message.num_prompt_tokens,
        purpose=purpose,
        kv_source=kv_source,
    )
