"""Connection guard: drops gRPC connections that open, or open and reset, too many calls a second,
and idle ones where there are too many.

gRPC queues new calls for Python, of all connections in one queue, and neither limits how fast one
connection fills it nor takes out calls that were reset meanwhile (docs/known-issues.md). The guard
reads gRPC's own counters of each connection (channelz) in a thread, as the event loop is late
exactly when it is needed. An address of which it drops one after the other may not connect for a
while. Independent of services and of TLS.
"""

import logging
import math
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from baton.serving.grpc import channelz
from baton.serving.grpc.channelz import Counters, Peer, count
from baton.serving.grpc.connection_room import ConnectionRoom
from baton.serving.grpc.refused_addresses import RefusedAddresses
from baton.serving.listening import host_and_port
from baton.settings import setting

# Seconds between two looks at the counters.
_INTERVAL_SECONDS = 0.1
# Maximum part of the time that looks take, however many connections there are.
_MAX_LOAD = 0.1
# Minimum seconds between two log lines, since a client may connect again and again.
_LOG_SECONDS = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one gRPC connection, of which a second's worth may come at once, and of those of
    one address."""

    max_new_streams_per_s: int = setting(
        2000,
        "Maximum calls that one gRPC connection opens in a second: more than a router serves. A "
        "connection beyond it is dropped.",
        ge=1,
    )
    max_resets_per_s: int = setting(
        200,
        "Maximum calls that one gRPC connection opens and resets in a second, since thousands of "
        "them delay all other clients. A connection beyond it is dropped. A client may still "
        "cancel all that it has in flight at once.",
        ge=1,
    )
    max_drops_per_address: int = setting(
        3,
        "Maximum gRPC connections of one address that are dropped for their calls in a minute. "
        "Beyond, the kernel refuses the address new ones for a minute. 0: no limit, for routers "
        "that see their clients by the address of a proxy.",
        ge=0,
    )


@dataclass(slots=True)
class _Level:
    """Leaky bucket of `rate` per second, as large as one second's worth."""

    rate: int
    level: float = 0.0

    def add(self, amount: int, seconds: float) -> None:
        self.level = max(0.0, self.level + amount - self.rate * seconds)

    @property
    def is_over(self) -> bool:
        return self.level > self.rate


class CallRates:
    """Recent calls of a connection or a server, from counters that only grow. Pure."""

    def __init__(self, limits: ConnectionLimits, num_opened: int, num_reset: int) -> None:
        """Takes the counters of now: earlier calls do not count."""
        self._num_opened = num_opened
        self._num_reset = num_reset
        self._limits = limits
        self._new_streams = _Level(limits.max_new_streams_per_s)
        self._opened = _Level(limits.max_resets_per_s)
        self._reset = _Level(limits.max_resets_per_s)

    def update(self, num_opened: int, num_reset: int, seconds: float) -> str | None:
        """Counts the calls of the last `seconds`. Returns what is over a limit; None: nothing."""
        for level in (self._new_streams, self._opened):
            level.add(num_opened - self._num_opened, seconds)
        self._reset.add(num_reset - self._num_reset, seconds)
        self._num_opened, self._num_reset = num_opened, num_reset
        if self._new_streams.is_over:
            return f"opens more than {self._limits.max_new_streams_per_s} calls a second"
        if self._opened.is_over and self._reset.is_over:
            return f"opens and resets more than {self._limits.max_resets_per_s} calls a second"
        return None


class _ServerRates:
    """Rates of one server. Those of its connections are kept while their sum is over a limit,
    since only then can one of them be: reading them costs 0.1 ms each."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._all = CallRates(limits, 0, 0)
        self._of: dict[str, CallRates] = {}

    def update(self, server: Counters, seconds: float) -> Iterator[tuple[Counters, str]]:
        """Yields each connection that is over a limit, and which."""
        data = server["data"]
        num_opened, num_failed = count(data, "callsStarted"), count(data, "callsFailed")
        if self._all.update(num_opened, num_failed, seconds) is None:
            self._of.clear()
            return
        before, self._of = self._of, {}
        for connection in channelz.connections(server):
            name, data = connection["ref"]["socketId"], connection["data"]
            counts = count(data, "streamsStarted"), count(data, "streamsFailed")
            rates = self._of[name] = before.get(name) or CallRates(self._limits, *counts)
            excess = rates.update(*counts, seconds)
            if excess is not None:
                yield connection, excess


class ConnectionGuard:
    """Guard of the connections to one port of this process.

    Attributes:
        num_dropped: connections that it has dropped.
    """

    def __init__(self, limits: ConnectionLimits, max_connections: int) -> None:
        """Keeps `max_connections`: beyond, idle ones of the address with the most are closed."""
        self.num_dropped = 0
        self._limits = limits
        self._max_connections = max_connections
        self._refused = RefusedAddresses(limits.max_drops_per_address)
        self._port = 0
        self._servers: dict[str, _ServerRates] = {}
        self._rooms: dict[str, ConnectionRoom] = {}
        self._num_unlogged = 0
        self._next_log_at = -math.inf
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_refused_addresses(self) -> int:
        """Addresses that may not connect now."""
        return len(self._refused.holders)

    def start(self, port: int) -> None:
        """Starts the guard's thread, for connections to `port`."""
        self._port = port
        self._thread = threading.Thread(target=self._run, name="connection-guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the guard. Idempotent."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        now, pause = time.monotonic(), _INTERVAL_SECONDS
        while not self._stopped.wait(pause):
            before, now = now, time.monotonic()
            try:
                self._look(now, now - before)
            except Exception:
                logger.exception("the connection guard failed; it continues in a minute")
                self._stopped.wait(_LOG_SECONDS)
            pause = max(_INTERVAL_SECONDS, (time.monotonic() - now) / _MAX_LOAD)

    def _look(self, now: float, seconds: float) -> None:
        for server in channelz.servers():
            name = server["ref"]["serverId"]
            rates = self._servers.setdefault(name, _ServerRates(self._limits))
            for connection, excess in rates.update(server, seconds):
                for host, _ in self._drop([connection], excess):
                    self._refused.count(host, now)
            room = self._rooms.setdefault(name, ConnectionRoom(self._max_connections))
            idle = room.idle_over(server)
            self._drop(idle, f"was idle, beyond {self._max_connections} connections")
        self._refused.apply(self._port, now)

    def _drop(self, connections: Sequence[Counters], excess: str) -> Collection[Peer]:
        """Drops connections of this port, for one reason. Returns the peers of those that were
        still there."""
        peers = {peer for connection in connections if (peer := self._peer_of(connection))}
        dropped = channelz.shut_down(peers, self._port) if peers else ()
        self.num_dropped += len(dropped)
        self._num_unlogged += len(dropped)
        if dropped and time.monotonic() >= self._next_log_at:
            logger.warning(
                "dropped the connection of %s, which %s (%d dropped since the last such line)",
                host_and_port(*next(iter(dropped))),
                excess,
                self._num_unlogged,
            )
            self._num_unlogged = 0
            self._next_log_at = time.monotonic() + _LOG_SECONDS
        return dropped

    def _peer_of(self, connection: Counters) -> Peer | None:
        """Returns the peer of a connection to this port; None for another port's."""
        local = channelz.address(connection["local"])
        is_here = local is not None and local[1] == self._port
        return channelz.address(connection["remote"]) if is_here else None
