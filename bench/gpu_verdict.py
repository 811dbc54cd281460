"""Verdict on a GPU: `make gpu`. Ceilings, a smoke test, all tests, benchmarks; one JSON file.

    python -m bench.gpu_verdict

Each stage runs in processes of its own, whatever became of those before it, and has a budget, so
that all of them end within nine minutes on a machine that has compiled nothing yet. A stage passes
if it ended in time, with exit status 0, and found something out. The exit status is 0 if all passed
and every aim was reached, 1 if a stage failed, 2 if only aims were missed.

Imports no torch: what happens to the GPU does not happen to this process.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.gpu_clocks import clocks
from bench.stages import Findings, Stage, StageResult, run_stage

_RESULTS = Path(__file__).parent / "results"
# Processes on one GPU, each with a context and a pool of its own: few enough for its memory.
_SMOKE_PROCESSES, _TEST_PROCESSES = 4, 12
_TEST_SECONDS = 60


def stages(folder: Path) -> tuple[Stage, ...]:
    """Returns the stages of `make gpu`, which write their reports to `folder`. The first compiled
    kernels are the smoke test's; the cache of compiled kernels is common to all."""
    ceilings, benchmark = folder / "ceilings.json", folder / "benchmark.json"
    python = (sys.executable, "-m")
    cache = {"TRITON_CACHE_DIR": str(kernel_cache())}
    return (
        Stage(
            "ceilings",
            (*python, "bench.gpu_ceilings", str(ceilings)),
            40,
            partial(read_ceilings, ceilings),
        ),
        _tests("smoke", "gpu and smoke", 90, _SMOKE_PROCESSES, folder, cache),
        _tests("tests", "gpu and not smoke", 180, _TEST_PROCESSES, folder, cache),
        Stage(
            "benchmark",
            (*python, "bench.gpu", str(benchmark), "--seconds", "140"),
            200,
            partial(read_benchmark, benchmark),
            cache,
        ),
    )


def _tests(
    name: str,
    selection: str,
    budget: float,
    num_processes: int,
    folder: Path,
    environment: dict[str, str],
) -> Stage:
    report = folder / f"{name}.jsonl"
    options = ("-c", "tests/gpu.ini", "--rootdir", ".", "-m", selection)
    folders = ("tests/kernels/gpu", "tests/gpu")
    return Stage(
        name,
        (sys.executable, "-m", *_pytest(num_processes), *options, *folders),
        budget,
        partial(read_tests, report),
        {**environment, "BATON_LANE_REPORT": str(report)},
    )


def _pytest(num_processes: int) -> tuple[str, ...]:
    """Returns the module that runs tests side by side, so that kernels are compiled side by side
    too, and its options. With pytest-timeout a test that hangs fails by name."""
    count = str(min(num_processes, os.cpu_count() or 1))
    options: tuple[str, ...] = ()
    if find_spec("pytest_timeout"):
        options = ("--timeout", str(_TEST_SECONDS), "--timeout-method", "thread")
    if find_spec("xdist"):
        return ("pytest", "-n", count, "--dist", "worksteal", *options)
    # Without xdist a timeout ends the whole process, and with it all tests of its shard.
    return ("tests.support.shards", count)


def read_ceilings(report: Path) -> Findings:
    return Findings(json.loads(report.read_text()))


def read_tests(report: Path) -> Findings:
    """Returns the outcomes of a run of pytest, which fails if no test of it passed. The report has
    a line for each of its processes."""
    runs = [json.loads(line) for line in report.read_text().splitlines()]
    outcomes = dict(sum((Counter(run["outcomes"]) for run in runs), Counter[str]()))
    failed = [test for run in runs for test in run["failed"]]
    failures = [f"{len(failed)} tests failed"] if failed else []
    if not outcomes.get("passed"):
        failures.append("no test passed")
    return Findings({"outcomes": outcomes, "failed": failed}, tuple(failures))


def read_benchmark(report: Path) -> Findings:
    """Returns rows and failures of the benchmark, which fails if there is no row."""
    content = json.loads(report.read_text())
    failures = [f"{case}: {why}" for case, why in content["failures"].items()]
    if not content["rows"]:
        failures.append("no case was measured")
    return Findings(content, tuple(failures))


def kernel_cache() -> Path:
    """Returns the folder of Triton's compiled kernels."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def run(todo: Iterable[Stage]) -> Iterator[StageResult]:
    """Runs stages. Adds to the figures of each its count of compiled kernels and the clocks."""
    for stage in todo:
        print(f"\n{stage.name}: {stage.budget:g} s at most", flush=True)
        num_before = _num_compiled()
        with clocks() as seen:
            result = run_stage(stage)
        num_compiled = _num_compiled() - num_before
        figures = {**result.figures, "num_compiled": num_compiled, "clocks": seen}
        yield replace(result, figures=figures)


def _num_compiled() -> int:
    return sum(1 for _ in kernel_cache().glob("*/*.cubin"))


def exit_status(results: Sequence[StageResult]) -> int:
    """Returns 0 if every stage passed and every aim was reached, 1 if a stage failed, 2 if only
    aims were missed."""
    if any(result.failures for result in results):
        return 1
    return 2 if _missed(results) else 0


def _aims(results: Sequence[StageResult]) -> list[dict[str, Any]]:
    """Returns the rows of the benchmark that have an aim."""
    rows = [row for result in results for row in result.figures.get("rows", ())]
    return [row for row in rows if row["holds"] is not None]


def _missed(results: Sequence[StageResult]) -> list[dict[str, Any]]:
    return [row for row in _aims(results) if not row["holds"]]


def summary(results: Sequence[StageResult]) -> list[str]:
    """Returns lines on each stage, with its figures, the missed aims and, last, the verdict."""
    told = [line for result in results for line in _stage_lines(result)]
    missed = _missed(results)
    told += [
        f"missed      {row['case']}: {row['ratio']:.2f} of {row['against']}, aim {row['aim']:g}"
        for row in missed
    ]
    failed = ", ".join(result.name for result in results if result.failures)
    return [
        *told,
        f"VERDICT     {f'FAILED: {failed}' if failed else 'every stage passed'}; "
        f"{len(missed)} of {len(_aims(results))} aims missed; exit status {exit_status(results)}",
    ]


def _stage_lines(result: StageResult) -> Iterator[str]:
    figures, indent = result.figures, " " * 12
    yield (
        f"{result.name:11} {'FAILED' if result.failures else 'passed'} in {result.seconds:.0f} of "
        f"{result.budget:g} s; {figures['num_compiled']} kernels compiled; "
        f"{_clock_text(figures['clocks'])}"
    )
    if "copy_bytes_per_s" in figures:
        yield (
            f"{indent}{figures['gpu']}, torch {figures['torch']}, triton {figures['triton']}: copy "
            f"{figures['copy_bytes_per_s'] / 1e12:.2f} TB/s, bf16 product "
            f"{figures['product_flops'] / 1e12:.0f} TFLOP/s"
        )
    if "outcomes" in figures:
        counts = {"passed": 0, "failed": 0, "skipped": 0, **figures["outcomes"]}
        yield indent + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    yield from (f"{indent}failed: {test}" for test in figures.get("failed", ()))
    yield from (f"{indent}{why}" for why in result.failures)
    for row in figures.get("rows", ()):
        if row["unit"] == "ms":
            yield f"{indent}{row['case']}: {row['value']:.2f} ms"


def _clock_text(seen: dict[str, Any]) -> str:
    if not seen:
        return "clocks unknown"
    low, high = seen["sm_mhz"]
    return f"{low:.0f} to {high:.0f} MHz, slowed in {seen['slowed']:.0%} of samples"


def write(
    results: Sequence[StageResult], seconds: float, status: int | None, folder: Path = _RESULTS
) -> Path:
    """Writes all results to the file of this GPU, and returns its path. `status`: exit status; None
    while stages are left."""
    folder.mkdir(parents=True, exist_ok=True)
    gpu = next((r.figures["gpu"] for r in results if "gpu" in r.figures), "unknown GPU")
    path = folder / f"{gpu.replace(' ', '-').lower()}.json"
    content = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "seconds": seconds,
        "exit_status": status,
        "summary": summary(results),
        "stages": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def judge(todo: Iterable[Stage], folder: Path = _RESULTS) -> int:
    """Runs stages, writes their results after each, prints the summary. Returns the exit status."""
    start = time.monotonic()
    results: list[StageResult] = []
    for result in run(todo):
        results.append(result)
        write(results, time.monotonic() - start, None, folder)
    seconds, status = time.monotonic() - start, exit_status(results)
    path = write(results, seconds, status, folder)
    print(f"\nreport      {path}, after {seconds:.0f} s")
    print("\n".join(summary(results)), flush=True)  # the verdict is the last line
    return status


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as reports:
        raise SystemExit(judge(stages(Path(reports))))
