"""Dashboard of KV handoffs."""

from grafana import Board, Panel, Query, Row
from promql import MODEL, of_model, quantiles, rate, ratio

_ENDS = ("0.5", "0.99")
_COMMAND = 'kind="command"'
_ANSWERED = f'{_COMMAND},outcome="answered"'


def _of_router(counter: str, *by: str) -> str:
    return rate(counter, *by, where=of_model(counter))


BOARD = Board(
    "baton-handoff",
    "Baton: KV handoff",
    "KV transfers, leases, placements, prefix cache hits and Redis round trips.",
    [
        Row(
            "Transfers",
            [
                Panel(
                    "KV throughput",
                    [Query(rate("baton_kv_transfer_bytes_total", "connector"), "{{connector}}")],
                    "Bps",
                    is_stacked=True,
                    text="Bytes of KV received from other workers.",
                ),
                Panel(
                    "Exposed transfer time",
                    quantiles("baton_kv_transfer_exposed_seconds", "connector", of=_ENDS),
                    "s",
                    "The part after the last block was computed, which a request waits for.",
                ),
                Panel(
                    "Transfer time",
                    quantiles("baton_kv_transfer_seconds", "connector", of=_ENDS),
                    "s",
                    "From the claim on, with the computation of the blocks.",
                ),
                Panel(
                    "Failed transfers",
                    [Query(rate("baton_kv_transfer_failures_total", "reason"), "{{reason}}")],
                    "ops",
                    "cancelled: the request was cancelled.",
                    is_stacked=True,
                ),
                Panel(
                    "Leases",
                    [Query("sum by (role) (baton_leases)", "{{role}}")],
                    text="On KV that other workers are to fetch.",
                ),
                Panel(
                    "Oldest lease",
                    [Query("max by (role) (baton_oldest_lease_age_seconds)", "{{role}}")],
                    "s",
                    text="Age. One that grows: a worker does not fetch what is kept for it.",
                ),
            ],
        ),
        Row(
            "Placements",
            [
                Panel(
                    "Placement decisions",
                    [Query(_of_router("baton_placements_total", "path"), "{{path}}")],
                    "ops",
                    is_stacked=True,
                    text="By path: handoff from a prefill to a decode worker, or one worker alone.",
                ),
                Panel(
                    "Failed attempts",
                    [Query(_of_router("baton_attempt_failures_total", "kind"), "{{kind}}")],
                    "ops",
                    is_stacked=True,
                    text="Calls of workers that failed. The router tries others.",
                ),
                Panel(
                    "Migrations",
                    [Query(_of_router("baton_migrations_total"), "migrations")],
                    "ops",
                    text="Requests that resumed on another worker.",
                ),
            ],
        ),
        Row(
            "Memory and prefixes",
            [
                Panel(
                    "KV blocks held",
                    [
                        Query(
                            ratio(
                                'sum by (role) (baton_kv_blocks{state="held"})',
                                "sum by (role) (baton_kv_blocks)",
                            ),
                            "{{role}}",
                        )
                    ],
                    "percentunit",
                    "Share of each role's pools. Cached blocks that are not held can be evicted.",
                    most=1,
                ),
                Panel(
                    "Prefix cache hits",
                    [Query(rate("baton_prefix_hit_tokens_total", "source"), "{{source}}")],
                    "cps",
                    "Prompt tokens in the worker's own cache, or fetched from another worker's.",
                    is_stacked=True,
                ),
                Panel(
                    "Prefix cache hit rate",
                    [
                        Query(
                            ratio(
                                rate("baton_prefix_hit_tokens_total", "role"),
                                rate("baton_prefix_lookup_tokens_total", "role"),
                            ),
                            "{{role}}",
                        )
                    ],
                    "percentunit",
                    "On decode workers: KV that need not be transferred.",
                    most=1,
                ),
            ],
        ),
        Row(
            "Redis",
            [
                Panel(
                    "Round trips",
                    [
                        Query(
                            rate("baton_redis_round_trips_total", "kind", "outcome"),
                            "{{kind}} {{outcome}}",
                        )
                    ],
                    "ops",
                    text="Calls of Redis by routers and workers.",
                ),
                Panel(
                    "Command latency",
                    [
                        Query(
                            ratio(
                                rate("baton_redis_round_trip_seconds_total", where=_COMMAND),
                                rate("baton_redis_round_trips_total", where=_ANSWERED),
                            ),
                            "mean",
                        )
                    ],
                    "s",
                    text="Mean time of one answered command.",
                ),
                Panel(
                    "Time since the last answer",
                    [
                        Query(
                            "max by (subscription) (baton_redis_staleness_seconds)",
                            "{{subscription}}",
                        )
                    ],
                    "s",
                    "Serving continues; cache locality becomes stale.",
                ),
                Panel(
                    "Unpublished KV events",
                    [Query("sum(baton_unpublished_kv_events)", "events")],
                    text="Changes of prefix caches that routers do not know yet.",
                ),
                Panel(
                    "Indexed hashes",
                    [
                        Query(
                            'sum by (instance) (baton_indexed_hashes{model=~"$model"})',
                            "{{instance}}",
                        )
                    ],
                    text="Cached KV blocks and encoder outputs that each router knows.",
                ),
                Panel(
                    "Routers with a cold locality index",
                    [Query('sum(1 - baton_index_is_warm{model=~"$model"})', "routers")],
                    text="They do not know yet what workers have cached.",
                ),
            ],
        ),
    ],
    [MODEL],
)
