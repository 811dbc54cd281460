"""Room for new gRPC connections: beyond the limit, idle ones of the address with most give way."""

from collections import defaultdict

from baton.fairness.client_address import holder_of
from baton.fairness.fair_bound import FairBound
from baton.serving.grpc import channelz
from baton.serving.grpc.channelz import Counters, count

# Connections that gRPC takes beyond the limit, until the guard has made room: a part of the limit.
_SPARE = 8


def with_spare(max_connections: int) -> int:
    """Returns how many connections gRPC may take where the guard keeps `max_connections`."""
    return max_connections + -(-max_connections // _SPARE)


class ConnectionRoom:
    """Room for new connections of one server, which is to have `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._closing: set[str] = set()  # numbers of those that the last look chose

    def idle_over(self, server: Counters) -> list[Counters]:
        """Returns the connections beyond the limit, to be closed now: those without a call, of the
        address with the most connections, its longest idle ones first."""
        left = [
            ref for ref in channelz.connection_refs(server) if ref["socketId"] not in self._closing
        ]
        chosen = self._choose(left) if len(left) > self._limit else []
        self._closing = {connection["ref"]["socketId"] for connection in chosen}
        return chosen

    def _choose(self, refs: list[Counters]) -> list[Counters]:
        refs_of: defaultdict[str, list[Counters]] = defaultdict(list)
        bound = FairBound(self._limit)
        for ref in refs:
            if host := channelz.host_of(ref):  # a Unix socket has none
                refs_of[holder_of(host)].append(ref)
                bound.add(holder_of(host))
        num_over = len(refs) - self._limit
        idle_of: dict[str, list[Counters]] = {}
        chosen: list[Counters] = []
        while len(chosen) < num_over and (holder := bound.largest) is not None:
            if holder not in idle_of:
                idle_of[holder] = _idle_last(refs_of[holder])
            if idle_of[holder]:
                chosen.append(idle_of[holder].pop())
                bound.remove(holder)
            else:  # all that are left have calls
                bound.remove(holder, bound.held_by(holder))
        return chosen


def _idle_last(refs: list[Counters]) -> list[Counters]:
    """Returns the connections without a call, the longest idle one last."""
    found = [connection for ref in refs if (connection := channelz.connection_of(ref)) is not None]
    idle = [connection for connection in found if not _num_calls(connection["data"])]
    return sorted(idle, key=_last_used, reverse=True)


def _num_calls(data: Counters) -> int:
    """Returns the number of calls in flight."""
    ended = count(data, "streamsSucceeded") + count(data, "streamsFailed")
    return count(data, "streamsStarted") - ended


def _last_used(connection: Counters) -> tuple[str, int]:
    """Returns what orders connections by their last call; those without any are by their age, as
    far as looks tell: gRPC numbers connections when it is asked for them."""
    data = connection["data"]
    last = ""
    if count(data, "streamsStarted"):
        times = ("lastRemoteStreamCreatedTimestamp", "lastMessageSentTimestamp")
        last = max(data.get(time, "") for time in times)
    return last, int(connection["ref"]["socketId"])
