"""The dashboards, checked against the types that Grafana's own SDK was generated with."""

import enum
import json
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog import variants
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel, RowPanel

from tests.support.repository import ROOT

HELM = ROOT / "helm"
BOARDS = sorted((HELM / "baton" / "dashboards").glob("*.json"))

register_default_plugins()


def mismatches(value: Any, wanted: Any, where: str) -> list[str]:
    """Where a value, or something in it, is not of the type that it is declared to have."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any or wanted is object or isinstance(wanted, typing.TypeVar):
        return []
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return []
        some = [one for one in arguments if one is not type(None)]
        ours = [one for one in some if type(value) is one] or some
        return min((mismatches(value, one, where) for one in ours), key=len)
    if origin is list:
        if not isinstance(value, list):
            return [f"{where} is {value!r}, and no list"]
        named = ((f"{where}[{place}]", one) for place, one in enumerate(value))
        return [m for name, one in named for m in mismatches(one, arguments[0], name)]
    if origin is dict:
        return [] if isinstance(value, dict) else [f"{where} is {value!r}, and no object"]
    if origin is typing.Literal:
        return [] if value in arguments else [f"{where} is {value!r}; may be {arguments}"]
    if wanted is type(None):
        return [] if value is None else [f"{where} is {value!r}"]
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        values = [one.value for one in wanted]
        known = isinstance(value, wanted) or value in values
        return [] if known else [f"{where} is {value!r}; may be {values}"]
    if wanted is float:
        wanted = (int, float)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        return [f"{where} is {value!r}, and no {wanted}"]
    return (
        [m for name, one in vars(value).items() for m in _of_field(value, name, one, where)]
        if (hasattr(value, "to_json"))
        else []
    )


def _of_field(owner: Any, name: str, value: Any, where: str) -> list[str]:
    """Of one attribute. What plugins define is checked as what it is."""
    hints = typing.get_type_hints(type(owner))
    wanted = hints.get(name, Any)
    if isinstance(value, variants.Dataquery):
        wanted = type(value)
    if isinstance(value, list) and value and isinstance(value[0], variants.Dataquery):
        wanted = list[type(value[0])]  # type: ignore[misc]
    if hasattr(value, "to_json") and wanted in (Any, object, object | None):
        wanted = type(value)
    return mismatches(value, wanted, f"{where}.{name}")


def read(path: Path) -> Dashboard:
    return Dashboard.from_json(json.loads(path.read_text()))


def all_in(value: Any, other: Any, where: str = "") -> list[str]:
    """What the first has and the second has not, or has otherwise."""
    if isinstance(value, dict) and isinstance(other, dict):
        return [
            missing
            for key, one in value.items()
            for missing in (
                all_in(one, other[key], f"{where}.{key}") if key in other else [f"{where}.{key}"]
            )
        ]
    if isinstance(value, list) and isinstance(other, list) and len(value) == len(other):
        pairs = enumerate(zip(value, other, strict=True))
        return [m for place, (a, b) in pairs for m in all_in(a, b, f"{where}[{place}]")]
    return [] if value == other else [f"{where}: {value!r} became {other!r}"]


def test_the_files_are_those_that_the_generator_writes() -> None:
    command = [sys.executable, HELM / "dashboards" / "generate.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0, checked.stderr
    assert [path.stem for path in BOARDS] == ["handoff", "slo", "trace", "worker"]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_grafana_knows_every_field_and_its_type(path: Path) -> None:
    board = read(path)
    assert mismatches(board, Dashboard, path.stem) == []
    kept = json.loads(json.dumps(board, cls=JSONEncoder))
    assert all_in(json.loads(path.read_text()), kept) == []


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_have_places_and_names_of_their_own(path: Path) -> None:
    panels = read(path).panels or []
    assert len({panel.id_val for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel.grid_pos
        assert place is not None
        assert place.x + place.w <= 24
        cells = {
            (x, y)
            for x in range(place.x, place.x + place.w)
            for y in range(place.y, place.y + place.h)
        }
        assert not cells & taken, panel.title
        taken |= cells
        if isinstance(panel, Panel):
            assert panel.title
            assert panel.targets
        else:
            assert isinstance(panel, RowPanel)


def test_a_field_or_value_that_grafana_does_not_know_is_seen() -> None:
    good = json.loads(BOARDS[0].read_text())
    misspelt = {**good, "titel": "x"}
    kept = json.loads(json.dumps(Dashboard.from_json(misspelt), cls=JSONEncoder))
    assert all_in(misspelt, kept) == [".titel"]
    wrong = json.loads(BOARDS[0].read_text())
    wrong["panels"][1]["gridPos"]["w"] = "wide"
    wrong["panels"][1]["targets"][0]["exemplar"] = "yes"
    found = mismatches(Dashboard.from_json(wrong), Dashboard, "board")
    assert len(found) == 2


def test_trace_queries_ask_for_spans_and_attributes_that_there_are() -> None:
    panels = json.loads((HELM / "baton" / "dashboards" / "trace.json").read_text())["panels"]
    queries = " ".join(t.get("query", "") for panel in panels for t in panel.get("targets", ()))
    attributes = set(re.findall(r"\bspan\.([\w.]+)", queries))
    spans = set(re.findall(r'\bname !?= "([\w.]+)"', queries))
    assert "baton.transfer.exposed_ms" in attributes
    assert {"generate", "kv.transfer"} <= spans
    lines = (HELM.parent / "docs" / "telemetry.md").read_text(encoding="utf-8").splitlines()
    assert [name for name in attributes | spans if not _is_documented(name, lines)] == []


def _is_documented(name: str, lines: list[str]) -> bool:
    """In full, or as `.last` behind another one that begins alike."""
    first, _, last = name.rpartition(".")
    return any(
        f"`{name}`" in line or (f"`{first}." in line and f"`.{last}`" in line) for line in lines
    )
