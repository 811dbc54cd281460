"""Whether every promise of docs/security.md names tests that are there."""

import ast
import re
from functools import cache

import pytest

from baton.serving.settings import ServingSettings
from decode_worker.settings import DecodeSettings
from router.settings import RouterSettings
from tests.support.repository import ROOT

DOCUMENT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PROMISED, REST = DOCUMENT.split("## What an operator must do\n")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", DOCUMENT)
# How a setting is turned off.
ELSEWHERE = {"--no-shared-pools"}


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {n.name for n in ast.walk(tree) if isinstance(n, functions)}


def rows(text: str) -> list[list[str]]:
    """The cells of every row of its tables, without their heads."""
    found, is_head = [], True
    for line in text.splitlines():
        if not line.startswith("|"):
            is_head = True
        elif set(line) <= set("|-"):
            is_head = False
        elif not is_head:
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda part: part.rpartition("/")[2])
def test_every_test_that_is_named_is_there(path, name):
    assert (ROOT / path).is_file()
    assert not name or name in functions_of(path)


def test_every_promise_names_a_test():
    promises = rows(PROMISED.split("## Promises\n")[1])
    assert len(promises) > 40
    assert [cells[0] for cells in promises if "`tests/" not in cells[-1]] == []


def test_every_setting_that_is_named_is_one():
    named = set(re.findall(r"`(--[a-z-]+)", DOCUMENT))
    settings = (ServingSettings, RouterSettings, DecodeSettings)
    flags = {f"--{name.replace('_', '-')}" for one in settings for name in one.model_fields}
    assert named - flags - ELSEWHERE == set()
