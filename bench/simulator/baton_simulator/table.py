"""An outcome as a row of text."""

from baton_simulator.outcome import Outcome

COLUMNS = (
    "case",
    "rate",
    "TTFT p50",
    "p90",
    "p99 s",
    "ITL p50",
    "p90",
    "p99 ms",
    "goodput/s",
    "of",
    "hits",
    "balance",
    "refused",
)


def row_of(outcome: Outcome) -> tuple[str, ...]:
    """A cell for each of `COLUMNS`."""
    return (
        outcome.case,
        f"{outcome.rate:g}",
        *(f"{value:.3g}" for value in outcome.ttft),
        *(f"{value * 1e3:.3g}" for value in outcome.itl),
        f"{outcome.goodput:.2f}",
        f"{outcome.offered:.2f}",
        f"{outcome.hit_rate:.1%}",
        f"{outcome.balance:.2f}",
        f"{outcome.num_refused:,}",
    )
