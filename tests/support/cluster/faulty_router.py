"""Router with faults, for tests of clients: rejects calls and breaks streams as a failing router
does, and forwards the others to a real one."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from baton.cli.local.local_cluster import LocalCluster
from baton.serving.grpc.interceptors import ErrorInterceptor
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import (
    InferenceServicer,
    InferenceStub,
    add_InferenceServicer_to_server,
)
from tests.support.cluster.watch import until_nothing_is_held


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
class Disconnect:
    """Disconnection after so many messages, as of a router that dies: the real one, which stands
    for the next one as well, has ended the request before the client notices."""

    after: int


Fault = Exception | Disconnect | None


class FaultyRouter(InferenceServicer):
    """Forwards `Generate`; the first calls meet the faults, one each.

    Attributes:
        seen: the calls, as they came.
        num_left: of those that were called off by the client before they had ended.
    """

    def __init__(self, cluster: LocalCluster, router: Any, faults: list[Fault]) -> None:
        self.seen: list[Seen] = []
        self.times: list[float] = []
        self.num_left = 0
        self._cluster = cluster
        self._router = router
        self._faults = faults

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.times.append(time.monotonic())
        metadata = dict(context.invocation_metadata())
        self.seen.append(Seen(request, metadata, context.time_remaining()))
        fault = self._faults.pop(0) if self._faults else None
        if isinstance(fault, Exception):
            raise fault
        call = self._router.Generate(request, timeout=context.time_remaining())
        num_sent, is_over = 0, False
        try:
            async for response in call:
                yield response
                num_sent += 1
                if isinstance(fault, Disconnect) and num_sent >= fault.after:
                    call.cancel()
                    await until_nothing_is_held(self._cluster)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            is_over = True
        finally:
            self.num_left += not is_over and fault is None
            call.cancel()


@asynccontextmanager
async def faulty_router(
    cluster: LocalCluster, faults: list[Fault]
) -> AsyncIterator[tuple[FaultyRouter, str]]:
    """Yields a proxy of the cluster's router, and the proxy's address."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        proxy = FaultyRouter(cluster, InferenceStub(channel), faults)
        server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        add_InferenceServicer_to_server(proxy, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield proxy, f"127.0.0.1:{port}"
        finally:
            await server.stop(0.0)
