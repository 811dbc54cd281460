"""In-place attention over two fixed sequences."""

import math
from itertools import pairwise

import numpy as np
import torch

from baton.engine.executor.attention.in_place_attention import InPlaceAttention
from baton.engine.executor.attention.interface import LayerAttention, RaggedBatch
from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.executor.cache.kv_layout import KvShape, LayerPlace, plan_layout
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from tests.support.engine.paged_attention import CPU, SCALE


def two_sequence_cache(dtype: torch.dtype, window: int | None = None) -> KvCache:
    pool = KvPool(plan_layout([KvShape(2, 32, 32)], dtype, 16, window), 30, CPU)
    return KvCache([pool], [], [LayerPlace(0, 0)])


def attend_in_place(
    cache: KvCache, ranges: list[tuple[int, int, int]], *, spoilt: bool = False
) -> torch.Tensor:
    """Computes ranges (sequence, start, length) of sequences whose tokens depend on the position
    and the sequence alone."""
    parts = []
    for sequence, start, length in ranges:
        generator = torch.Generator().manual_seed(sequence)
        drawn = torch.randn(256, 8, 32, generator=generator).to(cache.pools[0].dtype)
        parts.append(drawn[start : start + length])
    heads = torch.cat(parts)
    query, key, value = heads.split([4, 2, 2], dim=1)
    if spoilt:
        query[7] = math.nan
    table = np.array([range(1, 14), range(14, 27)], np.int32)
    slots, starts, lengths = np.array(ranges, np.int64).T
    num_decodes = len(ranges) if (lengths == 1).all() else 0
    attention = InPlaceAttention(cache)
    batch = attention.prepare(RaggedBatch(slots, starts, lengths, num_decodes, [table]))
    layer = LayerAttention(SCALE, MaskRule(cache.layouts[0].window))
    return attention.forward(0, layer, query, key, value, batch)


def check_any_batch(dtype: torch.dtype, window: int | None) -> None:
    """Checks that a prompt's outputs are bitwise equal beside another prompt, and in chunks of
    more rows than a decode has."""

    def attended(*steps: list[tuple[int, int, int]]) -> torch.Tensor:
        cache = two_sequence_cache(dtype, window)
        return torch.cat([attend_in_place(cache, ranges) for ranges in steps])

    alone = attended([(0, 0, 200)])
    assert torch.equal(alone, attended([(1, 0, 70), (0, 0, 200)])[70:])
    bounds = [*range(0, 200, 37), 200]
    chunks = [[(0, start, end - start)] for start, end in pairwise(bounds)]
    assert torch.equal(alone, attended(*chunks))
