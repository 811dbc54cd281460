"""The page of the HTTP APIs names the clients that are tested, and their versions."""

import re

from tests.support.http_clients import CLIENTS, packages_of
from tests.support.repository import ROOT


def test_clients_page_has_the_versions_that_are_tested():
    page = (ROOT / "docs" / "openai.md").read_text().split("\n## Clients\n")[1]
    rows = re.findall(r"^\| `([@a-z/-]+)` \| ([0-9.]+) \|", page, flags=re.MULTILINE)
    pinned = {package for client in CLIENTS for package in packages_of(client)}
    assert len(rows) == len(CLIENTS)
    assert set(rows) <= pinned
