"""Device of an engine: the GPU that its name says, in every thread that uses it."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda._utils import _get_device_index

from baton.engine.client import EngineClient
from baton.engine.core.engine_thread import EngineThread
from baton.engine.executor.cache.kv_layout import KvLayout
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.device import resolve_device, use_device
from baton.engine.executor.models.loader import resolve_dtype
from baton.errors import FailedPreconditionError, InvalidArgumentError

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
NAMED = [("auto", FIRST), ("cuda", FIRST), ("cuda:1", SECOND)]


class TwoGpus:
    """GPUs of a machine with two. `current`: the GPU of each thread that uses one, by its name."""

    def __init__(self) -> None:
        self.current: dict[str, torch.device] = {}

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None:
        index = _get_device_index(device)  # as torch does: a device without an index is refused
        self.current[threading.current_thread().name] = torch.device("cuda", index)

    def current_stream(self) -> Any:
        return SimpleNamespace(query=bool)


def test_use_device_makes_gpu_current_and_ignores_cpu() -> None:
    gpus = TwoGpus()
    use_device(torch.device("cpu"), gpus)
    assert not gpus.current
    use_device(SECOND, gpus)
    assert gpus.current == {"MainThread": SECOND}


@pytest.mark.parametrize(("name", "device"), NAMED)
def test_use_device_takes_every_device_that_has_a_name(name: str, device: torch.device) -> None:
    gpus = TwoGpus()
    resolved = resolve_device(name, gpus)
    assert resolved == device
    use_device(resolved, gpus)
    assert gpus.current == {"MainThread": device}
    use_device(torch.device(name.replace("auto", "cuda")), gpus)
    assert gpus.current == {"MainThread": device}


def test_resolve_device_rejects_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(FailedPreconditionError, match=r"a GPU needs Triton.*pip install triton"):
        resolve_device("auto", TwoGpus())


def test_resolve_device_refuses_gpu_that_is_not_there() -> None:
    assert resolve_device("cuda:1", TwoGpus()) == SECOND
    with pytest.raises(InvalidArgumentError, match="is 'cuda:2'; torch sees 2 GPUs here"):
        resolve_device("cuda:2", TwoGpus())


@pytest.mark.parametrize(("name", "device"), NAMED)
async def test_engine_threads_use_its_device(name: str, device: torch.device) -> None:
    gpus = TwoGpus()
    resolved = resolve_device(name, gpus)
    cache = SimpleNamespace(pools=[], encoder_pool=None)
    facts = SimpleNamespace(info=None)
    parts = {"facts": facts, "cache": cache, "reading": lambda: None, "close": lambda: None}
    core: Any = SimpleNamespace(device=resolved, has_work=False, **parts)
    running = EngineClient(EngineThread(core, gpus))
    running.start()
    await running.stop()
    assert gpus.current == {"MainThread": device, "engine": device}


def test_kv_pool_names_its_gpu_by_index() -> None:
    layout = KvLayout("float32", block_size=4, block_bytes=64, layers=(), window=None)
    with FakeTensorMode():
        assert KvPool(layout, 2, torch.device("cuda")).device == FIRST


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, None])
def test_checkpoint_dtype_is_kept_on_a_gpu_if_served(dtype: torch.dtype | None) -> None:
    config: Any = SimpleNamespace(dtype=dtype)
    served = dtype if dtype is torch.float16 else torch.float32
    assert resolve_dtype("auto", config, FIRST, frozenset()) is served


@pytest.mark.parametrize(
    ("dtype", "instructions", "served"),
    [
        (torch.bfloat16, {"avx512f", "avx512_bf16"}, torch.bfloat16),
        (torch.bfloat16, {"amx_bf16"}, torch.bfloat16),
        (torch.bfloat16, {"avx512f", "avx512_vnni"}, torch.float32),
        (torch.float16, {"avx512_bf16"}, torch.float32),
        (None, {"avx512_bf16"}, torch.float32),
    ],
)
def test_checkpoint_dtype_is_kept_on_a_cpu_that_multiplies_it(dtype, instructions, served) -> None:
    config: Any = SimpleNamespace(dtype=dtype)
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", config, cpu, instructions) is served
    assert resolve_dtype("float32", config, cpu, instructions) is torch.float32
