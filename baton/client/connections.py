"""Connections of a client, opened again once its certificates have changed.

Calls in flight keep their connection. Independent of the calls made on them.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from baton.rpc.tls import PemFiles, Tls
from baton.v1.admin_pb2_grpc import AdminStub
from baton.v1.inference_pb2_grpc import InferenceStub

_OPTIONS = [
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.enable_http_proxy", 0),
    # Finds a server soon that starts late or restarts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Resolves a name again soon after its routers were replaced; gRPC would after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Detects a router that falls silent during a call within some seconds.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
    # Channels share no connection, so that a new one may reach another router of a name.
    ("grpc.use_local_subchannel_pool", 1),
]

# Minimum seconds between two reconnections of one router: many calls may ask for one at once.
_RECONNECT_SECONDS = 1.0

_LONGEST_CALL_SECONDS = 24 * 3600.0

_Channel = TypeVar("_Channel")


@dataclass(frozen=True, slots=True)
class RouterStubs:
    """Stubs of one router's services; on an asyncio channel they are the asyncio ones."""

    inference: InferenceStub
    admin: AdminStub


class Connections(Generic[_Channel]):
    """Connections of a client to its routers, by their index."""

    _grpc: Any
    """`grpc` or `grpc.aio`, which open channels alike."""

    def __init__(
        self, addresses: Sequence[str], admin_addresses: Sequence[str], tls: Tls | None
    ) -> None:
        """Raises `FailedPreconditionError` for TLS files that cannot be read."""
        self._addresses = list(zip(addresses, admin_addresses, strict=True))
        self._options = _OPTIONS if tls is None else [*_OPTIONS, *tls.channel_options()]
        self._files = None if tls is None else PemFiles(tls)
        self._pem = None if self._files is None else self._files.current()
        self._reconnected_at = [-math.inf] * len(self._addresses)
        self._open()

    def __getitem__(self, router: int) -> RouterStubs:
        """Returns the stubs for a call that begins now."""
        if self._files is not None:
            pem = self._files.current()
            if pem is not self._pem:
                self._pem, former = pem, self._channels
                self._open()
                for channel in former.values():
                    self._retire(channel)
        return self._stubs[router]

    def reconnect(self, router: int) -> None:
        """Resolves the router's name again and connects for later calls, at most once a second;
        calls in flight stay on their connection."""
        now = time.monotonic()
        if now - self._reconnected_at[router] < _RECONNECT_SECONDS:
            return
        self._reconnected_at[router] = now
        former = {address: self._channels.pop(address) for address in {*self._addresses[router]}}
        self._channels |= {address: self._open_channel(address) for address in former}
        self._make_stubs()
        for channel in former.values():
            self._retire(channel)

    def _open(self) -> None:
        addresses = {address for pair in self._addresses for address in pair}
        self._channels: dict[str, _Channel] = {a: self._open_channel(a) for a in addresses}
        self._make_stubs()

    def _make_stubs(self) -> None:
        channels: dict[str, Any] = {**self._channels}
        self._stubs = [
            RouterStubs(InferenceStub(channels[main]), AdminStub(channels[admin]))
            for main, admin in self._addresses
        ]

    def _open_channel(self, address: str) -> Any:
        if self._pem is None:
            return self._grpc.insecure_channel(address, self._options)
        credentials = self._pem.channel_credentials()
        return self._grpc.secure_channel(address, credentials, self._options)

    def _retire(self, channel: _Channel) -> None:
        """Has a channel that gets no new calls close after its last one."""


class BlockingConnections(Connections[grpc.Channel]):
    """Connections of a blocking client. A retired channel closes by itself, once its last call is
    garbage-collected."""

    _grpc = grpc

    def close(self) -> None:
        """Closes them and ends every call on them. Idempotent."""
        for channel in self._channels.values():
            channel.close()


class AsyncConnections(Connections[grpc.aio.Channel]):
    """Connections of an asyncio client."""

    _grpc = grpc.aio

    def __init__(
        self, addresses: Sequence[str], admin_addresses: Sequence[str], tls: Tls | None
    ) -> None:
        super().__init__(addresses, admin_addresses, tls)
        self._retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Closes them and ends every call on them. Idempotent."""
        former = [*self._retiring.values()]
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in (*self._channels.values(), *former)))

    def _retire(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.create_task(channel.close(_LONGEST_CALL_SECONDS))
        self._retiring[task] = channel
        task.add_done_callback(self._retiring.pop)
