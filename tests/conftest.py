"""Property tests are never timed, all tests together only where that is asked for. The recorded
traces, where they are: no part of the project."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

# Before torch is imported: for models this small a second thread costs more than it gives, and the
# other cores have tests of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.traces import trace_folder

with suppress(ImportError):  # `make gpu` does without
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")


_ENDS = time.monotonic() + float(os.environ.get("BATON_TEST_SECONDS", "inf"))


def pytest_runtest_setup() -> None:
    """`make gpu` begins no test after its time, and says which those are."""
    if time.monotonic() > _ENDS:
        pytest.skip("the time for tests was over")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where cores share the tests, those that may take longest begin: at the end no core is to wait
    for another one's."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_time_limit, reverse=True)


def _time_limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else 0.0


@pytest.fixture(scope="session")
def conversation_trace() -> Path:
    return _trace("mooncake_conversation.jsonl")


@pytest.fixture(scope="session")
def code_trace() -> Path:
    return _trace("azure_2023_code.csv")


def _trace(name: str) -> Path:
    path = trace_folder() / name
    if not path.exists():
        pytest.skip(f"the trace {name} is not there; BATON_TRACES says in which folder to look")
    return path
