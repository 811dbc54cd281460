"""Seeds, time limits and recorded traces for all tests."""

import os
import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

# Before torch is imported: for models this small a second thread costs more than it gives, and the
# other cores have tests of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.traces import trace_folder
from tests.support import randomness

with suppress(ImportError):  # `make gpu` does without
    from hypothesis import settings

    settings.register_profile("baton", **randomness.hypothesis_settings(randomness.CHOSEN_SEED))
    settings.load_profile("baton")


_ENDS = time.monotonic() + float(os.environ.get("BATON_TEST_SECONDS", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Passes the seed to the plugin of hypothesis, which reads it when it is configured."""
    if randomness.CHOSEN_SEED is not None and hasattr(config.option, "hypothesis_seed"):
        config.option.hypothesis_seed = config.option.hypothesis_seed or randomness.CHOSEN_SEED


def pytest_report_header() -> str:
    return randomness.header(randomness.CHOSEN_SEED)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test alone."""
    _show_seed(request.node)
    return randomness.seed_of(request.node.nodeid)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random numbers of this test alone."""
    return random.Random(seed)


def _show_seed(item: pytest.Item) -> None:
    """Adds the seed to the report of a failure."""
    said = randomness.how_to_repeat(item.nodeid, randomness.CHOSEN_SEED)
    item.add_report_section("setup", "seed", said)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`make gpu` begins no test after its time, and says which those are."""
    if time.monotonic() > _ENDS:
        pytest.skip("the time for tests was over")
    if item.get_closest_marker("hypothesis") is not None:
        _show_seed(item)


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
