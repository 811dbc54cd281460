"""gRPC channels, one per endpoint, and the transport settings that both ends share.

Independent of the services called.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from baton.rpc.tls import Pem, PemFiles, Tls
from baton.serving.grpc.certificates import watched
from baton.settings import setting

MAX_MESSAGE_BYTES = 16 * 2**20
# Of one request: a hundred images of LLaVA (336 x 336 pixels), or 5.6 megapixels in patches as
# Qwen-VL has them, at 24 bytes a pixel.
MAX_ENCODER_INPUT_BYTES = 128 * 2**20
MAX_EARLY_PINGS = 100
# Calls that wait for the event loop to take them, of all connections: above what clients that
# stay within their limits send while it is late, below what memory allows (some 10 KB each).
_MAX_PENDING_CALLS = 10_000

# For channels that carry KV blocks: one HTTP/2 frame per payload instead of one per 16 KiB.
LARGE_FRAMES = [("grpc.http2.max_frame_size", 2**24 - 1)]

_CALL_START_SECONDS = 2.0
_LONGEST_CALL_SECONDS = 24 * 3600.0

# Silence bound: seconds within which a silent peer is detected. Ping after 1 s, wait 0.8 s.
SILENCE_SECONDS = 2.0
# Of the two timeouts the second is effective; its default is one minute.
_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 800),
    ("grpc.http2.ping_timeout_ms", 800),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Returns options of channels to Baton's servers, with one size limit for both directions."""
    return [
        *_message_limits(max_message_bytes),
        *_KEEPALIVE,
        ("grpc.enable_http_proxy", 0),
        # Handshake timeout, 20 s by default: a stopped peer accepts the connection, then sends
        # nothing.
        ("grpc.min_reconnect_backoff_ms", 1500),
        # Reconnects soon after a worker has restarted.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Finds a worker soon whose name leads elsewhere now; gRPC resolves again after 30 s.
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of a gRPC server, for each port and client."""

    max_message_bytes: int = setting(
        MAX_MESSAGE_BYTES,
        "Maximum bytes of a gRPC message, in both directions.",
        ge=4096,
        le=2**31 - 1,
    )
    max_header_bytes: int = setting(16 * 2**10, "Maximum bytes of a gRPC call's metadata.", ge=8192)
    max_connections: int = setting(
        1024,
        "Maximum gRPC connections of each port; further ones are closed at once. At a router's "
        "port those of clients make room: the longest idle one of the address with the most.",
        ge=1,
    )
    max_concurrent_streams: int = setting(
        1024,
        "Maximum concurrent calls of one gRPC connection; more wait at the client.",
        ge=1,
    )
    max_connection_idle_s: float = setting(
        3600.0,
        "Idle timeout of a gRPC connection in seconds. Its client reconnects for the next call.",
        gt=0,
    )
    handshake_timeout_s: float = setting(
        20.0,
        "Timeout in seconds for the handshake of a gRPC connection, from its first byte to the "
        "client's settings.",
        gt=0,
    )


def server_options(limits: ServerLimits) -> list[tuple[str, int]]:
    """Returns server options: they match `channel_options`, own the port alone, limit clients."""
    return [
        *_message_limits(limits.max_message_bytes),
        *_KEEPALIVE,
        # Equal: between the soft and the hard limit gRPC rejects some calls at random.
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_header_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
        # Equal, as above. By default gRPC cancels calls at random from 1,000 on, and so calls of
        # others where one client resets thousands (docs/known-issues.md).
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.max_connection_idle_ms", math.ceil(1000 * limits.max_connection_idle_s)),
        ("grpc.server_handshake_timeout_ms", math.ceil(1000 * limits.handshake_timeout_s)),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        # Pings tolerated that came too early while this side sent nothing. The default is two; a
        # peer that resumes after a stall may have that many in flight.
        ("grpc.http2.max_ping_strikes", MAX_EARLY_PINGS),
    ]


def _message_limits(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


class Channels:
    """Cache of gRPC channels by endpoint; it alone closes them."""

    def __init__(
        self,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        *,
        tls: Tls | None = None,
        options: Sequence[tuple[str, int | str]] = (),
        idle_seconds: float = math.inf,
        call_start_seconds: float = _CALL_START_SECONDS,
    ) -> None:
        """Takes `tls` (None: plaintext), and `options` in addition to those of `channel_options`.
        A channel that `get` was not asked for during `idle_seconds` closes after its calls.
        `call_start_seconds`: longest time between `get` and the call on that channel."""
        # Channels share no connection, so that a new one has a new connection.
        apart = ("grpc.use_local_subchannel_pool", 1)
        self._options = [*channel_options(max_message_bytes), apart, *options]
        self._files: PemFiles | None = None
        self._shown: Pem | None = None
        if tls is not None:
            self._options += tls.channel_options()
            self._files = watched(tls)
            self._shown = self._files.current()
        self._idle_seconds = idle_seconds
        self._call_start_seconds = call_start_seconds
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._last_used: dict[str, float] = {}  # in this order
        self._num_uses: Counter[str] = Counter()
        self._closing: set[asyncio.Task[None]] = set()
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._on_renewal: list[Callable[[], None]] = []

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Endpoints with an open channel."""
        return tuple(self._channels)

    def on_renewal(self, callback: Callable[[], None]) -> None:
        """Registers `callback`, called when certificates were renewed and `get` has new channels.
        Endless calls should then move over: the old channels wait for them."""
        self._on_renewal.append(callback)

    def get(self, endpoint: str) -> grpc.aio.Channel:
        """Returns the channel to "host:port", which connects on first use. Call on it soon: it is
        valid until `close`, until `use` closes it, or some seconds after `reconnect` or a
        certificate renewal."""
        if self._files is not None and self._files.current() is not self._shown:
            self._renew()
        now = time.monotonic()
        self._last_used.pop(endpoint, None)
        self._last_used[endpoint] = now
        self._retire_idle(now)
        if endpoint not in self._channels:
            self._channels[endpoint] = self._open(endpoint)
        return self._channels[endpoint]

    def reconnect(self, endpoint: str) -> None:
        """Opens a new connection to `endpoint` for later calls; calls in flight stay on theirs."""
        self._last_used.pop(endpoint, None)
        if endpoint in self._channels:
            self._retire(self._channels.pop(endpoint))

    @contextmanager
    def use(self, endpoint: str) -> Iterator[grpc.aio.Channel]:
        """Returns the channel as `get` does, open for the `with` block. It closes after the last
        of the blocks for an endpoint, unless one begins at once."""
        self._num_uses[endpoint] += 1
        try:
            yield self.get(endpoint)
        finally:
            self._num_uses[endpoint] -= 1
            if not self._num_uses[endpoint]:
                closing = asyncio.create_task(self._close_unused(endpoint))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all channels. Their calls end with CANCELLED."""
        channels, self._channels = [*self._channels.values(), *self._retired.values()], {}
        for task in self._retired:
            task.cancel()
        await asyncio.gather(*self._retired, *self._closing, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _close_unused(self, endpoint: str) -> None:
        if not self._num_uses[endpoint]:
            del self._num_uses[endpoint]
            self._last_used.pop(endpoint, None)
            channel = self._channels.pop(endpoint, None)
            if channel is not None:
                await channel.close()

    def _renew(self) -> None:
        """Opens new connections for new calls; calls in flight stay on theirs."""
        assert self._files is not None
        self._shown = self._files.current()
        former, self._channels = self._channels, {}
        for channel in former.values():
            self._retire(channel)
        for callback in self._on_renewal:
            callback()

    def _retire_idle(self, now: float) -> None:
        while self._last_used:
            endpoint, last_used = next(iter(self._last_used.items()))
            if now - last_used <= self._idle_seconds:
                return
            self.reconnect(endpoint)

    def _retire(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.create_task(_close_after_calls(channel, self._call_start_seconds))
        self._retired[task] = channel
        task.add_done_callback(self._retired.pop)

    def _open(self, endpoint: str) -> grpc.aio.Channel:
        if self._shown is None:
            return grpc.aio.insecure_channel(endpoint, options=self._options)
        credentials = self._shown.channel_credentials()
        return grpc.aio.secure_channel(endpoint, credentials, options=self._options)


async def _close_after_calls(channel: grpc.aio.Channel, call_start_seconds: float) -> None:
    """Closes `channel` once its calls have ended; a caller of `get` may still begin one."""
    await asyncio.sleep(call_start_seconds)
    await channel.close(_LONGEST_CALL_SECONDS)
