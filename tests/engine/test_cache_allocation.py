"""Measurement of the largest step: what it allocates is free again before the pools are."""

import weakref
from types import SimpleNamespace

import torch

from baton.engine.cache.kv_layout import KvShape, plan_groups
from baton.engine.cache.kv_pool import KvCache
from baton.engine.config import EngineConfig
from baton.engine.memory.cache_allocation import probe
from baton.engine.memory.cache_plan import CachePlan
from baton.engine.memory.pool_size import GpuMemory

CPU = torch.device("cpu")


class Model:
    """Model that holds its attention."""

    paged: object = None

    def use(self, paged: object) -> None:
        self.paged = paged


def test_probe_releases_its_pool_and_attention() -> None:
    model, pools = Model(), []

    def attention(cache: KvCache) -> SimpleNamespace:
        pools.extend(weakref.ref(pool.content) for pool in cache.pools)
        return SimpleNamespace(cache=cache)

    def measure(used: Model, paged: object, *_: object) -> GpuMemory:
        assert used.paged is paged is not None
        return GpuMemory(total=8, used_by_others=1, peak=2)

    backend = SimpleNamespace(attention=attention, graph_bytes=lambda _model, _attention: 3)
    layouts, places = plan_groups([KvShape(1, 8, 8)], [None], torch.float32, 16)
    plan = CachePlan(layouts, places)
    found = probe(EngineConfig(device="cpu"), plan, model, backend, CPU, 64, measure)
    assert found == GpuMemory(total=8, used_by_others=1, peak=2, graphs=3)
    assert [pool() for pool in pools] == [None]
