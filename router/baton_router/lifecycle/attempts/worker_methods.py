"""Methods of workers by which attempts run requests, and what they are called with.

The request of a text is its message. One with images has megabytes: it is serialized once, by a
thread that releases the interpreter lock, and dropped once it is sent. A message would be copied
five times in the event loop, and held by the call until its end.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from baton.models.images.encoder_input import EncoderInput
from baton.rpc.encoder_inputs import serialized_encoder_inputs
from baton.serving.telemetry.propagation import outgoing
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    kv_sharing_pb2,
    prefill_pb2,
)
from baton_router.call.request import Work
from baton_router.lifecycle import worker_wire
from baton_router.lifecycle.attempts.work_bounds import bounded

_Unsent = list[bytes]
"""A serialized request, until it is sent."""

Method = tuple[Any, Any]
"""Method of a worker, and the request that it is called with."""


async def prefill(
    channel: grpc.aio.Channel, request: prefill_pb2.PrefillRequest, work: Work, max_bytes: int
) -> Method:
    """Returns `Prefill.Prefill` for a request, to which the images of `work` are added; its
    messages have up to `max_bytes`."""
    deserialize = bounded(prefill_pb2.PrefillResponse.FromString, max_bytes)
    inputs = request.ENCODER_INPUTS_FIELD_NUMBER, work.request.encoder_inputs
    return await _method(channel, "/baton.v1.Prefill/Prefill", request, *inputs, deserialize)


async def generate(
    channel: grpc.aio.Channel,
    request: decode_pb2.DecodeGenerateRequest,
    work: Work,
    max_bytes: int,
) -> Method:
    """Returns `Decode.Generate` for a request, to which the images of `work` are added; its
    messages have up to `max_bytes`. Tokens without log-probabilities come as an `OutputDelta`."""
    has_logprobs = work.params.logprobs
    deserialize: Callable[[bytes], Any] = (
        decode_pb2.DecodeGenerateResponse.FromString if has_logprobs else worker_wire.decoded
    )
    inputs = request.ENCODER_INPUTS_FIELD_NUMBER, work.request.encoder_inputs
    parse = bounded(deserialize, max_bytes)
    return await _method(channel, "/baton.v1.Decode/Generate", request, *inputs, parse)


async def pool(channel: grpc.aio.Channel, request: prefill_pb2.PoolRequest) -> Method:
    """Returns `Prefill.Pool` for a request."""
    deserialize = bounded(prefill_pb2.PoolResponse.FromString)
    number = request.TOKEN_IDS_FIELD_NUMBER
    return await _method(channel, "/baton.v1.Prefill/Pool", request, number, (), deserialize)


async def encode(
    channel: grpc.aio.Channel, request: encode_pb2.EncodeRequest, encoder_input: EncoderInput
) -> Method:
    """Returns `Encode.Encode` for a request, to which `encoder_input` is added unless it is there:
    a request for a cached output has it without tensors."""
    unsent = () if request.HasField("encoder_input") else (encoder_input,)
    inputs = request.ENCODER_INPUT_FIELD_NUMBER, unsent
    deserialize = bounded(encode_pb2.EncodeResponse.FromString)
    return await _method(channel, "/baton.v1.Encode/Encode", request, *inputs, deserialize)


async def hand_over(
    channel: grpc.aio.Channel,
    request: worker_wire.DecodeRequest,
    lease_id: bytes,
    claimant: str,
    tenant: str,
    timeout: float,
) -> None:
    """Asks a decode worker to suspend `request` so that `claimant` can resume it."""
    message = worker_wire.hand_over_request(request, lease_id, claimant, tenant)
    await decode_pb2_grpc.DecodeStub(channel).HandOver(message, timeout=timeout)


async def end_sequence(
    channel: grpc.aio.Channel, request: decode_pb2.EndSequenceRequest, timeout: float
) -> None:
    """Asks a decode worker to end one sequence of several."""
    await decode_pb2_grpc.DecodeStub(channel).EndSequence(request, timeout=timeout)


def share(channel: grpc.aio.Channel, request: kv_sharing_pb2.ShareRequest) -> Any:
    """Returns the call that keeps blocks for another worker while it is open."""
    method = channel.unary_stream(
        "/baton.v1.KvSharing/Share",
        request_serializer=kv_sharing_pb2.ShareRequest.SerializeToString,
        response_deserializer=bounded(kv_sharing_pb2.ShareResponse.FromString),
    )
    return method(request, metadata=outgoing())


async def _method(
    channel: grpc.aio.Channel,
    path: str,
    request: Message,
    field_number: int,
    encoder_inputs: Sequence[EncoderInput],
    deserialize: Callable[[bytes], Any],
) -> Method:
    """Returns the method at `path`, not through a stub, which makes all methods of a service.

    Args:
        field_number: field of `request` that `encoder_inputs` are added to.
    """
    serialize: Callable[[Any], bytes] = type(request).SerializeToString
    called: Any = request
    if encoder_inputs:
        inputs = serialized_encoder_inputs(encoder_inputs, field_number)
        serialize = _Unsent.pop
        called = [await asyncio.to_thread(b"".join, [request.SerializeToString(), *inputs])]
    method = channel.unary_stream(
        path, request_serializer=serialize, response_deserializer=deserialize
    )
    return method, called
