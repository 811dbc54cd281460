"""Verdict on a GPU: `make gpu`. Ceilings, a smoke test, benchmarks, tests; one JSON file and a log
of each stage.

    python -m bench.gpu.verdict [--only STAGE] [--seconds N] [--results FOLDER]

Each stage runs in processes of its own, whatever became of those before it, and has a budget. A
stage passes if it ended in time, with exit status 0, and found something out. The exit status is 0
if all passed and every aim was reached, 1 if a stage failed, 2 if only aims were missed.

Imports no torch: what happens to the GPU does not happen to this process.
"""

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from bench.gpu.bundle import BUNDLE, unpack
from bench.gpu.clocks import clocks
from bench.gpu.stages import kernel_cache, smoke_alone, stages
from bench.gpu.summary import exit_status, summary
from bench.stages import GRACE_SECONDS, Stage, StageResult, run_stage

SECONDS: Final = 536
"""Time of all stages together: under nine minutes."""

_RESULTS = Path(__file__).parents[1] / "results"
# With less time left a stage does not begin: it would find nothing out.
_SHORTEST_SECONDS = 15


def run(
    todo: Iterable[Stage],
    folder: Path,
    seconds: float = SECONDS,
    shortest: float = _SHORTEST_SECONDS,
) -> Iterator[StageResult]:
    """Runs stages within `seconds`, with their logs in `folder`; leaves out one with less time left
    than `shortest`. Adds to the figures of each its count of compiled kernels and the clocks."""
    ends = time.monotonic() + seconds
    for stage in todo:
        left = ends - time.monotonic() - 2 * GRACE_SECONDS
        if left < min(stage.budget, shortest):
            yield StageResult(stage.name, 0, stage.budget, {}, (), ("left out: no time is left",))
            continue
        within = replace(stage, budget=min(stage.budget, left))
        print(f"{stage.name}: {within.budget:.0f} s at most", flush=True)
        num_before = _num_compiled()
        with clocks() as seen:
            result = run_stage(within, folder / f"{stage.name}.log")
        num_compiled = _num_compiled() - num_before
        yield replace(
            result, figures={**result.figures, "num_compiled": num_compiled, "clocks": seen}
        )


def scaled(todo: Iterable[Stage], seconds: float) -> list[Stage]:
    """Returns stages whose budgets are those of a run of `seconds`."""
    return [replace(stage, budget=stage.budget * seconds / SECONDS) for stage in todo]


def _num_compiled() -> int:
    return sum(1 for _ in kernel_cache().glob("*/*.cubin"))


def write(
    results: Sequence[StageResult], seconds: float, status: int | None, folder: Path = _RESULTS
) -> Path:
    """Writes all results to the file of this GPU, and returns its path. `status`: exit status; None
    while stages are left."""
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


def judge(
    todo: Iterable[Stage],
    folder: Path = _RESULTS,
    seconds: float = SECONDS,
    shortest: float = _SHORTEST_SECONDS,
) -> int:
    """Runs stages as `run`, writes their results after each, prints the summary. Returns the exit
    status."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    results: list[StageResult] = []
    for result in run(todo, folder, seconds, shortest):
        results.append(result)
        write(results, time.monotonic() - start, None, folder)
    elapsed, status = time.monotonic() - start, exit_status(results)
    path = write(results, elapsed, status, folder)
    print(f"report      {path}, after {elapsed:.0f} s")
    print("\n".join(summary(results)), flush=True)  # the verdict is the last line
    return status


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.verdict")
    parser.add_argument("--only", metavar="STAGE", help="run one stage; smoke: one test at a time")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time of all stages")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of report and logs")
    arguments = parser.parse_args()
    print(f"bundle: {unpack(BUNDLE, kernel_cache())} compiled kernels", flush=True)
    with tempfile.TemporaryDirectory() as reports:
        todo = scaled(stages(Path(reports)), arguments.seconds)
        if arguments.only == "smoke":
            todo = [smoke_alone(Path(reports))]
        elif arguments.only is not None:
            todo = [stage for stage in todo if stage.name == arguments.only]
        if not todo:
            parser.error(f"there is no stage {arguments.only}")
        raise SystemExit(judge(todo, arguments.results, arguments.seconds))


if __name__ == "__main__":
    main()
