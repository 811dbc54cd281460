"""Dashboard of KV handoffs."""

from grafana import Board, Panel, Query, Row
from promql import quantiles, rate, ratio

_ENDS = ("0.5", "0.99")
_COMMAND = 'kind="command"'
_ANSWERED = f'{_COMMAND},outcome="answered"'

BOARD = Board(
    "baton-handoff",
    "Baton: how the baton is passed",
    "Transfers of KV, leases, placements, prefixes that were found, and what Redis is asked.",
    [
        Row(
            "Transfers",
            [
                Panel(
                    "KV moved",
                    [Query(rate("baton_kv_transfer_bytes_total", "connector"), "{{connector}}")],
                    "Bps",
                    is_stacked=True,
                ),
                Panel(
                    "Exposed",
                    quantiles("baton_kv_transfer_exposed_seconds", "connector", of=_ENDS),
                    "s",
                    "What a request waits for after its last block was computed.",
                ),
                Panel(
                    "Whole transfer",
                    quantiles("baton_kv_transfer_seconds", "connector", of=_ENDS),
                    "s",
                    "From the claim on, so that the computing of the blocks is part of it.",
                ),
                Panel(
                    "Failures",
                    [Query(rate("baton_kv_transfer_failures_total", "reason"), "{{reason}}")],
                    "ops",
                    "called_off: the request had ended meanwhile.",
                    is_stacked=True,
                ),
                Panel(
                    "Leases",
                    [Query("sum by (role) (baton_leases)", "{{role}}")],
                    text="What other workers are to fetch.",
                ),
                Panel(
                    "Oldest lease",
                    [Query("max by (role) (baton_oldest_lease_age_seconds)", "{{role}}")],
                    "s",
                ),
            ],
        ),
        Row(
            "Placements",
            [
                Panel(
                    "Where requests run",
                    [Query(rate("baton_placements_total", "way"), "{{way}}")],
                    "ops",
                    is_stacked=True,
                ),
                Panel(
                    "Attempts that came to nothing",
                    [Query(rate("baton_setbacks_total", "kind"), "{{kind}}")],
                    "ops",
                    is_stacked=True,
                ),
                Panel(
                    "Requests that went on elsewhere",
                    [Query(rate("baton_migrations_total"), "migrations")],
                    "ops",
                ),
            ],
        ),
        Row(
            "Memory and prefixes",
            [
                Panel(
                    "KV blocks in use",
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
                    "Of both pools. Cached blocks that are not in use can be reused.",
                    most=1,
                ),
                Panel(
                    "Prompt tokens not computed",
                    [Query(rate("baton_prefix_hit_tokens_total", "source"), "{{source}}")],
                    "cps",
                    "For their KV was cached here, or came from another worker's cache.",
                    is_stacked=True,
                ),
                Panel(
                    "Part of the prompts that was cached",
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
                    "With decode workers: what need not be moved.",
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
                ),
                Panel(
                    "Time of a command",
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
                ),
                Panel(
                    "Without an answer for",
                    [Query("max by (what) (baton_redis_staleness_seconds)", "{{what}}")],
                    "s",
                    "Serving goes on; less is known of what is cached where.",
                ),
                Panel(
                    "KV events that are not published",
                    [Query("sum(baton_unpublished_kv_events)", "events")],
                ),
                Panel(
                    "Blocks that routers know of",
                    [Query("sum by (instance) (baton_indexed_blocks)", "{{instance}}")],
                ),
                Panel(
                    "Routers that have yet to read what is cached",
                    [Query("sum(1 - baton_index_is_warm)", "routers")],
                ),
            ],
        ),
    ],
)
