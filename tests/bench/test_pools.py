"""Figures of separate pools: those of the documentation are what the benchmark finds."""

import re

import pytest

from bench.engine.pools import goodput_rows
from tests.support.documents import README
from tests.support.repository import ROOT


@pytest.mark.nightly
def test_goodput_of_the_documentation_is_what_is_simulated(conversation_trace):
    page = (ROOT / "docs/concepts/disaggregation.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| 18\.2 \| \d+ ms \| (\d+)% \| (\d+)% \|$", page, re.MULTILINE)
    found = [(f"{row.value:.0f}", f"{row.reference:.0f}") for row in goodput_rows((6.0,))]
    assert shown == found
    (first,) = re.findall(r"at 18 requests/s.*: (\d+)% by .* (\d+)% by", README)
    assert first == found[0]
