"""Tiling of attention into programs. It depends on only the served model and its GPU, never on a
batch, so that no result depends on the batch's other sequences.

With these sizes every variant compiles without register spills (`baton_kernels.compile` reports
them), and K and V of two tiles are loaded while one is computed."""

import functools
from dataclasses import dataclass, replace
from typing import Final

import torch
import triton

from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.gpu import H100, Gpu

# Splits of the deterministic mode, for any number of KV heads: pools with different settings have
# to agree. Prefill merges them too, which shorter ones would slow down.
DETERMINISTIC_SPLITS: Final = SplitRule(512, 32)
_LEAST_SPLIT: Final = 128
# Shared memory for reductions.
_SMALL_BYTES: Final = 1024
# Programs for the longest contexts with one split length, of which the next has half: still one on
# each of the 132 multiprocessors of an H100.
_MOST_PROGRAMS: Final = 256


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes of one program, and its compile options.

    Attributes:
        rows: query heads of tokens, all of one KV head; a power of two, at least 16.
        keys: keys of the context folded in per iteration; a power of two.
        num_warps, num_stages: Triton's options. Block tables are read before the blocks, so a
            prefetch of two tiles takes five stages.
        max_registers: registers per thread. None leaves it to the assembler, which may spill a few
            for higher occupancy.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = 255

    def num_tokens(self, group: int) -> int:
        """Returns the number of tokens that the rows hold, with `group` query heads each."""
        return self.rows // group


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """Tilings of all attention kernels, for one model on one GPU.

    Attributes:
        decode: tiling for few tokens of one sequence.
        shared: tiling for tokens of several sequences, over blocks that they share.
        prefill: tiling for many tokens of one sequence.
        splits: rule of the splits of a context, each of which gives decodes a partial result.
        merges_in_prefill: whether it gives those of a prefill too.
    """

    decode: Tiling
    shared: Tiling
    prefill: Tiling
    splits: SplitRule
    merges_in_prefill: bool

    @property
    def prefill_splits(self) -> SplitRule | None:
        return self.splits if self.merges_in_prefill else None


# All tables are keyed by the width of a head in registers, `tile_dim`.
_DECODE: Final = {
    64: Tiling(16, 128, 4, 5, 168),
    128: Tiling(16, 64, 4, 5, 168),
    256: Tiling(16, 32, 4, 5, None),
}
_PREFILL: Final = {
    64: Tiling(128, 128, 8, 5),
    128: Tiling(128, 64, 8, 5),
    256: Tiling(128, 32, 8, 5),
}
# Where each warp multiplies matrices alone.
_PREFILL_WARP_MMA: Final = {
    64: Tiling(128, 64, 8, 5),
    128: Tiling(64, 64, 8, 5),
    256: Tiling(64, 32, 8, 5),
}
# For both prefill and decode: the widest that leaves registers for two results, and for which
# decodes are not compute-bound.
_UNIFORM: Final = {
    64: Tiling(64, 64, 8, 3),
    128: Tiling(64, 64, 8, 5),
    256: Tiling(32, 64, 8, 3),
}
# Stages of prefill with them where each warp multiplies matrices alone: more leave too few
# registers. The order of sums does not depend on stages.
_UNIFORM_STAGES_WARP_MMA: Final = {64: 3, 128: 2, 256: 3}
# fp8 numbers are converted to longer types in registers, which leaves fewer of them.
_DECODE_FP8: Final = {
    64: Tiling(16, 128, 4, 5),
    128: Tiling(16, 64, 4, 5),
    256: Tiling(16, 32, 4, 5),
}
_PREFILL_FP8: Final = {**_PREFILL, 256: Tiling(64, 32, 8, 5)}
_PREFILL_FP8_WARP_MMA: Final = {**_PREFILL_WARP_MMA, 256: Tiling(64, 32, 8, 3)}
_UNIFORM_FP8: Final = {**_UNIFORM, 256: Tiling(32, 32, 8, 5)}
# Without matrix instructions; float32 is for checking models.
_FLOAT32: Final = {
    64: Tiling(32, 32, 4, 3),
    128: Tiling(16, 32, 8, 2),
    256: Tiling(16, 16, 8, 3),
}


def choose_tiling(
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    num_kv_heads: int,
    gpu: Gpu = H100,
    deterministic: bool = False,
) -> AttentionTiling:
    """Returns the tilings for a model, which fit the shared memory of the GPU.

    Args:
        dtype, cache_dtype: dtype of the queries, and of K and V.
        deterministic: whether a token's output has to be bitwise the same in decode and prefill,
            for any content of its chunk.
    """
    dim, is_fp8 = tile_dim(head_dim), cache_dtype == torch.float8_e4m3fn
    splits = DETERMINISTIC_SPLITS
    if not deterministic:
        splits = SplitRule(_LEAST_SPLIT, max(_MOST_PROGRAMS // num_kv_heads, 1))
    uniform = (_UNIFORM_FP8 if is_fp8 else _UNIFORM)[dim]
    if dtype == torch.float32:
        uniform = _FLOAT32[dim]
    uniform = _fitting(uniform, dim, dtype, cache_dtype, gpu)
    if deterministic or dtype == torch.float32:
        prefill = uniform
        if not gpu.accumulates_in_groups:
            stages = min(uniform.num_stages, _UNIFORM_STAGES_WARP_MMA[dim])
            prefill = replace(uniform, num_stages=stages)
        return AttentionTiling(uniform, uniform, prefill, splits, deterministic)
    decode = (_DECODE_FP8 if is_fp8 else _DECODE)[dim]
    prefill = (_PREFILL_FP8 if is_fp8 else _PREFILL)[dim]
    if not gpu.accumulates_in_groups:
        prefill = (_PREFILL_FP8_WARP_MMA if is_fp8 else _PREFILL_WARP_MMA)[dim]
    return AttentionTiling(
        _fitting(decode, dim, dtype, cache_dtype, gpu),
        uniform,
        _fitting(prefill, dim, dtype, cache_dtype, gpu),
        splits,
        False,
    )


def _fitting(
    tiling: Tiling, dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, gpu: Gpu
) -> Tiling:
    """Returns the tiling with as much prefetch as the shared memory of the GPU has room for."""
    query = tiling.rows * (dim + tiling.keys) * dtype.itemsize  # and the weights of its keys
    tile = 2 * tiling.keys * dim * cache_dtype.itemsize  # K and V
    num_tiles = max(0, (gpu.shared_memory - query - _SMALL_BYTES) // tile)
    return replace(tiling, num_stages=min(tiling.num_stages, 2 * num_tiles + 1))


@functools.cache
def tile_dim(head_dim: int) -> int:
    return int(triton.next_power_of_2(head_dim))
