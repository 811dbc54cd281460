"""`baton simulate`: a recorded workload on a cluster that need not be there."""

import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from baton.errors import InvalidArgumentError
from baton_router.routing.admission.policy import ADMISSION_NAMES, AdmissionName
from baton_router.routing.placement.policy import POLICY_NAMES, PolicyName
from baton_simulator.cluster import OnProgress
from baton_simulator.html import description, report
from baton_simulator.machines import machine_of
from baton_simulator.outcome import Objectives, Outcome
from baton_simulator.setup import Setup
from baton_simulator.study import Study
from baton_simulator.table import COLUMNS, row_of
from baton_simulator.traces import MOONCAKE_BLOCK_SIZE, TraceError, TraceRow, read_trace

_LINE_SECONDS = 10.0  # between lines where stderr is no terminal


def study_of(
    *,
    num_prefill: int,
    num_decode: int,
    num_encode: int,
    policies: Sequence[str],
    rates: Sequence[float],
    slo_ttft: float,
    slo_itl: float,
    deadlines: bool,
    admission: str,
    latency_model: str,
    cache_blocks: int | None,
    block_size: int,
) -> Study:
    """Returns the study that the options describe: objectives in ms, cache in 512-token blocks.

    Raises `InvalidArgumentError`, which names the option and its value.
    """
    placing: dict[str, PolicyName] = {name: name for name in POLICY_NAMES}
    admitting: dict[str, AdmissionName] = {name: name for name in ADMISSION_NAMES}
    for policy in policies:
        _check_name("--policy", policy, placing)
    _check_name("--admission", admission, admitting)
    cache_tokens = None if cache_blocks is None else cache_blocks * MOONCAKE_BLOCK_SIZE
    machine = machine_of(latency_model)
    try:
        return Study(
            setup=Setup(
                machine=machine,
                num_prefill=num_prefill,
                num_decode=num_decode,
                num_encode=num_encode,
                block_size=block_size,
                cache_tokens=cache_tokens,
                admission=admitting[admission],
                ttft_deadline=slo_ttft / 1e3 if deadlines else None,
            ),
            policies=tuple(placing[policy] for policy in dict.fromkeys(policies)),
            rates=tuple(dict.fromkeys(rates)),
            objectives=Objectives(slo_ttft / 1e3, slo_itl / 1e3),
        )
    except InvalidArgumentError as error:
        option = f"--{error.field.replace('_', '-')}"
        raise InvalidArgumentError(option, error.problem) from error


def _check_name(option: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        raise InvalidArgumentError(option, f"is {name!r}; must be one of {', '.join(names)}")


def read_rows(path: Path, limit: int | None, image_tokens: int) -> list[TraceRow]:
    """The first requests of a trace. Raises `InvalidArgumentError`."""
    try:
        rows = list(islice(read_trace(path, image_tokens), limit))
    except (TraceError, OSError) as error:
        raise InvalidArgumentError("--trace", str(error)) from error
    if not rows:
        raise InvalidArgumentError("--trace", f"{path} has no request")
    return rows


def run(
    study: Study, rows: Sequence[TraceRow], name: str, report_path: Path | None, *, as_json: bool
) -> None:
    """Simulates everything; prints each outcome, and writes the report if asked."""
    outcomes = []
    errors = Console(stderr=True)
    total = len(study.rates) * len(study.setups())
    with _progress(errors, total) as on_progress:
        for outcome in study.run(rows, on_progress):
            outcomes.append(outcome)
            if as_json:
                print(json.dumps(outcome.to_json()), flush=True)
    if not as_json:
        print(description(study))
        _print_table(outcomes)
    if report_path is not None:
        try:
            report_path.write_text(report(study, outcomes, name), encoding="utf-8")
        except OSError as error:
            raise InvalidArgumentError("--report", str(error)) from error
        print(f"the report is in {report_path}", file=sys.stderr)


def _print_table(outcomes: Sequence[Outcome]) -> None:
    table = Table(box=None)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right")
    for outcome in outcomes:
        table.add_row(*row_of(outcome))
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table)


@contextmanager
def _progress(console: Console, num_cases: int) -> "Iterator[_Display]":
    if not console.is_terminal:
        yield _Lines(num_cases)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[now]}", style="dim"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bars(progress)


class _Display(Protocol):
    """Shows how far each simulation has come."""

    def __call__(self, case: str, rate: float) -> OnProgress: ...


class _Bars:
    """A bar for each case."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __call__(self, case: str, rate: float) -> OnProgress:
        task = self._progress.add_task(f"{case}, rate {rate:g}", now="")
        shown = -1

        def on_progress(done: int, total: int, now: float) -> None:
            nonlocal shown
            if done * 200 // total != shown:
                shown = done * 200 // total
                text = f"{done:,} of {total:,} requests, {now:,.0f} s"
                self._progress.update(task, completed=done, total=total, now=text)

        return on_progress


class _Lines:
    """A line every ten seconds."""

    def __init__(self, num_cases: int) -> None:
        self._num_cases = num_cases
        self._number = 0
        self._printed_at = time.monotonic()

    def __call__(self, case: str, rate: float) -> OnProgress:
        self._number += 1
        head = f"{self._number} of {self._num_cases}: {case}, rate {rate:g}"

        def on_progress(done: int, total: int, now: float) -> None:
            if time.monotonic() - self._printed_at >= _LINE_SECONDS:
                self._printed_at = time.monotonic()
                print(
                    f"{head}: {done:,} of {total:,} requests, {now:,.0f} s simulated",
                    file=sys.stderr,
                    flush=True,
                )

        return on_progress
