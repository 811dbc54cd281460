"""Pools and tokens to write into them, shared by the interpreted and the GPU tests."""

from dataclasses import dataclass

import torch

from baton.engine.kv_pool import KvPool, KvShape, plan_layout
from kernels.cache_write import CacheBlocks
from tests.support.kernels.comparison import ABSOLUTE, FP8, RELATIVE, apart, random

NUM_BLOCKS = 9


@dataclass(frozen=True, slots=True)
class Step:
    """New tokens, and a poisoned pool that they go to."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    pool: KvPool
    cache: CacheBlocks

    @property
    def is_real(self) -> torch.Tensor:
        return self.slots >= self.pool.layout.block_size

    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as the cache has them, in float64, of the rows that are no padding."""
        size = self.pool.layout.block_size
        slots = self.slots[self.is_real].long()
        found = []
        for rows, blocks, scales in (
            (self.key, self.cache.key, self.cache.key_scales),
            (self.value, self.cache.value, self.cache.value_scales),
        ):
            heads = blocks.unflatten(1, (size, *rows.shape[1:]))[slots // size, slots % size]
            heads = heads.double()
            found.append(heads if scales is None else heads * scales.double()[:, None])
        return found[0], found[1]

    def num_numbers(self) -> int:
        """How many of the whole pool, all layers, are no longer poison."""
        typed = self.pool._bytes.view(getattr(torch, self.pool.layout.dtype))
        return int((~typed.float().isnan()).sum())


def step_of(
    *,
    num_tokens: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    layer: int,
    device: torch.device,
    num_blocks: int = NUM_BLOCKS,
) -> Step:
    """Slots are in no order; every third row is padding; K's and V's tokens lie apart."""
    layout = plan_layout([KvShape(num_kv_heads, key_dim, value_dim)] * 3, cache_dtype, block_size)
    pool = KvPool(layout, num_blocks, device)
    pool._bytes.fill_(0xFF)  # NaN in every float type
    found = pool.layers[layer]
    free = block_size + torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    index = torch.arange(num_tokens, device=device)
    slots = torch.where(index % 3 == 2, index % block_size, free)
    scales = [0.01 + torch.rand(num_kv_heads, device=device) for _ in range(2)]
    return Step(
        apart(random(num_tokens, num_kv_heads, key_dim, dtype=dtype, device=device)),
        apart(random(num_tokens, num_kv_heads, value_dim, dtype=dtype, device=device)),
        slots.to(torch.int32) if layer else slots,
        pool,
        CacheBlocks(
            found.key_blocks, found.value_blocks, *(scales if cache_dtype == FP8 else (None, None))
        ),
    )


def assert_stored(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Both float64; the tolerance is the rounding of the cache's type."""
    torch.testing.assert_close(actual, expected, rtol=RELATIVE[dtype], atol=ABSOLUTE[dtype])


def rotary_table(max_len: int, rotary_dim: int, device: torch.device) -> torch.Tensor:
    """`[max_len, 2, rotary_dim / 2]`, the usual one."""
    frequencies = 1e4 ** -(torch.arange(rotary_dim // 2, device=device) / (rotary_dim // 2))
    angles = torch.arange(max_len, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=1)
