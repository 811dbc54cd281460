"""Writes the dashboards in `helm/baton/dashboards/`; `--check` only compares.

The JSON is committed, so that it can be imported as it is. Run through `make dashboards`.
"""

import argparse
import json
import sys
from pathlib import Path

import encode_pool
import handoff
import slo
import trace_board
import worker
from grafana import Board

FOLDER = Path(__file__).resolve().parents[1] / "baton" / "dashboards"
BOARDS = {
    "slo": slo.BOARD,
    "handoff": handoff.BOARD,
    "worker": worker.BOARD,
    "encode-pool": encode_pool.BOARD,
    "trace": trace_board.BOARD,
}


def written(board: Board) -> str:
    """A dashboard as its file."""
    return json.dumps(board.to_json(), indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    is_check = parser.parse_args().check
    files = {f"{name}.json": written(board) for name, board in BOARDS.items()}
    if not is_check:
        for name, text in files.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        return
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    stale = sorted(n for n in files.keys() | found.keys() if files.get(n) != found.get(n))
    if stale:
        sys.exit(f"{', '.join(stale)}: not as helm/dashboards/generate.py would write them")


if __name__ == "__main__":
    main()
