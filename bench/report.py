"""Benchmark report: one row per case, with its reference in the same run."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


class NotPossibleError(Exception):
    """This machine lacks what the benchmark needs; the text says what."""


class CasesFailedError(Exception):
    """Some cases failed, for these reasons; `rows` are those of the others."""

    def __init__(self, rows: "list[Row]", failures: dict[str, str]) -> None:
        super().__init__("\n".join(f"{case} failed: {why}" for case, why in failures.items()))
        self.rows = rows


@dataclass(frozen=True, slots=True)
class Row:
    """One case. `ratio` is made so that larger is better; `aim` is the ratio to reach, if any."""

    case: str
    value: float
    unit: str
    against: str
    reference: float
    ratio: float
    aim: float | None

    @property
    def holds(self) -> bool | None:
        return None if self.aim is None else self.ratio >= self.aim


def interleaved(contenders: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median of `repeats` measurements of each contender, taken in turns.

    A contender measures itself and returns its figure.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, measure in contenders.items():
            figures[name].append(measure())
    return medians(figures)


def medians(figures: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in figures.items()}


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    """Prints a table, or one JSON object a line with the same columns."""
    if as_json:
        for row in rows:
            print(json.dumps({**asdict(row), "holds": row.holds}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "value", "unit", "against", "reference", "ratio", "aim", "holds")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.value:,.4g}",
            row.unit,
            row.against,
            f"{row.reference:,.4g}",
            f"{row.ratio:.2f}",
            "" if row.aim is None else f"{row.aim:.3g}",
            {None: "", True: "yes", False: "no"}[row.holds],
        )
    Console().print(table)
