"""Dashboards, checked against the types that Grafana's own SDK was generated with."""

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tests.support.repository import ROOT

FOLDER = ROOT / "helm" / "baton" / "dashboards"
BOARDS = sorted(FOLDER.glob("*.json"))
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)

register_default_plugins()


def objects_in(value: Any) -> Iterator[Any]:
    """Yields every object of the SDK in `value`, `value` included."""
    if hasattr(value, "to_json"):
        yield value
        value = vars(value)
    inner = value.values() if isinstance(value, dict) else value
    for item in inner if isinstance(value, dict | list) else ():
        yield from objects_in(item)


def mismatches(board: Dashboard) -> list[str]:
    """Returns an error for every attribute that is not of its declared type."""
    found = []
    for owner in objects_in(board):
        for name, hint in typing.get_type_hints(type(owner)).items():
            value, adapter = getattr(owner, name), TypeAdapter(hint, config=STRICT)
            try:
                if isinstance(value, str | int):  # an enum is read as its value
                    adapter.validate_json(json.dumps(value))
                else:
                    adapter.validate_python(value)
            except ValidationError as error:
                found.append(f"{type(owner).__name__}.{name}: {error}")
    return found


def missing(value: Any, other: Any, where: str = "") -> list[str]:
    """Returns the places of `value` that are not, or are otherwise, in `other`."""
    if isinstance(value, dict) and isinstance(other, dict):
        return [m for key in value for m in missing(value[key], other.get(key), f"{where}.{key}")]
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        pairs = enumerate(zip(value, other, strict=True))
        return [m for place, (a, b) in pairs for m in missing(a, b, f"{where}[{place}]")]
    return [] if value == other else [where]


def unknown(board: dict[str, Any]) -> list[str]:
    """Returns the fields that Grafana does not keep when it has read a dashboard."""
    kept = json.dumps(Dashboard.from_json(board), cls=JSONEncoder)
    return missing(board, json.loads(kept))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboards_have_only_fields_and_types_of_grafana(path: Path) -> None:
    board = json.loads(path.read_text())
    assert unknown(board) == []
    assert mismatches(Dashboard.from_json(board)) == []


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_panel_describes_what_it_shows(path: Path) -> None:
    panels = [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]
    assert len(panels) > 5
    assert [panel["title"] for panel in panels if not panel.get("description")] == []


def test_dashboard_check_finds_unknown_fields_and_values() -> None:
    board = json.loads(BOARDS[0].read_text())
    assert unknown({**board, "titel": "x"}) == [".titel"]
    board["panels"][1]["gridPos"]["w"] = "wide"
    board["panels"][1]["targets"][0]["exemplar"] = "yes"
    board["panels"][1]["options"]["legend"]["placement"] = "above"
    assert len(mismatches(Dashboard.from_json(board))) == 3


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_trace_queries_use_documented_spans_and_attributes() -> None:
    panels = json.loads((FOLDER / "trace.json").read_text())["panels"]
    queries = " ".join(t.get("query", "") for panel in panels for t in panel.get("targets", ()))
    attributes = set(re.findall(r"\bspan\.([\w.]+)", queries))
    spans = set(re.findall(r'\bname !?= "([\w.]+)"', queries))
    assert "baton.transfer.exposed_ms" in attributes
    assert {"generate", "kv.transfer"} <= spans
    lines = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8").splitlines()
    assert [name for name in attributes | spans if not _is_documented(name, lines)] == []


def _is_documented(name: str, lines: list[str]) -> bool:
    """In full, or as `.last` after another name that begins alike."""
    first, _, last = name.rpartition(".")
    return any(
        f"`{name}`" in line or (f"`{first}." in line and f"`.{last}`" in line) for line in lines
    )
