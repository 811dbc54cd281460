"""Pools and tokens to write into them, shared by the interpreted and the GPU tests."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.engine.executor.cache.kv_layout import KvShape, plan_layout
from baton.engine.executor.cache.kv_pool import KvPool
from baton_kernels.rows.cache_write import CacheBlocks
from baton_kernels.rows.rotary import HeadNorms, Rotation, reference_rotate, rotate_and_write
from tests.support.kernels.comparison import (
    ABSOLUTE,
    FP8,
    RELATIVE,
    Device,
    apart,
    assert_close,
    poisoned,
    random,
)

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
        for blocks, scales in (
            (self.cache.key, self.cache.key_scales),
            (self.cache.value, self.cache.value_scales),
        ):
            heads = blocks[slots // size, :, slots % size].double()
            found.append(heads if scales is None else heads * scales.double()[:, None])
        return found[0], found[1]

    def written_by(self, write: Callable[["Step"], object]) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the step; returns `written`."""
        write(self)
        return self.written()

    def check(self, key: torch.Tensor | None = None) -> None:
        """Asserts that the cache holds the step's K (or `key`, as rotated) and V, rounded to its
        type, and that the rest of the pool is poison still."""
        for found, rows in zip(
            self.written(), (self.key if key is None else key, self.value), strict=True
        ):
            dtype = self.cache.key.dtype
            torch.testing.assert_close(
                found, rows[self.is_real].double(), rtol=RELATIVE[dtype], atol=ABSOLUTE[dtype]
            )
        typed = self.pool.content.view(getattr(torch, self.pool.layout.dtype))
        num_numbers = int((~typed.float().isnan()).sum())
        assert num_numbers == sum(t[self.is_real].numel() for t in (self.key, self.value))


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
    device: Device = "cpu",
    num_blocks: int = NUM_BLOCKS,
) -> Step:
    """Slots are in no order; every third row is padding; K's and V's tokens lie apart."""
    layout = plan_layout([KvShape(num_kv_heads, key_dim, value_dim)] * 3, cache_dtype, block_size)
    pool = KvPool(layout, num_blocks, torch.device(device))
    pool.content.fill_(0xFF)  # NaN in every float type
    found = pool.layers[layer]
    free = block_size + torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    index = torch.arange(num_tokens, device=device)
    slots = torch.where(index % 3 == 2, index % block_size, free)
    # Large enough that fp8 holds every random number: a norm's weight times a rotated head.
    scales = [0.1 + torch.rand(num_kv_heads, device=device) for _ in range(2)]
    return Step(
        apart(random(num_tokens, num_kv_heads, key_dim, dtype=dtype, device=device)),
        apart(random(num_tokens, num_kv_heads, value_dim, dtype=dtype, device=device)),
        slots.to(torch.int32) if layer else slots,
        pool,
        CacheBlocks(found.keys, found.values, *(scales if cache_dtype == FP8 else (None, None))),
    )


def rotary_table(max_len: int, rotary_dim: int, device: Device = "cpu") -> torch.Tensor:
    """`[max_len, 2, rotary_dim / 2]`, the usual one."""
    frequencies = 1e4 ** -(torch.arange(rotary_dim // 2, device=device) / (rotary_dim // 2))
    angles = torch.arange(max_len, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def check_rotation(
    step: Step, num_heads: int, rotation: Rotation, has_norm: bool, out: str = "in place"
) -> None:
    """Rotates random queries and the step's K and writes the step; compares with float64."""
    num_tokens, _, head_dim = step.key.shape
    dtype, device = step.key.dtype, step.key.device
    query = random(num_tokens, num_heads, head_dim, dtype=dtype, device=device)
    positions = torch.randint(len(rotation.table), (num_tokens,), device=device)
    weights = torch.randn(2, head_dim, device=device).to(dtype)
    norms = HeadNorms(*weights, 1e-5) if has_norm else None
    expected, key = (
        reference_rotate(
            heads.double(), positions, rotation, weight.double() if has_norm else None, 1e-5
        )
        for heads, weight in zip((query, step.key), weights, strict=True)
    )
    target = {
        "allocated": None,
        "given": poisoned(*query.shape, dtype=dtype, device=device),
        "in place": query,
    }[out]
    rotated = rotate_and_write(
        query, step.key, step.value, positions, rotation, step.cache, step.slots, norms, target
    )
    assert target is None or rotated is target
    assert_close(rotated, expected)
    step.check(key)
