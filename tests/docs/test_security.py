"""Promises of docs/security.md: each names tests that exist."""

import re

from baton.serving.settings import ServingSettings
from baton_decode_worker.settings import DecodeSettings
from baton_picker.settings import PickerSettings
from baton_router.settings import RouterSettings
from tests.support.repository import ROOT

DOCUMENT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PROMISED, REST = DOCUMENT.split("## What an operator must do\n")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", DOCUMENT)
# How a setting is turned off.
ELSEWHERE = {"--no-shared-pools"}


def test_security_page_names_existing_tests():
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path, _ in NAMED}
    lost = [(path, name) for path, name in NAMED if name and f"def {name}(" not in sources[path]]
    assert lost == []


def test_security_page_names_a_test_for_every_promise():
    promises = PROMISED.split("## Promises\n")[1]
    # Without the heads of tables, and the lines below those.
    rows = re.findall(r"^\|(?!-)(?!.*\|\n\|-).*$", promises, re.MULTILINE)
    assert len(rows) > 40
    assert [row for row in rows if "`tests/" not in row.split("|")[-2]] == []


def test_security_page_names_existing_settings():
    named = set(re.findall(r"`(--[a-z-]+)", DOCUMENT))
    settings = (ServingSettings, RouterSettings, PickerSettings, DecodeSettings)
    flags = {f"--{name.replace('_', '-')}" for one in settings for name in one.model_fields}
    assert named - flags - ELSEWHERE == set()
