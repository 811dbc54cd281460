"""Seeds, time limits and recorded traces for all tests."""

import gc
import inspect
import os
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# Before torch is imported: for models this small a second thread costs more than it gives, and the
# other cores have tests of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.support import lanes, randomness
from tests.support.engine import deferred_stream
from tests.support.recorded_traces import FIXTURES, recorded_trace

with suppress(ImportError):  # `make gpu` does without
    from hypothesis import settings

    settings.register_profile("baton", **randomness.hypothesis_settings(randomness.CHOSEN_SEED))
    settings.load_profile("baton")


# An optional part of jsonschema, which the development environment has: as it is imported it
# compiles 38 grammars, of identifiers that no test checks.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

gc.disable()  # until tests are collected: imports leave little garbage and many objects

_MOST_FROZEN = 1000
_num_frozen = 0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Passes the seed to the plugin of hypothesis, which reads it when it is configured; reports on
    the run where a lane asks for it. Refuses to run without a deferred device that is asked for."""
    deferred_stream.check_installed()
    lanes.register(config)
    config.addinivalue_line("markers", "random: draws from BATON_TEST_SEED; set on collection")
    if randomness.CHOSEN_SEED is not None and hasattr(config.option, "hypothesis_seed"):
        config.option.hypothesis_seed = config.option.hypothesis_seed or randomness.CHOSEN_SEED


def pytest_report_header() -> str:
    return randomness.header(randomness.CHOSEN_SEED)


@pytest.fixture(autouse=True)
def collected_garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    """Collects garbage after each test with an event loop, so that a socket or task that it leaves
    open fails the test itself and not a later one. What is left is frozen, so that the collector
    traverses the objects of one test."""
    yield
    if not inspect.iscoroutinefunction(request.function):
        return
    global _num_frozen
    _num_frozen += 1
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    """Traverses every object, which takes seconds, after the `_MOST_FROZEN`-th of these tests."""
    global _num_frozen
    if _num_frozen == _MOST_FROZEN:
        _num_frozen = 0
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this test alone."""
    _show_seed(request.node)
    return randomness.seed_of(request.node.nodeid)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random numbers of this test alone."""
    return random.Random(seed)


def _is_property(item: pytest.Item) -> bool:
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


def _show_seed(item: pytest.Item) -> None:
    """Adds the seed to the report of a failure."""
    said = randomness.repeat_hint(item.nodeid, randomness.CHOSEN_SEED)
    item.add_report_section("setup", "seed", said)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for fixture in FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
        recorded_trace(FIXTURES[fixture])
    if _is_property(item):
        _show_seed(item)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks random tests. Where cores share the tests, those that may take longest begin: at the
    end no core is to wait for another one's."""
    for item in items:
        if "seed" in getattr(item, "fixturenames", ()) or _is_property(item):
            item.add_marker("random")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_time_limit, reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps the garbage collector from traversing every imported module again and again."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Traverses every object once. Pytest, which reports what finalizers raise, does so twice."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _time_limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None else 0.0


@pytest.fixture(scope="session")
def conversation_trace() -> Path:
    return recorded_trace(FIXTURES["conversation_trace"])


@pytest.fixture(scope="session")
def code_trace() -> Path:
    return recorded_trace(FIXTURES["code_trace"])
