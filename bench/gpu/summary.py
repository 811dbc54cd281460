"""Summary of the stages of `make gpu`: short enough for a terminal of which the end is kept."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bench.stages import StageResult

MAX_FAILURES: Final = 20
_MAX_REASON = 240
_INDENT = " " * 12


def exit_status(results: Sequence[StageResult]) -> int:
    """Returns 0 if every stage passed and every aim was reached, 1 if a stage failed, 2 if only
    aims were missed."""
    if any(result.failures for result in results):
        return 1
    return 0 if all(row["holds"] for row in _aims(results)) else 2


def summary(results: Sequence[StageResult]) -> list[str]:
    """Returns lines on each stage, then the ceilings, the aims and, last, the verdict."""
    failed = ", ".join(result.name for result in results if result.failures)
    aims = _aims(results)
    num_missed = sum(not row["holds"] for row in aims)
    return [
        *(line for result in results for line in _stage_lines(result)),
        *(line for result in results for line in _ceiling_lines(result.figures)),
        *map(_aim_line, aims),
        f"VERDICT     {f'FAILED: {failed}' if failed else 'every stage passed'}; "
        f"{num_missed} of {len(aims)} aims missed; exit status {exit_status(results)}",
    ]


def _aims(results: Sequence[StageResult]) -> list[dict[str, Any]]:
    """Returns the rows of the benchmark that have an aim."""
    rows = [row for result in results for row in result.figures.get("rows", ())]
    return [row for row in rows if row["holds"] is not None]


def _aim_line(row: dict[str, Any]) -> str:
    return (
        f"{'reached' if row['holds'] else 'missed':11} {row['case']}: {row['ratio']:.2f} of "
        f"{row['against']}, aim {row['aim']:g}"
    )


def _ceiling_lines(figures: dict[str, Any]) -> Iterator[str]:
    if "copy_bytes_per_s" in figures:
        yield (
            f"ceilings    {figures['gpu']}, torch {figures['torch']}, triton {figures['triton']}: "
            f"copy {figures['copy_bytes_per_s'] / 1e12:.2f} TB/s, bf16 product "
            f"{figures['product_flops'] / 1e12:.0f} TFLOP/s"
        )


def _stage_lines(result: StageResult) -> Iterator[str]:
    figures = result.figures
    yield (
        f"{result.name:11} {'FAILED' if result.failures else 'passed'} in {result.seconds:.0f} of "
        f"{result.budget:g} s; {figures.get('num_compiled', 0)} kernels compiled; "
        f"{_clock_text(figures.get('clocks'))}"
    )
    if "outcomes" in figures:
        counts = {"passed": 0, "failed": 0, "skipped": 0, **figures["outcomes"]}
        yield _INDENT + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    yield from _some([*_failure_lines(figures.get("reasons", {}))])
    yield from _some(result.failures)
    yield from _some([f"note: {note}" for note in result.notes])
    yield from (
        f"{_INDENT}{name}: {value:g}" for name, value in figures.get("measured", {}).items()
    )
    for row in figures.get("rows", ()):
        if row["unit"] in ("ms", "graphs"):
            yield f"{_INDENT}{row['case']}: {row['value']:.4g} {row['unit']}"


def _failure_lines(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each reason, with the first test that failed for it."""
    tests: dict[str, list[str]] = {}
    for test, why in reasons.items():
        tests.setdefault(why, []).append(test)
    for why, (first, *others) in tests.items():
        yield f"failed: {first}{f' and {len(others)} others' if others else ''} - {why}"


def _some(lines: Sequence[str]) -> Iterator[str]:
    """Yields the first lines, shortened."""
    for line in lines[:MAX_FAILURES]:
        text = line.replace("\n", " ")
        yield _INDENT + (text if len(text) <= _MAX_REASON else text[:_MAX_REASON] + " ...")
    if len(lines) > MAX_FAILURES:
        yield f"{_INDENT}... and {len(lines) - MAX_FAILURES} more"


def _clock_text(seen: dict[str, Any] | None) -> str:
    if not seen:
        return "clocks unknown"
    low, high = seen["sm_mhz"]
    return f"{low:.0f} to {high:.0f} MHz, slowed in {seen['slowed']:.0%} of samples"
