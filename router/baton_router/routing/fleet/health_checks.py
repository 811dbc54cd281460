"""Health checks of workers over gRPC: a watch of each, and probes of one that has failed."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.cancellation import is_task_cancelled
from baton.serving.grpc.channels import Channels
from baton_router.routing.fleet.member import Member

_RETRY_SECONDS = 0.5
_PROBE_SECONDS = 1.0
_READINESS = health_pb2.HealthCheckRequest(service="readiness")

_Callback = Callable[[Member], None]


class HealthChecks:
    """Health checks of members. They set `is_serving` and `was_probed`, and tell the circuit.

    Args:
        on_ready: called at each report that the worker is ready, and when its circuit closes.
        on_lost: called each time that the worker cannot be reached, or ends its reports.
        on_retry: called before the worker is tried again.
    """

    def __init__(
        self,
        channels: Channels,
        on_ready: _Callback,
        on_lost: _Callback,
        on_retry: _Callback,
    ) -> None:
        self._channels = channels
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_retry = on_retry
        self._watches: dict[Member, asyncio.Task[None]] = {}
        self._probes: dict[Member, asyncio.Task[None]] = {}
        self._calls: set[Any] = set()

    def watch(self, member: Member) -> None:
        """Watches a worker's readiness, over one channel, until `unwatch`."""
        self._watches[member] = asyncio.create_task(self._watch(member))

    def unwatch(self, member: Member) -> None:
        """Ends all checks of a worker that is watched."""
        task = self._watches.pop(member)
        if task is not asyncio.current_task():
            task.cancel()

    def probe(self, member: Member) -> None:
        """Probes a worker whose circuit is open, with backoff, until it closes or `unwatch`."""
        if not member.circuit.is_closed and member not in self._probes:
            self._probes[member] = asyncio.create_task(self._probe(member))

    def restart(self) -> None:
        """Cancels all watches' calls, so that they reconnect with renewed certificates."""
        for call in self._calls:
            call.cancel()

    async def stop(self) -> None:
        tasks = [*self._watches.values(), *self._probes.values()]
        self._watches = {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, member: Member) -> None:
        with self._channels.use(member.record.endpoint):  # open between calls, too
            while member in self._watches:
                endpoint = member.record.endpoint
                with (
                    contextlib.suppress(grpc.aio.AioRpcError),
                    self._channels.use(endpoint) as channel,
                ):
                    if await self._follow(member, channel):
                        continue
                member.is_serving = False
                member.was_probed.set()
                self._on_lost(member)
                await asyncio.sleep(_RETRY_SECONDS)
                self._on_retry(member)

    async def _follow(self, member: Member, channel: grpc.aio.Channel) -> bool:
        """Follows the health stream of a worker. Returns True if the watch must reconnect while the
        last readiness stays valid; raises `AioRpcError` if the connection is lost."""
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(_READINESS)
        self._calls.add(watch)
        try:
            async for response in watch:
                member.is_serving = _is_serving(response)
                if member.is_serving:
                    self._on_ready(member)
                member.was_probed.set()
                if member.is_serving:
                    member.circuit.probe_succeeded()
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            return True
        finally:
            self._calls.discard(watch)
        return False

    async def _probe(self, member: Member) -> None:
        try:
            while not member.circuit.is_closed and member in self._watches:
                await asyncio.sleep(member.circuit.seconds_to_probe)
                if await self._is_healthy(member):
                    member.circuit.probe_succeeded()
                    if member.is_serving:
                        self._on_ready(member)
                else:
                    member.circuit.probe_failed()
        finally:
            del self._probes[member]

    async def _is_healthy(self, member: Member) -> bool:
        with self._channels.use(member.record.endpoint) as channel:
            try:
                stub = health_pb2_grpc.HealthStub(channel)
                return _is_serving(await stub.Check(_READINESS, timeout=_PROBE_SECONDS))
            except grpc.aio.AioRpcError:
                return False


def _is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
