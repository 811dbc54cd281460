"""Fixtures of engines whose pools are opened by handle, as on a GPU. A conftest imports them."""

from collections.abc import Iterator

import pytest

from tests.support.engine import host_ipc
from tests.support.engine.host_ipc import HostIpc
from tests.support.engine.zygote import BY_HANDLE, Zygote, zygote


@pytest.fixture(scope="session")
def forks_by_handle() -> Iterator[Zygote]:
    """Source of processes for engines, whose pools are opened by handle; needs `ipc`."""
    with zygote(BY_HANDLE) as forking:
        yield forking


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> HostIpc:
    """CUDA IPC of this process, on a CPU."""
    return host_ipc.install(monkeypatch.setattr)
