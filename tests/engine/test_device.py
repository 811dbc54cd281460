"""Device of an engine: the GPU that its name says, in every thread that uses it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.async_engine import AsyncEngine
from baton.engine.device import resolve_device, use_device
from baton.errors import InvalidArgumentError

SECOND = torch.device("cuda:1")


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """The current GPU of each thread, by its name, on a machine with two."""
    found: dict[str, torch.device] = {}

    def set_device(device: torch.device) -> None:
        found[threading.current_thread().name] = device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=bool))
    return found


def test_use_device_makes_gpu_current_and_ignores_cpu(current: dict[str, torch.device]) -> None:
    use_device(torch.device("cpu"))
    assert not current
    use_device(SECOND)
    assert current == {"MainThread": SECOND}


@pytest.mark.usefixtures("current")
def test_resolve_device_refuses_gpu_that_is_not_there() -> None:
    assert resolve_device("cuda:1") == SECOND
    with pytest.raises(InvalidArgumentError, match="is 'cuda:2'; torch sees 2 GPUs here"):
        resolve_device("cuda:2")


async def test_async_engine_threads_use_its_device(current: dict[str, torch.device]) -> None:
    engine: Any = SimpleNamespace(
        device=SECOND, has_work=False, close=lambda: None, stats=lambda: None
    )
    running = AsyncEngine(engine)
    running.start()
    await running.stop()
    assert current == {"MainThread": SECOND, "engine": SECOND}
