"""Methods of workers by which attempts run requests, and what they are called with.

The request of a text is its message. One with images has megabytes: it is serialized once, by a
thread that releases the interpreter lock, and dropped once it is sent. A message would be copied
five times in the event loop, and held by the call until its end.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import FileDescriptor

from baton import encoder_input_wire
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton_router.request import Work

_Unsent = list[bytes]
"""A serialized request, until it is sent."""

Method = tuple[Any, Any]
"""Method of a worker, and the request that it is called with."""


async def prefill(
    channel: grpc.aio.Channel, request: prefill_pb2.PrefillRequest, work: Work
) -> Method:
    """Returns `Prefill.Prefill` for a request, to which the images of `work` are added."""
    if not work.request.encoder_inputs:
        return prefill_pb2_grpc.PrefillStub(channel).Prefill, request
    answer = prefill_pb2.PrefillResponse.FromString
    method = _method(channel, prefill_pb2.DESCRIPTOR, "Prefill", "Prefill", answer)
    return method, await _with_images(request, work)


async def generate(
    channel: grpc.aio.Channel, request: decode_pb2.DecodeGenerateRequest, work: Work
) -> Method:
    """Returns `Decode.Generate` for a request, to which the images of `work` are added."""
    if not work.request.encoder_inputs:
        return decode_pb2_grpc.DecodeStub(channel).Generate, request
    answer = decode_pb2.DecodeGenerateResponse.FromString
    method = _method(channel, decode_pb2.DESCRIPTOR, "Decode", "Generate", answer)
    return method, await _with_images(request, work)


def _method(
    channel: grpc.aio.Channel,
    file: FileDescriptor,
    service: str,
    name: str,
    deserialize: Callable[[bytes], Any],
) -> Any:
    """Returns a method that takes an `_Unsent`."""
    path = f"/{file.services_by_name[service].full_name}/{name}"
    return channel.unary_stream(
        path, request_serializer=_Unsent.pop, response_deserializer=deserialize
    )


async def _with_images(
    request: prefill_pb2.PrefillRequest | decode_pb2.DecodeGenerateRequest, work: Work
) -> _Unsent:
    number = request.ENCODER_INPUTS_FIELD_NUMBER
    images = encoder_input_wire.serialized(work.request.encoder_inputs, number)
    return [await asyncio.to_thread(b"".join, [request.SerializeToString(), *images])]
