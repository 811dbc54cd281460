"""The queries of the trace board, read by the grammar that Grafana's own editor has of TraceQL."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import ROOT

BOARDS = sorted((ROOT / "helm" / "baton" / "dashboards").glob("*.json"))
GRAMMAR = ("@grafana/lezer-traceql@1.0.0", "@lezer/common@1.5.5", "@lezer/lr@1.4.12")

# Says for each query of stdin where it is no TraceQL: a list of positions.
READER = """
const {parser} = require('@grafana/lezer-traceql');
const queries = JSON.parse(require('fs').readFileSync(0));
console.log(JSON.stringify(queries.map(query => {
  const faults = [];
  parser.parse(query).iterate({enter: node => {if (node.type.isError) faults.push(node.from)}});
  return faults;
})));
"""


def queries_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if value.get("queryType") == "traceql":
            yield value["query"]
        for inner in value.values():
            yield from queries_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from queries_in(inner)


def faults(folder: Path, queries: list[str]) -> list[list[int]]:
    assert shutil.which("npm"), "npm is not installed; on Debian: apt-get install npm"
    quiet = ("--no-audit", "--no-fund", "--no-save", "--silent")
    subprocess.run(["npm", "install", *quiet, *GRAMMAR], cwd=folder, check=True, timeout=120)
    read = subprocess.run(
        ["node", "-e", READER],
        cwd=folder,
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    found: list[list[int]] = json.loads(read.stdout)
    return found


@pytest.mark.nightly
@pytest.mark.system
def test_dashboard_trace_queries_parse_as_traceql(tmp_path):
    queries = [query for board in BOARDS for query in queries_in(json.loads(board.read_text()))]
    assert len(queries) >= 5
    *ours, none_of_it, unknown = faults(
        tmp_path, [*queries, '{ name = = "generate" }', '{ name = "generate" } | guess(duration)']
    )
    assert not [pair for pair in zip(queries, ours, strict=True) if pair[1]]
    assert none_of_it
    assert unknown
