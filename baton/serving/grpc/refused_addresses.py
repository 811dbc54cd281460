"""Addresses that may not connect for a while, since their connections were dropped again and again.

A client that is dropped for its calls and connects again at once delays the calls of others each
time, until the guard has seen what it does (ADR 0066).
"""

import logging
from collections import defaultdict, deque
from ipaddress import ip_network

from baton.fairness.client_address import holder_of
from baton.serving.grpc import handshake_filter

# Time in which drops count together: an address is refused until fewer of them are so recent.
_SECONDS = 60.0

logger = logging.getLogger(__name__)


class RefusedAddresses:
    """Addresses that may not connect to a port of this process.

    Times are in seconds, since anything.

    Attributes:
        holders: addresses that are refused now; of IPv6 networks of 64 bits.
    """

    def __init__(self, max_drops: int) -> None:
        """Refuses an address with more than `max_drops` drops within a minute; 0: none. None either
        once the kernel has let no filter be set."""
        self.holders: tuple[str, ...] = ()
        self._max_drops = max_drops
        self._drops: defaultdict[str, deque[float]] = defaultdict(deque)

    def count(self, host: str, now: float) -> None:
        """Counts a connection of `host` that was dropped for its calls."""
        if self._max_drops:
            self._drops[holder_of(host)].append(now)

    def apply(self, port: int, now: float) -> None:
        """Has the kernel refuse connections to `port` as is due now."""
        for holder, times in [*self._drops.items()]:
            while times and times[0] <= now - _SECONDS:
                times.popleft()
            if not times:
                del self._drops[holder]
        due = [holder for holder, times in self._drops.items() if len(times) > self._max_drops]
        due.sort(key=lambda holder: self._drops[holder][-1])
        holders = tuple(due[-handshake_filter.MAX_ADDRESSES :])
        if {*holders} == {*self.holders}:
            return
        try:
            handshake_filter.refuse(port, [ip_network(holder) for holder in holders])
        except OSError as error:
            self._max_drops = 0
            self._drops.clear()
            logger.warning(
                "cannot refuse new connections of %s: %s; they are dropped one by one (a filter on "
                "TCP sockets may need CAP_NET_ADMIN)",
                ", ".join(holders),
                error.strerror or error,
            )
            return
        for holder in {*holders} - {*self.holders}:
            logger.warning(
                "refuses new connections of %s for %.0f s: more than %d were dropped within that "
                "time (--max-drops-per-address)",
                holder,
                _SECONDS,
                self._max_drops,
            )
        self.holders = holders
