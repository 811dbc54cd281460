"""`python -m bench NAME`: benchmarks that compare with something in the same run."""

import argparse
import importlib
import logging
import sys
import time
from collections.abc import Callable, Sequence

from bench.report import CasesFailedError, NotPossibleError, Row, show

MISSED = 2  # exit status of a strict run that missed an aim
REPEATS, REPEATS_OF_ALL = 5, 3  # by default

MODULES = {
    "engine": "engine.engine",
    "peers": "peers.peers",
    "serve": "engine.serve",
    "worker": "engine.worker",
    "pools": "engine.pools",
    "mixed": "engine.mixed",
    "scheduler": "engine.scheduler",
    "host": "engine.host",
    "prefix": "router.prefix",
    "images": "engine.images",
    "encode": "router.encode",
    "locality": "router.locality",
    "steps": "engine.steps",
    "simulate": "simulator.simulate",
    "speculate": "engine.speculate",
    "transfer": "transfer.transfer",
    "handoff": "transfer.handoff",
    "migrate": "transfer.migrate",
    "router": "router.router",
    "front": "router.front",
    "tracing": "router.tracing",
    "neighbours": "router.neighbours",
    "gpu": "gpu.gpu",
}
"""Module of each benchmark."""
NAMES = tuple(MODULES)
WITH_TLS = "transfer_tls"

Run = Callable[[int], list[Row]]


def benchmark(name: str) -> Run:
    """Returns the function of a benchmark, which is given the number of repeats."""
    module = (MODULES | {WITH_TLS: "transfer.tls"})[name]
    run: Run = importlib.import_module(f"bench.{module}").run
    return run


def main(
    command: Sequence[str] | None = None,
    names: Sequence[str] = NAMES,
    benchmark: Callable[[str], Run] = benchmark,
) -> None:
    """Runs `command`, by default this process's; "all" are `names`."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"), help="which benchmark; all runs every one")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--repeats",
        type=int,
        help=f"measurements of each side, in turns (default {REPEATS}; of all {REPEATS_OF_ALL})",
    )
    parser.add_argument(
        "--strict", action="store_true", help=f"exit with {MISSED} if a ratio is below its aim"
    )
    parser.add_argument("--tls", action="store_true", help="of transfer: what mutual TLS costs it")
    arguments = parser.parse_args(command)
    if arguments.tls and arguments.name != "transfer":
        parser.error("--tls is for transfer")
    is_all = arguments.name == "all"
    repeats = arguments.repeats
    if repeats is None:
        repeats = REPEATS_OF_ALL if is_all else REPEATS
    if repeats < 1:
        parser.error(f"--repeats is {repeats}; must be at least 1")
    logging.disable(logging.WARNING)
    missed: list[Row] = []
    for name in names if is_all else (arguments.name,):
        print(f"bench {name}: running", file=sys.stderr)
        began = time.monotonic()
        try:
            rows = benchmark(WITH_TLS if arguments.tls else name)(repeats)
        except NotPossibleError as error:
            if not is_all:
                raise SystemExit(str(error)) from error
            print(f"bench {name}: left out, {error}", file=sys.stderr)
        except CasesFailedError as error:
            show(error.rows, as_json=arguments.json)
            raise SystemExit(str(error)) from error
        else:
            show(rows, as_json=arguments.json)
            missed += [row for row in rows if row.holds is False]
            print(f"bench {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if arguments.strict and missed:
        for row in missed:
            print(f"missed: {row.case} is {row.ratio:.2f}; expected {row.aim:.3g}", file=sys.stderr)
        raise SystemExit(MISSED)


if __name__ == "__main__":
    main()
