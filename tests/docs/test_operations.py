"""`docs/operations.md`: its figures are those that its command gives, its alerts those that are."""

import json
import re
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from baton.cli.main import app
from baton.worker.roles import settings_class
from baton_router.settings import RouterSettings
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
TROUBLESHOOTING = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
PAGES = pytest.mark.parametrize("page", [PAGE, TROUBLESHOOTING], ids=["operations", "symptoms"])
RULES = ROOT / "helm" / "baton" / "rules" / "baton.yaml"

SIZES = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in re.findall(r"^\| \d+ \| \d+ \| \d+ \|.*$", PAGE, re.MULTILINE)
]


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("row", SIZES)
def test_sizing_table_is_what_the_simulator_finds(row, conversation_trace):
    (command,) = re.findall(r"^```\n(baton simulate.*?)```$", PAGE, re.DOTALL | re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))[1:]
    words[words.index("--trace") + 1] = str(conversation_trace)
    for option, value in zip(("--rate", "--prefill", "--decode"), row, strict=False):
        words[words.index(option) + 1] = value
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[0])
    assert found["case"] == "baton"
    assert row[3:] == (
        f"{found['ttft'][1]:.2f} s",
        f"{found['itl'][0] * 1e3:.1f} ms",
        f"{found['goodput'] / found['offered']:.0%}",
    )


def test_alerts_have_a_section_each_and_link_to_it():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^### (\w+)$", section("Alerts"), re.MULTILINE) == [
        rule["alert"] for rule in alerts
    ]
    for rule in alerts:
        anchor = rule["alert"].lower()  # as it is made of a heading
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{anchor}"


def test_operations_page_has_no_broken_link():
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        assert not path or (ROOT / "docs" / path).exists(), target
        assert path or anchor in anchors, target


@PAGES
def test_operations_page_names_existing_options(page):
    known = {*RouterSettings.model_fields, *settings_class().model_fields}
    commands = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    for option in re.findall(r"--([a-z][a-z-]+)", page):
        assert option.replace("-", "_") in known or f"`--{option}`" in commands, option


@PAGES
def test_operations_page_names_existing_metrics_and_files(page):
    metrics = (ROOT / "docs" / "telemetry.md").read_text(encoding="utf-8")
    for metric in re.findall(r"`(baton_\w+)", page):
        assert f"`{metric}`" in metrics, metric
    for path in re.findall(r"`((?:tests|helm)/[\w/.]+)`", page):
        assert (ROOT / path).exists(), path
