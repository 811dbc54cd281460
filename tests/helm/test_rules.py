"""Recording and alert rules in Prometheus: syntax, and when they fire."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.support.cluster.prometheus import RULES, promtool

CASES = Path(__file__).with_name("rules.test.yaml")
BOARDS = RULES.parents[1] / "dashboards"
DOCUMENT = RULES.parents[3] / "docs" / "telemetry.md"


@pytest.mark.system
def test_alert_rules_pass_promtool_check() -> None:
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.system
def test_alerts_fire_when_they_should_and_not_before(tmp_path: Path) -> None:
    cases = tmp_path / "rules.test.yaml"
    cases.write_text(CASES.read_text().replace("RULES", str(RULES)))
    tested = promtool("test", "rules", cases)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_is_tested() -> None:
    rules = [r for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]]
    tested: set[str] = set()
    for test in yaml.safe_load(CASES.read_text())["tests"]:
        tested |= {c["alertname"] for c in test.get("alert_rule_test", ()) if c["exp_alerts"]}
    assert {rule["alert"] for rule in rules if "alert" in rule} == tested


def test_rules_and_dashboards_query_only_documented_metrics() -> None:
    known = set(re.findall(r"^\| `(\w+)`", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    asked = RULES.read_text() + "".join(
        target.get("expr", "")
        for board in BOARDS.glob("*.json")
        for panel in json.loads(board.read_text())["panels"]
        for target in panel.get("targets", ())
    )
    names = set(re.findall(r"(?<![\w:])(?:baton|gen_ai_server|process)_\w+(?![\w:])", asked))
    assert names
    for name in names:
        assert name in known or re.sub(r"_(bucket|sum|count)$", "", name) in known, name
