"""Command `baton replay`: decisions of other policies on the same recorded snapshots."""

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.errors import InvalidArgumentError
from baton_router.routing.placement.decision import DEFAULT_RULES
from baton_router.routing.placement.policy import POLICY_NAMES, PolicyName
from baton_router.routing.placement.record.replay import Redecided, cost_of, read_record, replay

_NUM_SHOWN = 20


@dataclass(slots=True)
class Summary:
    """Summary of a whole replay.

    Attributes:
        seconds: costs by the default policy, of the recorded choice and of the new one, for each
            request that had both.
        differing: the first decisions that differ.
    """

    num_decisions: int = 0
    num_other_prefill: int = 0
    num_other_decode: int = 0
    num_different: int = 0
    seconds: list[tuple[float, float]] = field(default_factory=list)
    differing: list[Redecided] = field(default_factory=list)

    def add(self, one: Redecided) -> None:
        self.num_decisions += 1
        self.num_different += not one.is_same
        self.num_other_prefill += one.prefill != one.recorded.prefill
        self.num_other_decode += one.decode != one.recorded.decode
        judged = DEFAULT_RULES.decide(one.recorded.inputs)
        before = cost_of(one.recorded.prefill, one.recorded.decode, judged)
        after = cost_of(one.prefill, one.decode, judged)
        if before is not None and after is not None:
            self.seconds.append((before, after))
        if not one.is_same and len(self.differing) < _NUM_SHOWN:
            self.differing.append(one)


def policy_of(name: str | None) -> PolicyName | None:
    """Returns the policy of this name. Raises `InvalidArgumentError` for an unknown one."""
    for known in POLICY_NAMES:
        if name == known:
            return known
    if name is None:
        return None
    raise InvalidArgumentError("--policy", f"is {name!r}; must be one of {', '.join(POLICY_NAMES)}")


def redecide(files: Iterable[Path], policy: PolicyName | None) -> Iterator[Redecided]:
    """Yields all decisions of the files, in order. `policy` None: the recorded one."""
    for file in files:
        yield from replay(read_record(file), policy)


def print_json(redecided: Iterable[Redecided]) -> None:
    """Prints one JSON object a line for each decision that differs; the last line has totals."""
    summary = Summary()
    for one in redecided:
        summary.add(one)
        if not one.is_same:
            print(json.dumps(_row(one)))
    print(json.dumps(_totals(summary)))


def print_table(redecided: Iterable[Redecided], console: Console) -> None:
    """Prints a table of the first decisions that differ, and totals."""
    summary = Summary()
    for one in redecided:
        summary.add(one)
    if summary.differing:
        table = Table("request", "was placed on", "now on", box=None)
        table.add_column("tokens", justify="right")
        for one in summary.differing:
            row = _row(one)
            was, now = (
                " + ".join(filter(None, (str(row[f"{k}prefill"]), str(row[f"{k}decode"]))))
                for k in ("", "new_")
            )
            table.add_row(str(row["request_id"]), was, now, str(row["num_tokens"]))
        console.print(table)
    console.print(_sentence(summary), highlight=False, markup=False)


def _row(one: Redecided) -> dict[str, object]:
    inputs = one.recorded.inputs
    return {
        "request_id": inputs.request_id,
        "at": one.recorded.at,
        "num_tokens": inputs.num_tokens,
        "prefill": one.recorded.prefill,
        "decode": one.recorded.decode,
        "new_prefill": one.prefill,
        "new_decode": one.decode,
    }


def _totals(summary: Summary) -> dict[str, object]:
    before, after = _means(summary)
    return {
        "num_decisions": summary.num_decisions,
        "num_different": summary.num_different,
        "num_other_prefill": summary.num_other_prefill,
        "num_other_decode": summary.num_other_decode,
        "mean_cost_s": before,
        "new_mean_cost_s": after,
    }


def _means(summary: Summary) -> tuple[float, float]:
    if not summary.seconds:
        return 0.0, 0.0
    before, after = zip(*summary.seconds, strict=True)
    return statistics.fmean(before), statistics.fmean(after)


def _sentence(summary: Summary) -> str:
    before, after = _means(summary)
    return (
        f"{summary.num_decisions} decisions, {summary.num_different} differ "
        f"({summary.num_other_prefill} in the prefill worker, {summary.num_other_decode} in the "
        f"decode worker). Mean cost by the default policy's reckoning: {before * 1000:.3g} ms as "
        f"recorded, {after * 1000:.3g} ms now."
    )
