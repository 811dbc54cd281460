"""Connectors of Baton and of packages: which a worker has, in which order."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import InvalidArgumentError
from baton.worker.settings import KV_CONNECTORS, WorkerSettings
from baton_kvtransfer.connector import Connector
from baton_kvtransfer.registry import BUILT_IN, connectors_for
from tests.support.kvtransfer.loopback import (
    HYBRID,
    allocation,
    contents,
    pool_of,
    transfer,
)

ENTRY_POINTS = """[baton.kv_connectors]
files = tests.support.kvtransfer.file_connector:FileConnector
folders = tests.support.kvtransfer.file_connector:FileConnector
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that declares one class of its own, under two names."""
    metadata = tmp_path / "files-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: files\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))


def named(name: str, pools: Sequence[KvPool] = ()) -> list[Connector]:
    return connectors_for(pools, WorkerSettings(kv_connector=name))


def test_registry_has_connectors_of_the_setting_in_order():
    names = [kind.name for kind in BUILT_IN]
    assert names == ["cuda-ipc", "shm", "nixl", "grpc"]
    assert {*names, "auto"} == {*KV_CONNECTORS}
    for choice in KV_CONNECTORS:
        assert [connector.name for connector in named(choice)] == names


async def test_new_connector_moves_blocks_as_one_class(package):
    """Through the registry, and with no other change than its declaration."""
    pools = [pool_of(8, layout) for layout in HYBRID]
    assert named("files", pools)[0].name == "files"
    options = {"connector": "files", "connectors": lambda pools: named("files", pools)}
    async with transfer(8, layouts=HYBRID, **options) as ends:
        with ends.computed_lease((3, 1), (2, 4)):
            handle, into = ends.handle(2), allocation((5, 8), (1, 7))
            _, report = await ends.fetcher.fetch(handle, into, 10.0)
        assert (report.connector, report.reason) == ("files", "both were given it")
        for group, (sources, targets) in enumerate([((3, 1), (5, 8)), ((2, 4), (1, 7))]):
            expected = contents(ends.sources[group], sources)
            assert contents(ends.targets[group], targets) == expected


def test_registry_refuses_class_of_another_name(package):
    with pytest.raises(InvalidArgumentError, match="'folders'; its class has the name 'files'"):
        named("folders")
