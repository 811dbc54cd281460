"""Fixtures of the cluster shapes, for the conftest of each folder whose tests use them.

A shape starts with the first test that uses it, and stops after the last one: tests are ordered by
shape, so that at most two run at a time. All folders of a session share them. Where processes of
xdist share the tests (`--dist loadgroup`), one of them runs all tests of a shape.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest

from baton.cli.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from tests.support.cluster import named_clusters
from tests.support.cluster.wide import restored

_SHAPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "single_shape": named_clusters.single,
    "secured_shape": named_clusters.secured,
    "traced_shape": named_clusters.traced,
    "narrow_shape": named_clusters.narrow,
    "tight_shape": named_clusters.tight,
    "swapping_shape": named_clusters.swapping,
    "pair_shape": named_clusters.pair,
    "networked_shape": named_clusters.networked,
    "rolling_shape": named_clusters.rolling,
}
_ORDER = list(_SHAPES)


class _Running:
    """The shapes that run, and the test after which each is needed no more."""

    def __init__(self) -> None:
        self.last_tests: dict[str, str] = {}
        self._shapes: dict[str, tuple[Any, ExitStack]] = {}

    def get(self, name: str) -> Any:
        if name not in self._shapes:
            stack = ExitStack()
            self._shapes[name] = stack.enter_context(_SHAPES[name]()), stack
        return self._shapes[name][0]

    def stop(self, *names: str) -> None:
        for name in names:
            if name in self._shapes:
                _, stack = self._shapes.pop(name)
                stack.close()


_running = _Running()


def _shapes_of(item: pytest.Item) -> list[str]:
    return [name for name in _ORDER if name in getattr(item, "fixturenames", ())]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders tests by shape; those of clusters of their own come first. Marks what one process of
    xdist runs: the tests of a shape, or of a file, where they are not of a group already."""
    if any(map(_shapes_of, items)):
        items.sort(key=lambda item: max(map(_ORDER.index, _shapes_of(item)), default=-1))
    if "PYTEST_XDIST_WORKER" in os.environ:
        for item in items:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(group_of(item)))


def group_of(item: pytest.Item) -> str:
    """Returns the last of a test's shapes; of a test without one, the name of its file."""
    return _shapes_of(item)[-1] if _shapes_of(item) else item.path.stem


def pytest_collection_finish(session: pytest.Session) -> None:
    _running.last_tests = {n: item.nodeid for item in session.items for n in _shapes_of(item)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Stops the shapes that no later test uses."""
    try:
        yield
    finally:
        last = _running.last_tests
        _running.stop(*(name for name in _shapes_of(item) if last.get(name) == item.nodeid))


def pytest_sessionfinish() -> None:
    _running.stop(*_ORDER)


def _fixture_of(shape: str) -> Any:
    return pytest.fixture(scope="session", name=shape)(lambda: _running.get(shape))


globals().update({shape: _fixture_of(shape) for shape in _SHAPES})


@pytest.fixture(scope="session")
def cluster(single_shape: LocalCluster) -> LocalCluster:
    """The shape `single`."""
    return single_shape


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address, admin_address=cluster.admin_address) as open_client:
        yield open_client


@pytest.fixture
def pair(pair_shape: LocalCluster) -> LocalCluster:
    """The shape `pair`, made whole after whatever an earlier test did to it."""
    return restored(pair_shape)


@pytest.fixture(scope="session")
def secured(secured_shape: named_clusters.Secured) -> LocalCluster:
    return secured_shape.cluster


@pytest.fixture
def traced(traced_shape: named_clusters.Traced) -> LocalCluster:
    return traced_shape.restored()


@pytest.fixture(scope="session")
def narrow(narrow_shape: LocalCluster) -> LocalCluster:
    return narrow_shape


@pytest.fixture
def tight(tight_shape: LocalCluster) -> LocalCluster:
    return restored(tight_shape)


@pytest.fixture(scope="session")
def swapping(swapping_shape: LocalCluster) -> LocalCluster:
    return swapping_shape
