"""Stages of `make gpu`: commands, budgets, and how each one's report is read. Imports no torch."""

import json
import os
import sys
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.stages import Findings, Stage

SMOKE_SECONDS: Final = 140
"""Budget of the smoke test alone, which compiles its kernels one by one."""

# Processes on one GPU, each with a context and a pool of its own: few enough for its memory.
_SMOKE_PROCESSES, _TEST_PROCESSES = 4, 12
_TEST_SECONDS = 60
TESTS = ("tests/kernels/gpu", "tests/gpu")
_ENGINES = "test_triton_engine"  # the module whose tests a first look begins with
# Of an engine in a process of its own, and of whole clusters.
_OPTIONAL = {
    "engine in a process of its own": ("msgspec", "setproctitle"),
    "request through a cluster": ("opentelemetry", "pydantic_settings", "redis", "grpc_health"),
}


def stages(folder: Path) -> tuple[Stage, ...]:
    """Returns the stages of `make gpu` in order of worth, which write their reports to `folder`.
    Kernels that one has compiled are cached for those that follow."""
    return (
        _python("ceilings", 60, read_ceilings, folder, "bench.gpu.ceilings"),
        _tests("smoke", "gpu and smoke", 90, folder, _pytest(_SMOKE_PROCESSES)),
        _benchmark("benchmark", 165, folder, "engine", "kernels", "deterministic"),
        _tests("tests", "gpu and not smoke", 145, folder, _pytest(_TEST_PROCESSES)),
        _python("sanitizer", 40, read_notes, folder, "bench.gpu.sanitizer"),
        _benchmark("reference", 60, folder, "generate_batch"),
    )


def smoke_alone(folder: Path) -> Stage:
    """Returns a first look: the smoke test up to its first failure, engines first, one by one."""
    modules = sorted(Path("tests/gpu").glob("test_*.py"))
    files = sorted(modules, key=lambda file: file.stem != _ENGINES)
    command = (*_pytest(1), "--exitfirst")
    return _tests("smoke", "gpu and smoke", SMOKE_SECONDS, folder, command, *map(str, files))


def _python(
    name: str, budget: float, read: Any, folder: Path, module: str, *arguments: str
) -> Stage:
    report = folder / f"{name}.json"
    command = (sys.executable, "-m", module, str(report), *arguments)
    return Stage(name, command, budget, partial(read, report), _environment())


def _benchmark(name: str, budget: float, folder: Path, *parts: str) -> Stage:
    return _python(name, budget, read_benchmark, folder, "bench.gpu.gpu", "--parts", *parts)


def _tests(
    name: str,
    selection: str,
    budget: float,
    folder: Path,
    command: tuple[str, ...],
    *paths: str,
) -> Stage:
    report = folder / f"{name}.jsonl"
    module, *arguments = command
    options = ("-c", "tests/gpu.ini", "--rootdir", ".", "-m", selection)
    return Stage(
        name,
        (sys.executable, "-m", module, *arguments, *options, *(paths or TESTS)),
        budget,
        partial(read_tests, report),
        {**_environment(), "BATON_LANE_REPORT": str(report)},
    )


def _pytest(num_processes: int) -> tuple[str, ...]:
    """Returns the module that runs tests side by side, so that kernels are compiled side by side
    too, and its options. With pytest-timeout a test that hangs fails by name."""
    count = str(min(num_processes, os.cpu_count() or 1))
    options: tuple[str, ...] = ()
    if find_spec("pytest_timeout"):
        options = ("--timeout", str(_TEST_SECONDS), "--timeout-method", "thread")
    if num_processes == 1:
        return ("pytest", *options)
    if find_spec("xdist"):
        return ("pytest", "-n", count, "--dist", "worksteal", *options)
    # Without xdist a timeout ends the whole process, and with it all tests of its shard.
    return ("tests.support.shards", count)


def _environment() -> dict[str, str]:
    return {"TRITON_CACHE_DIR": str(kernel_cache()), "PYTHONUNBUFFERED": "1"}


def kernel_cache() -> Path:
    """Returns the folder of Triton's compiled kernels."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def read_ceilings(report: Path) -> Findings:
    """Returns the ceilings, and what cannot be tested on this machine."""
    notes = [
        f"no {what}: {', '.join(missing)} cannot be imported"
        for what, modules in _OPTIONAL.items()
        if (missing := [module for module in modules if find_spec(module) is None])
    ]
    return Findings(json.loads(report.read_text()), notes=tuple(notes))


def read_tests(report: Path) -> Findings:
    """Returns the outcomes of a run of pytest, which fails if no test of it passed. The report has
    a line for each of its processes that was not ended; failures are known however it ended."""
    runs, failed = _lines(report), _lines(report.with_suffix(".failures"))
    outcomes = dict(sum((Counter(run["outcomes"]) for run in runs), Counter[str]()))
    reasons = dict(failed)
    skipped = sum((Counter(run["skipped"]) for run in runs), Counter[str]())
    failures = [f"{len(reasons)} tests failed"] if reasons else []
    if not runs:
        failures.append("left no report")
    elif not outcomes.get("passed"):
        failures.append("no test passed")
    notes = tuple(f"{count} skipped: {why}" for why, count in skipped.most_common())
    measured = {name: value for run in runs for name, value in run["figures"].items()}
    figures = {"outcomes": outcomes, "reasons": reasons, "measured": measured}
    return Findings(figures, tuple(failures), notes)


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_benchmark(report: Path) -> Findings:
    """Returns rows and failures of the benchmark, which fails if there is no row."""
    content = json.loads(report.read_text())
    failures = [f"{case}: {why}" for case, why in content["failures"].items()]
    if not content["rows"]:
        failures.append("no case was measured")
    return Findings(content, tuple(failures), tuple(content["left_out"]))


def read_notes(report: Path) -> Findings:
    """Returns a stage's own figures, failures and notes."""
    content = json.loads(report.read_text())
    return Findings(content["figures"], tuple(content["failures"]), tuple(content["notes"]))
