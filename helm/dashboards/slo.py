"""Dashboard of service levels: latency, throughput and errors as clients see them."""

from grafana import Board, Panel, Query, Row
from promql import DURATION, PER_OUTPUT, TTFT, below, quantiles, rate, ratio

# What is the server's fault. A bad request, a client that left and a refusal are not.
_FAILED = 'error_type=~"INTERNAL|UNAVAILABLE|DATA_LOSS|FAILED_PRECONDITION|DEADLINE_EXCEEDED"'
_REFUSED = 'error_type="RESOURCE_EXHAUSTED"'


def _number(title: str, expression: str, unit: str = "short", text: str = "") -> Panel:
    return Panel(title, [Query(expression)], unit, text, kind="stat", width=4, height=4)


def _share(where: str) -> str:
    """Returns the share of requests that match `where`."""
    part = f"{rate(f'{DURATION}_count', where=where)} or vector(0)"
    return ratio(part, rate(f"{DURATION}_count"))


BOARD = Board(
    "baton-slo",
    "Baton: what users get",
    "Times to first token and between tokens, errors and refusals, as routers see them.",
    [
        Row(
            "Now",
            [
                _number("Requests", rate(f"{DURATION}_count"), "reqps"),
                _number("First token within 1 s", below("1.0", TTFT), "percentunit"),
                _number("50 ms between tokens", below("0.05", PER_OUTPUT), "percentunit"),
                _number(
                    "Failed",
                    _share(_FAILED),
                    "percentunit",
                    "Internal errors, lost workers, missed deadlines.",
                ),
                _number(
                    "Refused",
                    _share(_REFUSED),
                    "percentunit",
                    "There was no room in time for them.",
                ),
                _number("In flight", "sum(baton_requests_in_flight)"),
            ],
        ),
        Row(
            "Latency",
            [
                Panel("Time to first token", quantiles(TTFT), "s"),
                Panel(
                    "Time between tokens", quantiles(PER_OUTPUT), "s", "Of each request the mean."
                ),
                Panel("Duration of requests", quantiles(DURATION), "s"),
                Panel(
                    "Time to first token of all requests",
                    [Query(rate(f"{TTFT}_bucket", "le"), has_exemplars=True)],
                    "s",
                    "A diamond is one request, and leads to its trace.",
                    kind="heatmap",
                    width=24,
                ),
            ],
        ),
        Row(
            "Where a first token is waited for",
            [
                Panel(
                    "Until workers have taken a request", quantiles("baton_admission_seconds"), "s"
                ),
                Panel(
                    "In the queue of a prefill worker",
                    quantiles("baton_prefill_queue_seconds"),
                    "s",
                ),
                Panel(
                    "Waiting at routers",
                    [
                        Query("sum(baton_requests_waiting)", "requests"),
                        Query("sum(baton_waiting_prompt_tokens)", "prompt tokens"),
                    ],
                ),
            ],
        ),
        Row(
            "Traffic",
            [
                Panel(
                    "Requests by outcome",
                    [Query(rate(f"{DURATION}_count", "error_type"), "{{error_type}}")],
                    "reqps",
                    "Without a name: answered.",
                    is_stacked=True,
                ),
                Panel(
                    "Tokens of requests that ended",
                    [
                        Query(rate("baton_prompt_tokens_total"), "prompt"),
                        Query(rate("baton_output_tokens_total"), "output"),
                    ],
                    "cps",
                ),
                Panel(
                    "How hard the pools are pressed",
                    [Query("max by (role) (baton_pool_pressure)", "{{role}}")],
                    "percentunit",
                    "Above 100% there are too few workers of that role.",
                ),
            ],
        ),
    ],
)
