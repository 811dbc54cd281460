"""KV cache write: stores K and V of new tokens in the paged pool, without a rotation.

A token's slot is `block * block_size + offset`. Block 0 is the null block: slots in it belong to
padding rows, for which nothing is written. In an fp8 (e4m3) cache a number is stored divided by the
scale of its KV head. `rotary` applies the rotary embedding and writes in one pass.

Where V of a head is not finite, 0 is stored, and NaN in the head's K. So queries that see the token
get NaN, and others nothing of it: attention leaves out hidden scores, while a hidden V has a weight
of 0, which would make NaN of one that is not finite.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.dependent_launch import dependent_launch, wait_for_kernel_before
from baton_kernels.gpu import FP8_TARGETS, GPUS
from baton_kernels.launch import (
    FLOATS,
    INTERPRETED,
    TRITON_TYPES,
    check_dtype,
    check_fp8,
    check_packed,
    check_pool_views,
    check_shape,
)
from baton_kernels.variant import Variant

FP_FUSION: Final = True
FP8_LARGEST: Final = 448.0
HEADS_PER_PROGRAM: Final = 8
_NUM_WARPS: Final = 4
_LARGEST = tl.constexpr(FP8_LARGEST)


@dataclass(frozen=True, slots=True)
class CacheBlocks:
    """K and V blocks of one layer, as views of the pool that owns them. Raises `ValueError` for
    those that no kernel supports.

    Attributes:
        key: `[num_blocks, num_kv_heads, block_size, key_head_dim]`; blocks and heads are strided,
            with other layers in between.
        value: `[num_blocks, num_kv_heads, block_size, value_head_dim]`, with the same strides.
        key_scales, value_scales: float32 `[num_kv_heads]`, of an fp8 cache: factor from a stored
            number to its value.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, blocks in (("key", self.key), ("value", self.value)):
            check_dtype(f"cache.{name}", blocks, *TRITON_TYPES)
            if blocks.ndim != 4 or not blocks.shape[2]:
                raise ValueError(
                    f"cache.{name} has shape {tuple(blocks.shape)}; must have [num_blocks, "
                    "num_kv_heads, block_size, head_dim]"
                )
        if self.key.shape[2] != self.value.shape[2]:
            raise ValueError(
                f"cache has blocks of {self.key.shape[2]} tokens for K and "
                f"{self.value.shape[2]} for V"
            )
        check_pool_views(self.key, self.value)
        check_fp8(self.key)
        for name, scales in (("key_scales", self.key_scales), ("value_scales", self.value_scales)):
            _check_scales(f"cache.{name}", scales, self.key.dtype, self.key.shape[1])

    @property
    def block_size(self) -> int:
        return self.key.shape[2]


@triton.jit
def store_scaled(pointers, values, scales, heads, num_heads, mask):
    """Stores float32 `values`, divided by their heads' `scales` if the cache is fp8."""
    if pointers.dtype.element_ty == tl.float8e4nv:
        values = values / tl.load(scales + heads, heads < num_heads, 1.0)
        # e4m3 has no infinity: values out of range would become NaN. Those that are NaN stay it.
        values = tl.clamp(values, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if INTERPRETED:
            # The interpreter loses the carry when it rounds, so values are rounded to 4 bits first.
            spread = values * (2.0**20 + 1.0)
            values = spread - (spread - values)
    tl.store(pointers, values.to(pointers.dtype.element_ty), mask)


@triton.jit
def num_written(slot, num_heads, BLOCK_SIZE: tl.constexpr):
    """Returns the number of a row's heads to write: 0 if the row is padding."""
    return tl.where(slot >= BLOCK_SIZE, num_heads, 0)


@triton.jit
def slot_offset(slot, block_stride, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns the offset of head 0 of a slot, in elements from the first block."""
    return slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * HEAD_DIM


@triton.jit
def load_heads(
    row, head, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Loads `BLOCK_HEADS` heads of one token, from `head` on, in float32; `row` is its head 0."""
    heads = head + tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (heads < NUM_HEADS) & (columns < HEAD_DIM)
    return tl.load(row + heads * HEAD_DIM + columns, inside, 0.0).to(tl.float32)


@triton.jit
def finite_heads(values):
    """Returns the heads with 0 for each number that is not finite, and which heads have such
    numbers, `[BLOCK_HEADS, 1]`."""
    is_finite = values - values == 0.0
    is_broken = tl.min(is_finite.to(tl.int32), axis=1)[:, None] == 0
    return tl.where(is_finite, values, 0.0), is_broken


@triton.jit
def write_heads(
    values, cache, scales, slot, block_stride, head_stride, head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Stores heads of one token, `[BLOCK_HEADS, BLOCK_DIM]` from `head` on, in its slot."""
    heads = head + tl.arange(0, BLOCK_HEADS)[:, None]
    columns = tl.arange(0, BLOCK_DIM)[None, :]
    inside = (heads < num_written(slot, NUM_HEADS, BLOCK_SIZE)) & (columns < HEAD_DIM)
    place = cache + slot_offset(slot, block_stride, BLOCK_SIZE, HEAD_DIM)
    store_scaled(place + heads * head_stride + columns, values, scales, heads, NUM_HEADS, inside)


@triton.jit
def _write_kernel(
    key, value, key_stride, value_stride,
    key_cache, value_cache, block_stride, head_stride,
    key_scales, value_scales, slots,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copies K and V of some KV heads of one token; reads and writes each once."""
    wait_for_kernel_before(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS
    # Loaded before it is known whether the row is written, so that all loads run in parallel.
    slot = tl.load(slots + token).to(tl.int64)
    keys = load_heads(key + token * key_stride, head, NUM_HEADS, KEY_DIM, BLOCK_HEADS, BLOCK_KEY)
    values, is_broken = finite_heads(
        load_heads(
            value + token * value_stride, head, NUM_HEADS, VALUE_DIM, BLOCK_HEADS, BLOCK_VALUE
        )
    )
    write_heads(
        tl.where(is_broken, float("nan"), keys), key_cache, key_scales, slot, block_stride,
        head_stride, head, NUM_HEADS, KEY_DIM, BLOCK_SIZE, BLOCK_HEADS, BLOCK_KEY,
    )  # fmt: skip
    write_heads(
        values, value_cache, value_scales, slot, block_stride,
        head_stride, head, NUM_HEADS, VALUE_DIM, BLOCK_SIZE, BLOCK_HEADS, BLOCK_VALUE,
    )  # fmt: skip


def write_kv(
    key: torch.Tensor, value: torch.Tensor, cache: CacheBlocks, slots: torch.Tensor
) -> None:
    """Writes each token's K and V to its slot.

    Args:
        key: `[num_tokens, num_kv_heads, key_head_dim]`; tokens may be strided.
        value: `[num_tokens, num_kv_heads, value_head_dim]`; tokens may be strided.
        cache: written to; of the dtype of `key`, another float type or fp8.
        slots: `[num_tokens]`, int32 or int64, unique except in block 0.
    """
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[-1]
    check_cache(key, value, cache, slots)
    if num_tokens:
        _write_kernel[(num_tokens, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
            key, value, key.stride(0), value.stride(0),
            cache.key, cache.value, *cache.key.stride()[:2],
            *scales_of(cache), slots,
            **_constants(num_heads, key_dim, value_dim, cache.block_size),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=FP_FUSION,
            **dependent_launch(key.device),
        )  # fmt: skip


def check_cache(
    key: torch.Tensor, value: torch.Tensor, cache: CacheBlocks, slots: torch.Tensor
) -> None:
    """Raises `ValueError` if tokens and cache do not fit each other."""
    num_tokens, num_heads, _ = key.shape
    check_shape("value", value, (num_tokens, num_heads, value.shape[-1]))
    check_shape("slots", slots, (num_tokens,))
    check_packed("slots", slots)
    check_dtype("slots", slots, torch.int32, torch.int64)
    for name, rows, blocks in (("key", key, cache.key), ("value", value, cache.value)):
        check_dtype(name, rows, *FLOATS)
        check_packed(name, rows, 2)
        _check_heads(name, rows, blocks)


def scales_of(cache: CacheBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales, or, if there are none, tensors in their place that are not read."""
    if cache.key_scales is None or cache.value_scales is None:
        return cache.key, cache.value
    return cache.key_scales, cache.value_scales


def reference_write_kv(
    key: torch.Tensor, value: torch.Tensor, cache: CacheBlocks, slots: torch.Tensor
) -> None:
    """Computes `write_kv` in torch."""
    check_cache(key, value, cache, slots)
    places, block_size = slots.long(), cache.block_size
    is_real = places >= block_size
    blocks, offsets = places[is_real] // block_size, places[is_real] % block_size
    is_finite = value.isfinite()
    key = key.masked_fill(~is_finite.all(-1, keepdim=True), torch.nan)
    value = value.masked_fill(~is_finite, 0.0)
    for rows, pool, scales in (
        (key, cache.key, cache.key_scales),
        (value, cache.value, cache.value_scales),
    ):
        heads = rows[is_real].float()
        if scales is not None:
            heads = (heads / scales[:, None]).clamp(-FP8_LARGEST, FP8_LARGEST)
        for block, offset, tokens in zip(blocks, offsets, heads, strict=True):
            pool[block, :, offset] = tokens.to(pool.dtype)


def _check_heads(name: str, rows: torch.Tensor, blocks: torch.Tensor) -> None:
    num_heads, head_dim = rows.shape[1:]
    if blocks.shape[1::2] != rows.shape[1:]:
        raise ValueError(
            f"cache.{name} has shape {tuple(blocks.shape)}; must have [num_blocks, {num_heads}, "
            f"block_size, {head_dim}], since {name} has {num_heads} heads of {head_dim}"
        )


def _check_scales(
    name: str, scales: torch.Tensor | None, dtype: torch.dtype, num_heads: int
) -> None:
    if scales is None:
        if dtype == torch.float8_e4m3fn:
            raise ValueError(f"{name} is None; an fp8 cache needs a scale for each KV head")
        return
    if dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name} is given; a cache of {dtype} has no scales: leave them out")
    check_shape(name, scales, (num_heads,))
    check_dtype(name, scales, torch.float32)
    check_packed(name, scales)


@functools.cache
def _constants(num_heads: int, key_dim: int, value_dim: int, block_size: int) -> Mapping[str, Any]:
    return {
        "NUM_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_HEADS": min(triton.next_power_of_2(num_heads), HEADS_PER_PROGRAM),
        "BLOCK_KEY": triton.next_power_of_2(key_dim),
        "BLOCK_VALUE": triton.next_power_of_2(value_dim),
    }


def _variant(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> Variant:
    rows, cache = TRITON_TYPES[dtype], TRITON_TYPES[cache_dtype]
    scales = "*fp32" if cache_dtype == torch.float8_e4m3fn else f"*{cache}"
    constants = dict(_constants(8, head_dim, head_dim, 16))
    strides = ("key_stride", "value_stride", "block_stride", "head_stride")
    return Variant(
        name=f"write_kv {rows} to {cache} {head_dim}",
        kernel=_write_kernel,
        signature=dict.fromkeys(("key", "value"), f"*{rows}")
        | dict.fromkeys(("key_cache", "value_cache"), f"*{cache}")
        | dict.fromkeys(("key_scales", "value_scales"), scales)
        | dict.fromkeys(strides, "i32")
        | {"slots": "*i64"},
        constants=constants,
        num_warps=_NUM_WARPS,
        num_stages=1,
        targets=FP8_TARGETS if cache_dtype == torch.float8_e4m3fn else tuple(GPUS),
    )


VARIANTS: Final = (
    *(_variant(torch.bfloat16, torch.bfloat16, dim) for dim in (64, 80, 96, 128, 256)),
    _variant(torch.float16, torch.float16, 128),
    _variant(torch.float32, torch.float32, 128),
    _variant(torch.bfloat16, torch.float8_e4m3fn, 128),
    _variant(torch.float16, torch.float8_e4m3fn, 80),
)
