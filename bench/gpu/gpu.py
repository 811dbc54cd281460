"""Kernels and the engine on a GPU, against ceilings measured in the same run.

    python -m bench.gpu.gpu FILE [--parts engine kernels]

writes what it has to a JSON file after each case, so that a run which is cut short or a case that
fails loses nothing else. Its exit status is 1 if a case failed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.gpu.sizes import SIZES, Sizes
from bench.gpu.timing import Bench, Case, Cases, CudaDevice, Device, free_memory
from bench.report import CasesFailedError, NotPossibleError, Row
from bench.stages import BUDGET_VARIABLE

# A case that begins later would hardly end within the budget of a stage.
_LATEST: Final = 0.8


@dataclass
class Measurements:
    """Measurements so far.

    Attributes:
        failures: why cases failed, by case, or by part where it could not make any more cases.
        left_out: parts whose last cases did not begin in time.
    """

    rows: list[Row] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def fail(self, name: str, error: Exception) -> None:
        """Notes a failure, and prints it."""
        self.failures[name] = f"{type(error).__name__}: {error}"
        print(f"{name} failed: {self.failures[name]}", file=sys.stderr)

    def content(self) -> dict[str, Any]:
        """Returns the content of the JSON file."""
        rows = [{**asdict(row), "holds": row.holds} for row in self.rows]
        return {"rows": rows, "failures": self.failures, "left_out": self.left_out}


def run(repeats: int) -> list[Row]:
    """All cases. Raises `NotPossibleError` where there is no GPU, `CasesFailedError` if some cases
    failed."""
    measured = measure(parts(Bench(CudaDevice(), SIZES, repeats)))
    if measured.failures:
        raise CasesFailedError(measured.rows, measured.failures)
    return measured.rows


def measure(
    cases_of: dict[str, Cases],
    seconds: float = float("inf"),
    note: Callable[[Measurements], None] = lambda _: None,
) -> Measurements:
    """Measures all cases of all parts, of which it begins none after `seconds`. Calls `note` with
    the measurements so far after each case."""
    measured = Measurements()
    ends = time.monotonic() + seconds
    for part, cases in cases_of.items():
        with closing(cases):
            for case, work in _made(part, cases, ends, measured):
                try:
                    rows = work()
                    measured.rows += rows
                    for row in rows:
                        print(f"{row.case}: {row.ratio:.2f} of {row.against}", file=sys.stderr)
                except Exception as error:  # the other cases are worth having all the same
                    measured.fail(case, error)
                del work  # the next case has no room beside its engine
                note(measured)
        note(measured)
    return measured


def _made(part: str, cases: Cases, ends: float, measured: Measurements) -> Iterator[Case]:
    """Yields the cases of a part, until it fails to make one or the time is over."""
    last = "all"
    while time.monotonic() <= ends:
        free_memory()  # of the case before
        try:
            case = next(cases, None)
        except Exception as error:
            return measured.fail(part, error)
        if case is None:
            return None
        yield case
        last = f"what follows {case[0]}"
    measured.left_out.append(f"{part}: {last}, for lack of time")
    return None


def parts(bench: Bench) -> dict[str, Cases]:
    """Returns the cases of each part, which fails alone if it cannot be imported."""
    speeds: dict[str, float] = {}

    def engine() -> Cases:
        from bench.gpu.engine import cases

        yield from cases(bench, speeds)

    def kernels() -> Cases:
        from bench.gpu.kernels import cases

        yield from cases(bench)

    def deterministic() -> Cases:
        from bench.gpu.engine import deterministic_cases

        yield from deterministic_cases(bench, speeds)

    def generate_batch() -> Cases:
        from bench.gpu.generate_batch import cases

        yield from cases(bench)

    makers = (engine, kernels, deterministic, generate_batch)
    return {make.__name__: make() for make in makers}


def main(
    arguments: Sequence[str] | None = None,
    make_device: Callable[[], Device] = CudaDevice,
    sizes: Sizes = SIZES,
) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.gpu")
    parser.add_argument("file", type=Path, help="JSON file of rows and failures")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="by default all")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each side")
    budget = float(os.environ.get(BUDGET_VARIABLE, "inf"))
    parser.add_argument(
        "--seconds", type=float, default=_LATEST * budget, help="begin no case later"
    )
    options = parser.parse_args(arguments)

    def write(measured: Measurements) -> None:
        options.file.write_text(json.dumps(measured.content()))

    try:
        found = parts(Bench(make_device(), sizes, options.repeats))
    except NotPossibleError as error:
        raise SystemExit(str(error)) from error
    selected = {name: found[name] for name in options.parts or found}
    measured = measure(selected, options.seconds, write)
    raise SystemExit(1 if measured.failures else 0)


if __name__ == "__main__":
    main()
