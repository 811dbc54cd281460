"""Dashboard of traces: latency of single requests by stage."""

from grafana import Board, Panel, Row, TraceQuery
from promql import TTFT, quantiles

_OURS = 'resource.service.namespace = "baton"'
# Without the spans that cover those of their process.
_PARTS = 'name !~ "generate|prefill.call|decode.call"'
_TRANSFERS = 'name = "kv.transfer"'
_FAILED = 'name = "generate" && status = error'


def _spans(condition: str) -> str:
    return f"{{ {_OURS} && {condition} }}"


def _slowest(name: str, least: str, *told: str) -> str:
    """Returns a query of spans longer than `least`, with the attributes `told`."""
    matching = _spans(f'name = "{name}" && duration > {least}')
    return f"{matching} | select({', '.join(told)})"


BOARD = Board(
    "baton-trace",
    "Baton: traces",
    "Single requests: the slowest ones, and their time by span. Traces must be sent to Tempo "
    "(OTEL_EXPORTER_OTLP_ENDPOINT).",
    [
        Row(
            "Exemplars",
            [
                Panel(
                    "Time to first token",
                    quantiles(TTFT),
                    "s",
                    "Each diamond is an exemplar: one request, with a link to its trace.",
                    width=12,
                ),
                Panel(
                    "Exposed transfer time",
                    quantiles("baton_kv_transfer_exposed_seconds", of=("0.5", "0.99")),
                    "s",
                    "Each diamond is an exemplar: one request, with a link to its trace.",
                    width=12,
                ),
            ],
        ),
        Row(
            "Requests",
            [
                Panel(
                    "Slow requests",
                    [
                        TraceQuery(
                            _slowest(
                                "generate",
                                "1s",
                                "span.gen_ai.usage.input_tokens",
                                "span.gen_ai.usage.output_tokens",
                                "span.baton.num_migrations",
                            )
                        )
                    ],
                    kind="table",
                    width=12,
                    height=10,
                    text="They took more than 1 s. A click opens the trace.",
                ),
                Panel(
                    "Failed requests",
                    [TraceQuery(_spans(_FAILED))],
                    kind="table",
                    width=12,
                    height=10,
                    text="A click opens the trace.",
                ),
            ],
        ),
        Row(
            "Time by span",
            [
                Panel(
                    "95th percentile of each span",
                    [
                        TraceQuery(
                            f"{_spans(_PARTS)} | quantile_over_time(duration, 0.95) by (name)"
                        )
                    ],
                    "s",
                    width=12,
                    text="Duration of each stage of requests.",
                ),
                Panel(
                    "Total time by span",
                    [TraceQuery(f"{_spans(_PARTS)} | sum_over_time(duration) by (name)")],
                    "s",
                    "Time of all requests in each stage. Needs Tempo 2.7 or later.",
                    width=12,
                    is_stacked=True,
                ),
            ],
        ),
        Row(
            "Transfers",
            [
                Panel(
                    "Exposed transfer time by connector",
                    [
                        TraceQuery(
                            f"{_spans(_TRANSFERS)} | quantile_over_time("
                            "span.baton.transfer.exposed_ms, 0.5, 0.99) "
                            "by (span.baton.transfer.connector)"
                        )
                    ],
                    "ms",
                    width=12,
                    text="The part of KV transfers for which the second token had to wait.",
                ),
                Panel(
                    "Slow transfers",
                    [
                        TraceQuery(
                            _slowest(
                                "kv.transfer",
                                "100ms",
                                "span.baton.transfer.num_bytes",
                                "span.baton.transfer.exposed_ms",
                                "span.baton.transfer.connector",
                            )
                        )
                    ],
                    kind="table",
                    width=12,
                    text="A click opens the trace.",
                ),
            ],
        ),
    ],
)
