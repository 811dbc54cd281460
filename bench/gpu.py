"""Kernels and the engine on a GPU, against ceilings measured in the same run.

Writes what it has after each case to `bench/results/<gpu>.json`, so that a run which is cut short
or a case that fails loses nothing else.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
import triton

from bench.report import NotPossibleError, Row

_RESULTS = Path(__file__).parent / "results"
# No case is begun later than this, so that `make gpu` as a whole stays below 8 minutes.
_SECONDS = 200.0


def run(repeats: int) -> list[Row]:
    """All cases. Raises `NotPossibleError` where there is no GPU."""
    if not torch.cuda.is_available():
        raise NotPossibleError(
            f"it needs a GPU, and torch {torch.__version__} sees none: install a CUDA build "
            "of torch and a driver"
        )
    rows: list[Row] = []
    failures: dict[str, str] = {}
    ends = time.monotonic() + _SECONDS
    for name, part in _parts(repeats):
        try:
            for some in _until(ends, part):
                rows += some
                for row in some:
                    print(f"{row.case}: {row.ratio:.2f} of {row.against}", file=sys.stderr)
                _write(rows, failures)
        except Exception as error:  # the other parts are worth having all the same
            failures[name] = f"{type(error).__name__}: {error}"
            print(f"{name} failed: {failures[name]}", file=sys.stderr)
            _write(rows, failures)
    return rows


def _until(ends: float, part: Iterator[list[Row]]) -> Iterator[list[Row]]:
    """The rows of a part, case by case, as far as there is time to begin them."""
    while time.monotonic() < ends:
        rows = next(part, None)
        if rows is None:
            return
        yield rows
    raise TimeoutError(f"{_SECONDS:.0f} s were over; the rest of its cases was left out")


def _parts(repeats: int) -> Iterator[tuple[str, Iterator[list[Row]]]]:
    from bench import gpu_engine, gpu_kernels

    yield "kernels", gpu_kernels.rows(repeats)
    yield "engine", gpu_engine.rows(repeats)


def _write(rows: list[Row], failures: dict[str, str]) -> None:
    name = torch.cuda.get_device_name()
    _RESULTS.mkdir(exist_ok=True)
    file = _RESULTS / f"{name.replace(' ', '-').lower()}.json"
    content: dict[str, Any] = {
        "gpu": name,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "rows": [{**asdict(row), "holds": row.holds} for row in rows],
        "failures": failures,
    }
    file.write_text(json.dumps(content, indent=1) + "\n")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
