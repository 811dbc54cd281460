"""Fixtures of the cluster shapes, for the conftest of each folder whose tests use them.

A shape starts with the first test that uses it. At most two run at a time in a process of tests:
the one that was used least recently makes way for a third, so a file uses two at most. Tests are
ordered by shape: each starts once, or once in each process of xdist that runs files of its tests.
All folders of a session share them.
"""

from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient
from tests.support.cluster import named_clusters
from tests.support.cluster.wide import restored

_SHAPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "pictured_shape": named_clusters.pictured,
    "secured_shape": named_clusters.secured,
    "traced_shape": named_clusters.traced,
    "narrow_shape": named_clusters.narrow,
    "tight_shape": named_clusters.tight,
    "swapping_shape": named_clusters.swapping,
    "pair_shape": named_clusters.pair,
    "networked_shape": named_clusters.networked,
    "rolling_shape": named_clusters.rolling,
    "single_shape": named_clusters.single,
}
_ORDER = list(_SHAPES)
_MAX_RUNNING = 2


class _Running:
    """The shapes that run, the least recently used one first."""

    def __init__(self) -> None:
        self._shapes: OrderedDict[str, tuple[Any, ExitStack]] = OrderedDict()

    def get(self, name: str) -> Any:
        """Returns a running shape. It runs until two others are asked for."""
        if name not in self._shapes:
            self.stop_all_but(_MAX_RUNNING - 1)
            stack = ExitStack()
            self._shapes[name] = stack.enter_context(_SHAPES[name]()), stack
        self._shapes.move_to_end(name)
        return self._shapes[name][0]

    def stop_all_but(self, number: int) -> None:
        """Stops all shapes except the `number` that were used most recently."""
        while len(self._shapes) > number:
            _, (_, stack) = self._shapes.popitem(last=False)
            stack.close()


_running = _Running()


def _shapes_of(item: pytest.Item) -> list[str]:
    return [name for name in _ORDER if name in getattr(item, "fixturenames", ())]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders tests by shape; those of clusters of their own come first. Of a shape, files with many
    tests begin: processes that share the files end at about the same time."""
    if not any(map(_shapes_of, items)):
        return
    num_tests = Counter(item.path for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        return max(map(_ORDER.index, _shapes_of(item)), default=-1), -num_tests[item.path]

    items.sort(key=place)


def pytest_sessionfinish() -> None:
    _running.stop_all_but(0)


def _fixture_of(shape: str) -> Any:
    return pytest.fixture(scope="module", name=shape)(lambda: _running.get(shape))


globals().update({shape: _fixture_of(shape) for shape in _SHAPES})


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def secured(secured_shape: named_clusters.Secured) -> LocalCluster:
    return secured_shape.cluster


@pytest.fixture
def traced(traced_shape: named_clusters.Traced) -> LocalCluster:
    return traced_shape.restored()


@pytest.fixture
def pictured(pictured_shape: named_clusters.Traced) -> LocalCluster:
    """The shape `pictured`, made whole after whatever an earlier test did to it."""
    return pictured_shape.restored()


@pytest.fixture(scope="module")
def narrow(narrow_shape: LocalCluster) -> LocalCluster:
    return narrow_shape


@pytest.fixture
def tight(tight_shape: LocalCluster) -> LocalCluster:
    return restored(tight_shape)


@pytest.fixture(scope="module")
def swapping(swapping_shape: LocalCluster) -> LocalCluster:
    return swapping_shape
