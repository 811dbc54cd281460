"""Metrics of a process's Redis client."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client.core import Metric

from baton.serving.telemetry.families import counter, gauge


class RoundTrips(Protocol):
    """Counts of Redis round trips, by their kind (`baton.cluster.redis.round_trips`)."""

    @property
    def num_answered(self) -> Mapping[str, int]: ...
    @property
    def num_failed(self) -> Mapping[str, int]: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...


def redis_metrics(round_trips: RoundTrips, staleness: Mapping[str, float]) -> Iterable[Metric]:
    """Yields the metrics. `staleness`: seconds without an answer of Redis, by what is asked."""
    numbers = {"answered": round_trips.num_answered, "failed": round_trips.num_failed}
    yield counter(
        "baton_redis_round_trips_total",
        "Round trips to Redis: commands, or reads of streams, which block for new entries.",
        {(kind, how): n for how, by_kind in numbers.items() for kind, n in by_kind.items()},
        ("kind", "outcome"),
    )
    yield counter(
        "baton_redis_round_trip_seconds_total",
        "Total time of answered round trips to Redis, the blocking of reads included.",
        {(kind,): seconds for kind, seconds in round_trips.seconds.items()},
        ("kind",),
    )
    yield gauge(
        "baton_redis_staleness_seconds",
        "Time since Redis last answered, by subscription; 0 while it answers.",
        {(what,): seconds for what, seconds in staleness.items()},
        ("subscription",),
    )
