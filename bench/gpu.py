"""Kernels and the engine on a GPU, against ceilings measured in the same run.

    python -m bench.gpu FILE

writes what it has to a JSON file after each case, so that a run which is cut short or a case that
fails loses nothing else. Its exit status is 1 if a case failed or was left out.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from bench.gpu_timing import Case
from bench.report import CasesFailedError, NotPossibleError, Row

Failures = dict[str, str]


def run(repeats: int) -> list[Row]:
    """All cases. Raises `NotPossibleError` where there is no GPU, `CasesFailedError` if some cases
    failed."""
    rows, failures = measure(_parts(repeats))
    if failures:
        raise CasesFailedError(rows, failures)
    return rows


def measure(
    parts: dict[str, Iterator[Case]],
    seconds: float = float("inf"),
    note: Callable[[list[Row], Failures], None] = lambda _rows, _failures: None,
) -> tuple[list[Row], Failures]:
    """Measures all cases, of which it begins none after `seconds`.

    Args:
        note: called after each case with all rows and failures so far.

    Returns the rows, and why cases failed, by case, or by part where the part could not make any
    more cases.
    """
    rows: list[Row] = []
    failures: Failures = {}
    ends = time.monotonic() + seconds
    for part, cases in parts.items():
        for case, work in _made(part, cases, failures):
            try:
                if time.monotonic() > ends:
                    raise TimeoutError(f"left out: {seconds:g} s were over")
                gc.collect()
                torch.cuda.empty_cache()
                found = work()
                rows += found
                for row in found:
                    print(f"{row.case}: {row.ratio:.2f} of {row.against}", file=sys.stderr)
            except Exception as error:  # the other cases are worth having all the same
                _fail(failures, case, error)
            note(rows, failures)
        note(rows, failures)
    return rows, failures


def _made(part: str, cases: Iterator[Case], failures: Failures) -> Iterator[Case]:
    """Yields the cases of a part, until it fails to make one."""
    try:
        yield from cases
    except Exception as error:
        _fail(failures, part, error)


def _fail(failures: Failures, name: str, error: Exception) -> None:
    failures[name] = f"{type(error).__name__}: {error}"
    print(f"{name} failed: {failures[name]}", file=sys.stderr)


def _parts(repeats: int) -> dict[str, Iterator[Case]]:
    if not torch.cuda.is_available():
        raise NotPossibleError(
            f"it needs a GPU, and torch {torch.__version__} sees none: install a CUDA build "
            "of torch and a driver"
        )
    from bench import gpu_engine, gpu_kernels

    return {"kernels": gpu_kernels.cases(repeats), "engine": gpu_engine.cases(repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("file", type=Path, help="JSON file of rows and failures")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case later")
    arguments = parser.parse_args()

    def write(rows: list[Row], failures: Failures) -> None:
        held = [{**asdict(row), "holds": row.holds} for row in rows]
        arguments.file.write_text(json.dumps({"rows": held, "failures": failures}))

    try:
        _, failures = measure(_parts(arguments.repeats), arguments.seconds, write)
    except NotPossibleError as error:
        raise SystemExit(str(error)) from error
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
