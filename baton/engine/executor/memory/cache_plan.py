"""KV cache plan of a model: cache groups, layouts, and the memory for a number of blocks."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch

from baton.engine.executor.cache.kv_layout import (
    KvLayout,
    LayerPlace,
    plan_groups,
    pool_bytes,
)
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.cache.kv_scales import KvScales
from baton.engine.executor.cache.shared_memory import SharedMemory
from baton.engine.executor.models.transformers_model import ProbedLayer

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """Plan of the memory of an encoder.

    Attributes:
        layout: layout of its outputs' pool.
        num_blocks: blocks of that pool.
        encode_largest: encodes as much as a step may, for a measurement.
    """

    layout: KvLayout
    num_blocks: int
    encode_largest: Callable[[], object]


@dataclass(frozen=True, slots=True)
class CachePlan:
    """KV cache plan: a pool for each set of layers that see the same tokens.

    Attributes:
        places: place of each layer of the model.
        scales: scales of each layer of the model, where the cache is fp8; else None.
        encoder: plan of the encoder's memory; None for a model without an encoder.
    """

    layouts: list[KvLayout]
    places: list[LayerPlace]
    scales: list[KvScales] | None = None
    encoder: EncoderPlan | None = None

    @classmethod
    def of(
        cls,
        layers: list[ProbedLayer],
        dtype: torch.dtype,
        block_size: int,
        scales: list[KvScales] | None = None,
    ) -> Self:
        """Plans a cache whose K and V have `dtype`."""
        shapes = [layer.shape for layer in layers]
        windows = [layer.attention.rule.window for layer in layers]
        return cls(*plan_groups(shapes, windows, dtype, block_size), scales)

    def cache(
        self, pools: list[KvPool], host_counts: list[int], encoder_pool: KvPool | None = None
    ) -> KvCache:
        """Returns the cache with `host_counts` host blocks of each group; empty: no swap."""
        for_gpu = pools[0].device.type == "cuda"
        sizes = zip(self.layouts, host_counts, strict=bool(host_counts))
        hosts = [KvPool(layout, count, _CPU, for_gpu=for_gpu) for layout, count in sizes]
        return KvCache(pools, hosts, self.places, self.scales, encoder_pool)

    def pools(self, counts: list[int], device: torch.device) -> list[KvPool]:
        """Allocates pools of `counts` blocks."""
        return [KvPool(*sizes, device) for sizes in zip(self.layouts, counts, strict=True)]

    def shared_pools(self, counts: list[int]) -> list[KvPool]:
        """Allocates pools in memory that other processes here can map, if there is any."""
        return list(map(shared_pool, self.layouts, counts))


def shared_pool(layout: KvLayout, num_blocks: int) -> KvPool:
    """Allocates a pool in memory that other processes here can map, if there is any."""
    return KvPool(layout, num_blocks, _CPU, _shared(pool_bytes(layout, num_blocks)))


def _shared(num_bytes: int) -> SharedMemory | None:
    try:
        return SharedMemory.allocate("baton-kv", num_bytes)
    except OSError as error:
        logger.warning("the KV pool is not shared with other processes: %s", error)
        return None
