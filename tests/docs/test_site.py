"""Generated reference and navigation of the documentation site."""

import inspect
import re
from typing import get_args

import pytest

from baton.errors import OverloadedError
from baton_router.routing.admission.rate_limit import Kind
from tests.support.repository import ROOT

DOCS = ROOT / "docs"


def test_navigation_has_every_page():
    named = re.findall(r"^ +- (?:.+: )?(\S+\.md)$", (DOCS / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    pages = {page for page in pages if "node_modules" not in page}
    assert sorted(named) == sorted(pages)


def test_index_of_decisions_has_each_once_by_its_title():
    index = (DOCS / "adr/README.md").read_text()
    listed = re.findall(r"^- \[(.+)\]\((\S+)\)$", index, re.MULTILINE)
    decisions = {path: path.read_text().partition("\n")[0] for path in (DOCS / "adr").glob("0*.md")}
    assert sorted(listed) == sorted((line[2:], path.name) for path, line in decisions.items())


def test_troubleshooting_has_every_alert():
    headings = re.findall(
        r"^### (\w+)$", (DOCS / "guides/troubleshooting.md").read_text(), re.MULTILINE
    )
    rules = (ROOT / "helm/baton/rules/baton.yaml").read_text()
    assert headings == re.findall(r"- alert: (\w+)", rules)


def symptoms() -> dict[str, str]:
    """Returns the sections of the symptoms, by their headings."""
    page = (DOCS / "guides/troubleshooting.md").read_text()
    chapter = page.split("\n## Symptoms\n")[1].split("\n## ")[0]
    return dict(part.split("\n", 1) for part in chapter.split("\n### ")[1:])


def test_symptom_says_what_to_run_look_at_and_do():
    assert len(symptoms()) == 7
    for heading, text in symptoms().items():
        steps = re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)
        assert steps == ["Run", "Look at", "Do"], heading


def test_refusals_are_listed_by_every_reason_of_the_metric():
    folders = ("baton/serving", "router/baton_router")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    # What threads are for is the reason of what gives way at them.
    pattern = re.compile(r'(?:[( ]reason=f?|FairThreads\(.*)"(\w+|\{kind\}\w+)"')
    reasons = {reason for path in sources for reason in pattern.findall(path.read_text())}
    kinds = {reason.format(kind=kind) for reason in reasons for kind in get_args(Kind)}
    default = inspect.signature(OverloadedError).parameters["reason"].default
    rows = re.findall(r"^\| (`\w+`.*?) \|", symptoms()["Clients get 429"], re.MULTILINE)
    listed = set(re.findall(r"`(\w+)`", " ".join(rows))) - {"reason"}
    assert listed == {*kinds, default}


def test_metrics_reference_agrees_with_telemetry():
    from docs.metrics_reference import families, labels_of, name_of

    served = {
        name_of(metric): (metric.type, set(labels_of(metric)), metric.documentation)
        for metrics in families().values()
        for metric in metrics
    }
    rows = re.findall(
        r"^\| `(\w+)` \| \w+ \| (\w+) \| (.*?) \| \w+ \| (.*) \|$",
        (DOCS / "telemetry.md").read_text(),
        re.MULTILINE,
    )
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in rows
        if not name.startswith("process_")
    }
    assert documented == served


@pytest.mark.slow  # needs the packages of the extra `dev`
def test_differences_name_stale_missing_and_unknown_files(tmp_path):
    from docs import generate

    (tmp_path / "reference").mkdir()
    for name in ("same", "stale", "unknown"):
        (tmp_path / f"reference/{name}.md").write_text("old")
    fresh = {f"reference/{name}.md": "new" for name in ("stale", "missing")}
    assert generate.differences({**fresh, "reference/same.md": "old"}, tmp_path) == [
        f"reference/{name}.md" for name in ("missing", "stale", "unknown")
    ]


@pytest.mark.slow
def test_reduced_imports_keep_what_no_path_implies():
    from docs.packages import reduced

    imports = {"cli": {"fleet", "errors"}, "fleet": {"errors"}, "errors": set()}
    assert reduced(imports) == {"cli": {"fleet"}, "fleet": {"errors"}, "errors": set()}
