"""Expressions of PromQL that the dashboards have in common."""

from grafana import Query

_WINDOW = "$__rate_interval"
_QUANTILES = ("0.5", "0.95", "0.99")

MODEL = ("model", "baton_workers")
"""Variable of a dashboard: the models, as routers serve them."""

TTFT = "gen_ai_server_time_to_first_token_seconds"
PER_OUTPUT = "gen_ai_server_time_per_output_token_seconds"
DURATION = "gen_ai_server_request_duration_seconds"


def rate(counter: str, *by: str, where: str = "") -> str:
    """Returns a counter's growth per second, summed over processes."""
    grouped = f" by ({', '.join(by)})" if by else ""
    matching = f"{{{where}}}" if where else ""
    return f"sum{grouped} (rate({counter}{matching}[{_WINDOW}]))"


def of_model(metric: str, where: str = "") -> str:
    """Returns the matchers of a router's metric for the selected models, and `where`."""
    label = "gen_ai_request_model" if metric.startswith("gen_ai_") else "model"
    return ",".join(filter(None, (f'{label}=~"$model"', where)))


def ratio(part: str, whole: str) -> str:
    return f"({part}) / ({whole})"


def below(bound: str, histogram: str, where: str = "") -> str:
    """The part of what a histogram has counted that is not above one of its bounds."""
    bounded = ",".join(filter(None, (where, f'le="{bound}"')))
    return ratio(
        rate(f"{histogram}_bucket", where=bounded), rate(f"{histogram}_count", where=where)
    )


def quantiles(
    histogram: str, *by: str, of: tuple[str, ...] = _QUANTILES, where: str = ""
) -> list[Query]:
    """Returns quantiles of a histogram over all processes; the first has the exemplars."""
    growth = rate(f"{histogram}_bucket", "le", *by, where=where)
    labels = " ".join(f"{{{{{label}}}}}" for label in by)
    return [
        Query(
            f"histogram_quantile({quantile}, {growth})",
            f"p{100 * float(quantile):g} {labels}".rstrip(),
            has_exemplars=quantile == of[0],
        )
        for quantile in of
    ]
