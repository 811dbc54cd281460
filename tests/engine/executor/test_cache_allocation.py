"""Measurement of the largest step: free again before the pools are made, and as large with them."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.attention.static_batch import StaticTritonBatch, StepForm
from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.cache.kv_layout import KvShape, plan_groups
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.memory.cache_allocation import probe
from baton.engine.executor.memory.cache_plan import CachePlan
from baton.engine.executor.memory.pool_size import GpuMemory

CPU, META = torch.device("cpu"), torch.device("meta")
MIB = 2**20


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


def static_bytes(num_blocks: int, windows: list[int | None], max_drafts: int) -> int:
    """Returns the bytes that recorded steps of a model of 8 billion parameters, with 64 sequences
    of up to 131,072 tokens, take beside their activations."""
    max_len, num_layers = 131072, 32
    shapes = [KvShape(8, 128, 128)] * num_layers
    of_layers = (windows * num_layers)[:num_layers]
    layouts, places = plan_groups(shapes, of_layers, torch.bfloat16, 16)
    cache = KvCache([KvPool(layout, num_blocks, META) for layout in layouts], [], places)
    attention = TritonAttention(
        cache,
        [32] * num_layers,
        torch.bfloat16,
        max_len,
        deterministic=False,
        max_decode_tokens=1 + max_drafts,
    )
    num_rows = 64 if not max_drafts else 512
    batch = StaticTritonBatch(attention, num_rows, max_len // 16 + 2).rows(
        num_rows, StepForm.SHARING
    )
    tensors = [*batch.slots, *batch.tables]
    for work in batch.work.values():
        tensors += [work.arrays.splits.items, work.workspace.acc]
        tensors += [work.workspace.row_max, work.workspace.row_sum]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("windows", [[None], [None, 4096], [None, 128]], ids=str)
@pytest.mark.parametrize(("max_drafts", "most"), [(0, 40), (4, 350), (15, 350)])
def test_recorded_steps_take_what_was_measured_whatever_the_pool(
    windows: list[int | None], max_drafts: int, most: int
) -> None:
    of_probe, of_pool = (static_bytes(n, windows, max_drafts) for n in (512, 50 * 2**30 // 2**21))
    assert of_pool == of_probe < most * MIB
