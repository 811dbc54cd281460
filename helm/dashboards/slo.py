"""Dashboard of service levels: latency, throughput and errors as clients see them."""

from grafana import Board, Panel, Query, Row
from promql import DURATION, MODEL, PER_OUTPUT, TTFT, below, of_model, quantiles, rate, ratio

# Errors of the server: bad requests, cancellations and rejections are none.
_FAILED = 'error_type=~"INTERNAL|UNAVAILABLE|DATA_LOSS|FAILED_PRECONDITION|DEADLINE_EXCEEDED"'
_REFUSED = 'error_type="RESOURCE_EXHAUSTED"'


def _number(title: str, expression: str, unit: str = "short", text: str = "") -> Panel:
    return Panel(title, [Query(expression)], unit, text, kind="stat", width=4, height=4)


def _rate(counter: str, *by: str, where: str = "") -> str:
    return rate(counter, *by, where=of_model(counter, where))


def _below(bound: str, histogram: str) -> str:
    return below(bound, histogram, of_model(histogram))


def _quantiles(histogram: str) -> list[Query]:
    return quantiles(histogram, where=of_model(histogram))


def _sum(gauge: str) -> str:
    return f"sum({gauge}{{{of_model(gauge)}}})"


def _share(where: str) -> str:
    """Returns the share of requests that match `where`."""
    part = f"{_rate(f'{DURATION}_count', where=where)} or vector(0)"
    return ratio(part, _rate(f"{DURATION}_count"))


BOARD = Board(
    "baton-slo",
    "Baton: service levels",
    "Time to first token and per output token, errors and rejections, as routers see them.",
    [
        Row(
            "Now",
            [
                _number("Requests", _rate(f"{DURATION}_count"), "reqps", "Ended requests."),
                _number(
                    "TTFT below 1 s",
                    _below("1.0", TTFT),
                    "percentunit",
                    "Share of requests by their time from arrival to the first token.",
                ),
                _number(
                    "TPOT below 50 ms",
                    _below("0.05", PER_OUTPUT),
                    "percentunit",
                    "Share of requests by their mean time per output token after the first.",
                ),
                _number(
                    "Failed",
                    _share(_FAILED),
                    "percentunit",
                    "Internal errors, lost workers, exceeded deadlines.",
                ),
                _number(
                    "Rejected",
                    _share(_REFUSED),
                    "percentunit",
                    "By admission control, quotas or rate limits.",
                ),
                _number(
                    "In flight", _sum("baton_requests_in_flight"), text="Requests that run or wait."
                ),
            ],
        ),
        Row(
            "Latency",
            [
                Panel(
                    "Time to first token",
                    _quantiles(TTFT),
                    "s",
                    text="From arrival to the first token.",
                ),
                Panel(
                    "Time per output token", _quantiles(PER_OUTPUT), "s", "Mean of each request."
                ),
                Panel(
                    "Request duration",
                    _quantiles(DURATION),
                    "s",
                    text="From arrival to the last token.",
                ),
                Panel(
                    "Distribution of time to first token",
                    [Query(_rate(f"{TTFT}_bucket", "le"), has_exemplars=True)],
                    "s",
                    "Each diamond is an exemplar: one request, with a link to its trace.",
                    kind="heatmap",
                    width=24,
                ),
            ],
        ),
        Row(
            "Time to first token by stage",
            [
                Panel(
                    "Admission",
                    _quantiles("baton_admission_seconds"),
                    "s",
                    text="From arrival until all workers first admitted the request.",
                ),
                Panel(
                    "Prefill queue",
                    _quantiles("baton_prefill_queue_seconds"),
                    "s",
                    text="From the call to the worker that computes the prompt to its first step.",
                ),
                Panel(
                    "Admission queues",
                    [
                        Query(_sum("baton_requests_waiting"), "requests"),
                        Query(_sum("baton_waiting_prompt_tokens"), "prompt tokens"),
                    ],
                    text="What waits in routers until workers have room.",
                ),
                Panel(
                    "Routers with paused admission",
                    [Query("sum(baton_admission_paused)", "routers")],
                    text="Their requests wait until `baton resume`, and expire.",
                ),
            ],
        ),
        Row(
            "Traffic",
            [
                Panel(
                    "Requests by outcome",
                    [Query(_rate(f"{DURATION}_count", "error_type"), "{{error_type}}")],
                    "reqps",
                    "Without an error code: success.",
                    is_stacked=True,
                ),
                Panel(
                    "Token throughput of ended requests",
                    [
                        Query(_rate("baton_prompt_tokens_total"), "prompt"),
                        Query(_rate("baton_output_tokens_total"), "output"),
                    ],
                    "cps",
                    text="Tokens of prompts and outputs, counted when a request ends.",
                ),
                Panel(
                    "Pool load",
                    [
                        Query(
                            'max by (model, role) (baton_pool_pressure{model=~"$model"})',
                            "{{model}} {{role}}",
                        )
                    ],
                    "percentunit",
                    "Above 100% the role has too few workers.",
                ),
            ],
        ),
        Row(
            "Tenants",
            [
                Panel(
                    "Requests by tenant",
                    [Query(rate("baton_tenant_requests_total", "tenant"), "{{tenant}}")],
                    "reqps",
                    "Admitted requests that have ended. `*`: tenants without a label of their own.",
                    is_stacked=True,
                ),
                Panel(
                    "Tokens by tenant",
                    [
                        Query(
                            rate("baton_tenant_prompt_tokens_total", "tenant"), "{{tenant}} prompt"
                        ),
                        Query(
                            rate("baton_tenant_output_tokens_total", "tenant"), "{{tenant}} output"
                        ),
                    ],
                    "cps",
                    "Tokens of prompts and outputs, counted when a request ends.",
                    is_stacked=True,
                ),
                Panel(
                    "Refused calls by tenant and reason",
                    [
                        Query(
                            rate("baton_requests_refused_total", "tenant", "reason"),
                            "{{tenant}} {{reason}}",
                        )
                    ],
                    "reqps",
                    "By rate limits, full queues, deadlines that cannot be met, and bounds.",
                    is_stacked=True,
                ),
            ],
        ),
    ],
    [MODEL],
)
