"""Figures of the encode pool: those of the documentation are what the benchmark finds."""

import re

import pytest

from bench.simulator.encode_simulated import headline_rows
from tests.support.repository import ROOT


@pytest.mark.nightly
def test_ttfts_of_the_documentation_are_what_is_simulated():
    page = (ROOT / "docs/concepts/disaggregation.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = {"text": {}, "images": {}}
    for row in headline_rows():
        of_kind = found[row.case.rpartition(" ")[2]]
        case = row.case.partition("images, ")[2].partition(":")[0]
        of_kind |= {case: f"{row.value:.0f}", row.against: f"{row.reference:.0f}"}
        assert row.holds is not False
    clusters = ("2 prefill", "1 encode + 1 prefill", "3 prefill", "1 encode + 2 prefill")
    (head,) = re.findall(r"^\| model \| with images \|  ?\| (.*) \|$", page, re.MULTILINE)
    assert tuple(head.split(" | ")) == clusters
    shown = re.search(
        r"^\|  \| 30% \| text \| (.*) \|\n\|  \|  \| images \| (.*) \|$", page, re.MULTILINE
    )
    for kind, figures in zip(found, shown.groups(), strict=True):
        assert tuple(figures.split(" | ")) == tuple(found[kind][c] for c in clusters)
