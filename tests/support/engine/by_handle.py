"""Fixtures of processes for engines, whose pools are opened by descriptor or, as on a GPU, by
handle. A conftest imports them."""

from collections.abc import Iterator

import pytest

from tests.support.engine import host_ipc
from tests.support.engine.host_ipc import HostIpc
from tests.support.engine.zygote import Zygote, zygote

_running: list[Zygote] = []


@pytest.fixture(scope="session")
def forks() -> Iterator[Zygote]:
    """Source of processes for engines, whose pools are opened by descriptor. It takes seconds to
    start, so that the tests of all folders whose conftest imports this share one."""
    if _running:
        yield _running[0]
        return
    with zygote() as forking:
        _running.append(forking)
        yield forking
        _running.clear()


@pytest.fixture(scope="session")
def forks_by_handle(forks: Zygote) -> Zygote:
    """Source of processes for engines, whose pools are opened by handle; needs `ipc`."""
    return forks.by_handle


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> HostIpc:
    """CUDA IPC of this process, on a CPU."""
    return host_ipc.install(monkeypatch.setattr)
