"""Methods of workers by which attempts run requests, and what they are called with.

The request of a text is its message. One with images has megabytes: it is serialized once, by a
thread that releases the interpreter lock, and dropped once it is sent. A message would be copied
five times in the event loop, and held by the call until its end.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from baton import encoder_input_wire
from baton.v1 import decode_pb2, prefill_pb2
from baton_router.lifecycle import worker_wire
from baton_router.request import Work

_Unsent = list[bytes]
"""A serialized request, until it is sent."""

Method = tuple[Any, Any]
"""Method of a worker, and the request that it is called with."""


async def prefill(
    channel: grpc.aio.Channel, request: prefill_pb2.PrefillRequest, work: Work
) -> Method:
    """Returns `Prefill.Prefill` for a request, to which the images of `work` are added."""
    deserialize = prefill_pb2.PrefillResponse.FromString
    return await _method(channel, "/baton.v1.Prefill/Prefill", request, work, deserialize)


async def generate(
    channel: grpc.aio.Channel, request: decode_pb2.DecodeGenerateRequest, work: Work
) -> Method:
    """Returns `Decode.Generate` for a request, to which the images of `work` are added. Its
    responses are those of `worker_wire.decoded`."""
    return await _method(channel, "/baton.v1.Decode/Generate", request, work, worker_wire.decoded)


async def _method(
    channel: grpc.aio.Channel,
    path: str,
    request: prefill_pb2.PrefillRequest | decode_pb2.DecodeGenerateRequest,
    work: Work,
    deserialize: Callable[[bytes], Any],
) -> Method:
    """Returns the method at `path`, not through a stub, which makes all methods of a service."""
    serialize: Callable[[Any], bytes] = type(request).SerializeToString
    called: Any = request
    if work.request.encoder_inputs:
        serialize, called = _Unsent.pop, await _with_images(request, work)
    method = channel.unary_stream(
        path, request_serializer=serialize, response_deserializer=deserialize
    )
    return method, called


async def _with_images(
    request: prefill_pb2.PrefillRequest | decode_pb2.DecodeGenerateRequest, work: Work
) -> _Unsent:
    number = request.ENCODER_INPUTS_FIELD_NUMBER
    images = encoder_input_wire.serialized(work.request.encoder_inputs, number)
    return [await asyncio.to_thread(b"".join, [request.SerializeToString(), *images])]
