"""Lock of a GPU: workers that share it measure and take its memory one after the other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.cache.kv_layout import KvShape, LayerPlace, plan_layout
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.memory.cache_allocation import allocate
from baton.engine.executor.memory.cache_plan import CachePlan
from baton.engine.executor.memory.gpu_lock import file_lock
from baton.engine.executor.memory.pool_size import GpuMemory


def test_file_lock_excludes_other_holders_until_released(tmp_path: Path) -> None:
    events: list[str] = []

    def second() -> None:
        with file_lock(tmp_path / "gpu.lock"):
            events.append("second")

    thread = threading.Thread(target=second)
    with file_lock(tmp_path / "gpu.lock"):
        thread.start()
        thread.join(0.1)
        events.append("first")
    thread.join(10.0)
    assert events == ["first", "second"]


def test_allocate_measures_and_takes_memory_under_the_lock() -> None:
    events: list[object] = []

    @contextmanager
    def lock(device: torch.device) -> Iterator[None]:
        events.append(device)
        yield
        events.append("released")

    def measure(*_args: object) -> GpuMemory:
        events.append("measured")
        return GpuMemory(total=2**20, used_by_others=0, peak=0)

    class Plan(CachePlan):
        def pools(self, counts: list[int], device: torch.device) -> list[KvPool]:
            events.append("pools")
            return super().pools(counts, device)

    layout = plan_layout([KvShape(2, 8, 8)], torch.float32, 16, None)
    plan, device = Plan([layout], [LayerPlace(0, 0)]), torch.device("cpu")
    unused: Any = None
    config = EngineConfig(gpu_memory_utilization=0.5, shared_pools=False)
    cache = allocate(config, plan, unused, unused, device, 64, lock=lock, measure=measure)
    assert cache.pools[0].num_blocks * layout.block_bytes == 2**19
    assert events == [device, "measured", "pools", "released"]
