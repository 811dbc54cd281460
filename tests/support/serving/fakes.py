"""A service whose behaviour the test gives, behind a real `Server` on a real socket."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from baton.serving.grpc.channels import Channels
from baton.serving.grpc.connection_guard import ConnectionLimits
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import (
    InferenceServicer,
    InferenceStub,
    add_InferenceServicer_to_server,
)

Stream = Callable[[pb.GenerateRequest, Any], AsyncIterator[pb.GenerateResponse]]
Unary = Callable[[pb.GetModelRequest, Any], Awaitable[pb.GetModelResponse]]


class ScriptedInference(InferenceServicer):
    """`Generate` and `GetModel` as given; `Tokenize` is left to the generated base class."""

    def __init__(self, generate: Stream | None = None, get_model: Unary | None = None) -> None:
        self._generate = generate
        self._get_model = get_model

    async def Generate(self, request, context):  # noqa: N802
        async for response in self._generate(request, context):
            yield response

    async def GetModel(self, request, context):  # noqa: N802
        return await self._get_model(request, context)

    def Tokenize(self, request, context):  # noqa: N802
        return super().Tokenize(request, context)


@dataclass
class Running:
    server: Server
    channel: grpc.aio.Channel
    inference: Any


@asynccontextmanager
async def serving(
    generate: Stream | None = None,
    get_model: Unary | None = None,
    connection_limits: ConnectionLimits | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    server = Server(ServingSettings(**settings), connection_limits=connection_limits)
    server.add(add_InferenceServicer_to_server, ScriptedInference(generate, get_model))
    await server.start()
    channels = Channels()
    channel = channels.get(server.endpoint)
    try:
        yield Running(server, channel, InferenceStub(channel))
    finally:
        await channels.close()
        await server.stop(0.0)


def chunk(text: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(tokens=pb.TokenChunk(text=text))
