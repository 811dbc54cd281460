"""`python -m bench NAME`: benchmarks that compare with something in the same run."""

import argparse
import importlib
import logging
import sys

from bench.report import NotPossibleError, show

NAMES = (
    "engine",
    "serve",
    "scheduler",
    "prefix",
    "locality",
    "steps",
    "simulate",
    "speculate",
    "transfer",
    "handoff",
    "migrate",
    "router",
    "tracing",
    "gpu",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"), help="which benchmark; all runs every one")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--repeats", type=int, default=5, help="measurements of each side, in turns (default 5)"
    )
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; must be at least 1")
    logging.disable(logging.WARNING)
    for name in NAMES if arguments.name == "all" else (arguments.name,):
        print(f"bench {name}: running", file=sys.stderr)
        try:
            rows = importlib.import_module(f"bench.{name}").run(arguments.repeats)
        except NotPossibleError as error:
            if arguments.name != "all":
                raise SystemExit(str(error)) from error
            print(f"bench {name}: left out, {error}", file=sys.stderr)
        else:
            show(rows, as_json=arguments.json)


if __name__ == "__main__":
    main()
