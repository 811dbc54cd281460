"""Rotary embedding (RoPE) of Q and K fused with the write of K and V into the paged pool.

The pass between QKV projection and attention of a layer: RMSNorm of each head if the model has it,
rotation, and the cache write. Each number is read and written once. Slots and the layout of the
pool are as in `cache_write`.
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
from baton_kernels.launch import FLOATS, TRITON_TYPES, check_dtype, check_packed, check_shape
from baton_kernels.rows.cache_write import (
    HEADS_PER_PROGRAM,
    CacheBlocks,
    check_cache,
    finite_heads,
    load_heads,
    num_written,
    scales_of,
    slot_offset,
    store_scaled,
    write_heads,
)
from baton_kernels.variant import Variant

FP_FUSION: Final = True


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of all positions. Raises `ValueError` for a table of another shape.

    Attributes:
        table: `[max_len, 2, rotary_dim / 2]` of any float type: cosines, then sines, of each pair.
            The first `rotary_dim` numbers of a head are rotated, the rest is unchanged.
        is_adjacent: whether numbers 2i and 2i + 1 are a pair; else i and i + rotary_dim / 2 are.
    """

    table: torch.Tensor
    is_adjacent: bool = False

    def __post_init__(self) -> None:
        if self.table.ndim != 3 or self.table.shape[1] != 2 or not self.table.shape[2]:
            raise ValueError(
                f"rotation.table has shape {tuple(self.table.shape)}; must have [max_len, 2, "
                "rotary_dim / 2]"
            )
        check_packed("rotation.table", self.table, 3)

    @property
    def rotary_dim(self) -> int:
        return 2 * self.table.shape[2]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each head of Q and of K before the rotation: weights `[head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float

    def __post_init__(self) -> None:
        for name, weight in (("query", self.query), ("key", self.key)):
            check_shape(f"norms.{name}", weight, self.query.shape[:1])
            check_packed(f"norms.{name}", weight)


@triton.jit
def _rotate_heads(
    row, out, out_head_stride, scales, head, num_heads, num_stored, is_broken,
    table, position, weight, eps,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_ADJACENT: tl.constexpr,
    HAS_NORM: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Rotates `BLOCK_HEADS` heads of one token, from `head` on; `row` and `out` point to its head
    0. Stores only heads below `num_stored`; what is rotated of those that `is_broken`,
    `[BLOCK_HEADS, 1]`, as NaN; None: none is."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    heads = head + tl.arange(0, BLOCK_HEADS)[:, None]
    pairs = tl.arange(0, BLOCK_PAIRS)[None, :]
    rest = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, :]
    if IS_ADJACENT:
        first, second = pairs * 2, pairs * 2 + 1
    else:
        first, second = pairs, pairs + HALF
    is_head, is_pair, is_rest = heads < num_heads, pairs < HALF, rest < HEAD_DIM
    start = row + heads * HEAD_DIM
    x = tl.load(start + first, is_head & is_pair, 0.0).to(tl.float32)
    y = tl.load(start + second, is_head & is_pair, 0.0).to(tl.float32)
    z = tl.load(start + rest, is_head & is_rest, 0.0).to(tl.float32)
    if HAS_NORM:
        total = tl.sum(x * x + y * y, axis=1) + tl.sum(z * z, axis=1)
        factor = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
        x *= factor * tl.load(weight + first, is_pair, 0.0).to(tl.float32)
        y *= factor * tl.load(weight + second, is_pair, 0.0).to(tl.float32)
        z *= factor * tl.load(weight + rest, is_rest, 0.0).to(tl.float32)
    angles = table + position * ROTARY_DIM + pairs
    cos = tl.load(angles, is_pair, 0.0).to(tl.float32)
    sin = tl.load(angles + HALF, is_pair, 0.0).to(tl.float32)
    is_head &= heads < num_stored
    x, y = x * cos - y * sin, y * cos + x * sin
    if is_broken is not None:
        x, y = tl.where(is_broken, float("nan"), x), tl.where(is_broken, float("nan"), y)
    end = out + heads * out_head_stride
    store_scaled(end + first, x, scales, heads, num_heads, is_head & is_pair)
    store_scaled(end + second, y, scales, heads, num_heads, is_head & is_pair)
    if ROTARY_DIM < HEAD_DIM:
        store_scaled(end + rest, z, scales, heads, num_heads, is_head & is_rest)


@triton.jit
def _rotate_and_write_kernel(
    query, key, value, query_stride, key_stride, value_stride, query_out, query_out_stride,
    key_cache, value_cache, block_stride, head_stride,
    key_scales, value_scales, slots, positions, table, query_norm, key_norm, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, IS_ADJACENT: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Processes some heads of one token: of Q in the first programs, of K and V in the others."""
    wait_for_kernel_before(IS_DEPENDENT)
    NUM_QUERY_PROGRAMS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    if program < NUM_QUERY_PROGRAMS:
        _rotate_heads(
            query + token * query_stride, query_out + token * query_out_stride, HEAD_DIM,
            key_scales, program * BLOCK_HEADS, NUM_HEADS, NUM_HEADS, None,
            table, position, query_norm, eps,
            HEAD_DIM, ROTARY_DIM, IS_ADJACENT, HAS_NORM, BLOCK_HEADS, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
    else:
        head = (program - NUM_QUERY_PROGRAMS) * BLOCK_HEADS
        slot = tl.load(slots + token).to(tl.int64)
        place = slot_offset(slot, block_stride, BLOCK_SIZE, HEAD_DIM)
        values, is_broken = finite_heads(
            load_heads(
                value + token * value_stride, head, NUM_KV_HEADS, HEAD_DIM, BLOCK_HEADS, BLOCK_DIM
            )
        )
        # Before K, so that registers do not hold both.
        write_heads(
            values, value_cache, value_scales, slot, block_stride, head_stride,
            head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_HEADS, BLOCK_DIM,
        )  # fmt: skip
        _rotate_heads(
            key + token * key_stride, key_cache + place, head_stride, key_scales,
            head, NUM_KV_HEADS, num_written(slot, NUM_KV_HEADS, BLOCK_SIZE), is_broken,
            table, position, key_norm, eps,
            HEAD_DIM, ROTARY_DIM, IS_ADJACENT, HAS_NORM, BLOCK_HEADS, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    rotation: Rotation,
    cache: CacheBlocks,
    slots: torch.Tensor,
    norms: HeadNorms | None = None,
    query_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates Q and K by position, writes K and V to their slots, returns the rotated Q.

    Args:
        query: `[num_tokens, num_heads, head_dim]`; tokens may be strided, as in a slice of a fused
            projection's output.
        key, value: `[num_tokens, num_kv_heads, head_dim]`; tokens may be strided.
        positions: `[num_tokens]`, int32 or int64, below the length of the table, also for padding
            rows, since their queries are rotated too.
        cache, slots: as in `write_kv`.
        norms: RMSNorm of the heads of Q and K before the rotation.
        query_out: output for Q, may be `query` itself; allocated, contiguous, if None.
    """
    if query_out is None:
        query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    check_cache(key, value, cache, slots)
    _check(query, key, value, positions, rotation, norms, query_out)
    num_tokens, num_heads, head_dim = query.shape
    constants = _constants(num_heads, key.shape[1], head_dim, rotation.rotary_dim, cache.block_size)
    programs_of = constants["BLOCK_HEADS"]
    num_programs = triton.cdiv(num_heads, programs_of) + triton.cdiv(key.shape[1], programs_of)
    # Those of no norm are not read.
    head_norms = (query, key, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    if num_tokens:
        _rotate_and_write_kernel[(num_tokens, num_programs)](
            query, key, value, query.stride(0), key.stride(0), value.stride(0),
            query_out, query_out.stride(0),
            cache.key, cache.value, *cache.key.stride()[:2],
            *scales_of(cache), slots, positions, rotation.table,
            *head_norms,
            **constants,
            IS_ADJACENT=rotation.is_adjacent,
            HAS_NORM=norms is not None,
            num_warps=_num_warps(constants),
            enable_fp_fusion=FP_FUSION,
            **dependent_launch(query.device),
        )  # fmt: skip
    return query_out


def reference_rotate(
    heads: torch.Tensor,
    positions: torch.Tensor,
    rotation: Rotation,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Computes norm and rotation of `[num_tokens, num_heads, head_dim]` in torch, in the dtype of
    `heads`."""
    if weight is not None:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight
    cos, sin = rotation.table[positions.long()].to(heads.dtype)[:, :, None].unbind(1)
    half = cos.shape[-1]
    turned, rest = heads[..., : 2 * half], heads[..., 2 * half :]
    if rotation.is_adjacent:
        x, y = turned.unflatten(-1, (half, 2)).unbind(-1)
        return torch.cat(
            [torch.stack([x * cos - y * sin, y * cos + x * sin], -1).flatten(-2), rest], -1
        )
    x, y = turned.chunk(2, dim=-1)
    return torch.cat([x * cos - y * sin, y * cos + x * sin, rest], -1)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    query_out: torch.Tensor,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    check_dtype("query", query, *FLOATS)
    check_packed("query", query, 2)
    check_shape("query_out", query_out, (num_tokens, num_heads, head_dim))
    check_packed("query_out", query_out, 2)
    for name, rows in (("key", key), ("value", value)):
        check_shape(name, rows, (num_tokens, key.shape[1], head_dim))
    check_shape("positions", positions, (num_tokens,))
    check_dtype("positions", positions, torch.int32, torch.int64)
    check_packed("positions", positions)
    if rotation.rotary_dim > head_dim:
        raise ValueError(
            f"rotation.table has shape {tuple(rotation.table.shape)}; must have [max_len, 2, "
            f"rotary_dim / 2] with a rotary_dim of at most the head size, {head_dim}"
        )
    if norms is not None:
        check_shape("norms.query", norms.query, (head_dim,))


@functools.cache
def _constants(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, block_size: int
) -> Mapping[str, Any]:
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_HEADS": min(triton.next_power_of_2(num_heads), HEADS_PER_PROGRAM),
        "BLOCK_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_PAIRS": triton.next_power_of_2(rotary_dim // 2),
        "BLOCK_REST": triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
    }


def _num_warps(constants: Mapping[str, Any]) -> int:
    """Returns so few warps that no two threads read the same number: Q may be rotated in place."""
    return 2 if constants["BLOCK_HEADS"] * constants["BLOCK_PAIRS"] >= 256 else 1


def _variant(
    dtype: torch.dtype,
    head_dim: int,
    *,
    cache_dtype: torch.dtype | None = None,
    rotary_dim: int | None = None,
    is_adjacent: bool = False,
    has_norm: bool = False,
) -> Variant:
    cache_dtype = cache_dtype or dtype
    rows, cache = TRITON_TYPES[dtype], TRITON_TYPES[cache_dtype]
    scales = "*fp32" if cache_dtype == torch.float8_e4m3fn else f"*{cache}"
    constants = {
        **_constants(32, 8, head_dim, rotary_dim or head_dim, 16),
        "IS_ADJACENT": is_adjacent,
        "HAS_NORM": has_norm,
    }
    tensors = ("query", "key", "value", "query_out", "query_norm", "key_norm")
    strides = ("query_stride", "key_stride", "value_stride", "query_out_stride")
    pool_strides = ("block_stride", "head_stride")
    kind = f"{' adjacent' * is_adjacent}{' normed' * has_norm}"
    return Variant(
        name=f"rotate_and_write {rows} to {cache} {rotary_dim or head_dim} of {head_dim}{kind}",
        kernel=_rotate_and_write_kernel,
        signature=dict.fromkeys(tensors, f"*{rows}")
        | dict.fromkeys(("key_cache", "value_cache"), f"*{cache}")
        | dict.fromkeys(("key_scales", "value_scales"), scales)
        | dict.fromkeys((*strides, *pool_strides), "i32")
        | {"slots": "*i64", "positions": "*i64", "table": "*fp32", "eps": "fp32"},
        constants=constants,
        num_warps=_num_warps(constants),
        num_stages=1,
        targets=FP8_TARGETS if cache_dtype == torch.float8_e4m3fn else tuple(GPUS),
    )


VARIANTS: Final = (
    *(_variant(torch.bfloat16, head_dim) for head_dim in (64, 80, 96, 128, 256)),
    _variant(torch.float16, 128),
    _variant(torch.float32, 128),
    _variant(torch.bfloat16, 80, rotary_dim=32),
    _variant(torch.float32, 128, is_adjacent=True),
    _variant(torch.bfloat16, 128, has_norm=True),
    _variant(torch.bfloat16, 128, cache_dtype=torch.float8_e4m3fn),
    _variant(torch.bfloat16, 256, cache_dtype=torch.float8_e4m3fn, rotary_dim=64, has_norm=True),
)
