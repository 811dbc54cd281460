"""The cluster shapes that tests share. A test that fails shows what its processes logged."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
from xdist import is_xdist_controller

from baton.cli.local.local_cluster import LocalCluster
from tests.support.cluster.fixtures import *  # noqa: F403

_LOG_CHARS = 4000


def pytest_sessionstart(session: pytest.Session) -> None:
    """Lets the first cluster start fast: its modules are imported while tests are collected."""
    if not is_xdist_controller(session):
        for process in LocalCluster().processes:
            process.preload()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[pytest.TestReport]:
    report: pytest.TestReport = yield
    if report.failed and call.when == "call":
        for cluster in _clusters(item):
            for process in cluster.processes:
                with suppress(AssertionError, OSError):  # not started, or stopped by the test
                    text = process.log_path.read_text(errors="replace")
                    report.sections.append((f"Log of {process.name}", text[-_LOG_CHARS:]))
    return report


def _clusters(item: pytest.Item) -> list[LocalCluster]:
    """The clusters among the fixtures of a test, or that these have."""
    values = getattr(item, "funcargs", {}).values()
    found = [getattr(value, "cluster", value) for value in values]
    return list({id(c): c for c in found if isinstance(c, LocalCluster)}.values())
