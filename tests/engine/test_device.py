"""Device of an engine: the GPU that its name says, in every thread that uses it."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda._utils import _get_device_index

from baton.engine.async_engine import AsyncEngine
from baton.engine.cache.kv_layout import KvLayout
from baton.engine.cache.kv_pool import KvPool
from baton.engine.core.engine_thread import EngineThread
from baton.engine.device import resolve_device, use_device
from baton.engine.models.loader import resolve_dtype
from baton.errors import InvalidArgumentError

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
NAMED = [("auto", FIRST), ("cuda", FIRST), ("cuda:1", SECOND)]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """The current GPU of each thread, by its name, on a machine with two."""
    found: dict[str, torch.device] = {}

    def set_device(device: torch.device) -> None:
        index = _get_device_index(device)  # as torch does: a device without an index is refused
        found[threading.current_thread().name] = torch.device("cuda", index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=bool))
    return found


def test_use_device_makes_gpu_current_and_ignores_cpu(current: dict[str, torch.device]) -> None:
    use_device(torch.device("cpu"))
    assert not current
    use_device(SECOND)
    assert current == {"MainThread": SECOND}


@pytest.mark.parametrize(("name", "device"), NAMED)
def test_use_device_takes_every_device_that_has_a_name(
    current: dict[str, torch.device], name: str, device: torch.device
) -> None:
    resolved = resolve_device(name)
    assert resolved == device
    use_device(resolved)
    assert current == {"MainThread": device}
    use_device(torch.device(name.replace("auto", "cuda")))
    assert current == {"MainThread": device}


@pytest.mark.usefixtures("current")
def test_resolve_device_refuses_gpu_that_is_not_there() -> None:
    assert resolve_device("cuda:1") == SECOND
    with pytest.raises(InvalidArgumentError, match="is 'cuda:2'; torch sees 2 GPUs here"):
        resolve_device("cuda:2")


@pytest.mark.parametrize(("name", "device"), NAMED)
async def test_async_engine_threads_use_its_device(
    current: dict[str, torch.device], name: str, device: torch.device
) -> None:
    resolved = resolve_device(name)
    engine: Any = SimpleNamespace(
        device=resolved,
        has_work=False,
        close=lambda: None,
        stats=lambda: SimpleNamespace(is_idle=True),
        work_done=None,
        time_spent=None,
        num_late_compilations=0,
    )
    running = AsyncEngine(EngineThread(engine))
    running.start()
    await running.stop()
    assert current == {"MainThread": device, "engine": device}


def test_kv_pool_names_its_gpu_by_index() -> None:
    layout = KvLayout("float32", block_size=4, block_bytes=64, layers=(), window=None)
    with FakeTensorMode():
        assert KvPool(layout, 2, torch.device("cuda")).device == FIRST


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, None])
def test_checkpoint_dtype_is_kept_on_a_gpu_if_served(dtype: torch.dtype | None) -> None:
    config: Any = SimpleNamespace(dtype=dtype)
    served = dtype if dtype is torch.float16 else torch.float32
    assert resolve_dtype("auto", config, FIRST) is served
