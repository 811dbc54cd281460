"""What stands between a client and a router for a test: it forwards, after it has refused as a
router does, and cut a stream as one does that dies. The router behind it is real."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from baton.serving.interceptors import ErrorInterceptor
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import (
    InferenceServicer,
    InferenceStub,
    add_InferenceServicer_to_server,
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One call that has come.

    Attributes:
        seconds_left: until its deadline.
    """

    request: pb.GenerateRequest
    metadata: Mapping[str, str | bytes]
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Cut:
    """The stream of a call ends as that of a router that dies, behind so many messages."""

    after: int


Trouble = Exception | Cut | None


class HandleEndpoint(InferenceServicer):
    """Forwards `Generate`; the first calls meet with the troubles, one each.

    Attributes:
        seen: the calls, as they came.
        num_left: of those that were called off by the client before they had ended.
    """

    def __init__(self, router: Any, troubles: list[Trouble], clock: Callable[[], float]) -> None:
        self.seen: list[Seen] = []
        self.came_at: list[float] = []
        self.num_left = 0
        self._router = router
        self._troubles = troubles
        self._clock = clock

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.came_at.append(self._clock())
        metadata = dict(context.invocation_metadata())
        self.seen.append(Seen(request, metadata, context.time_remaining()))
        trouble = self._troubles.pop(0) if self._troubles else None
        if isinstance(trouble, Exception):
            raise trouble
        call = self._router.Generate(request, timeout=context.time_remaining())
        num_told, is_over = 0, False
        try:
            async for response in call:
                yield response
                num_told += 1
                if isinstance(trouble, Cut) and num_told >= trouble.after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            is_over = True
        finally:
            self.num_left += not is_over and trouble is None
            call.cancel()


@asynccontextmanager
async def door_to(
    router: str, troubles: list[Trouble], clock: Callable[[], float]
) -> AsyncIterator[tuple[HandleEndpoint, str]]:
    """One before the router at this address, and its own address."""
    async with grpc.aio.insecure_channel(router) as channel:
        door = HandleEndpoint(InferenceStub(channel), troubles, clock)
        server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        add_InferenceServicer_to_server(door, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield door, f"127.0.0.1:{port}"
        finally:
            await server.stop(0.0)
