"""KV block copy, many blocks per launch: within a pool, and between it and pinned host memory.

Pinned memory is in the GPU's address space, so that swapping uses the same kernel as copy-on-write,
with loads or stores that cross the bus.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from baton_kernels.launch import check_dtype, check_packed, check_shape, host_runs_kernels
from baton_kernels.variant import Variant

FP_FUSION: Final = True
UNIT: Final = 16  # bytes that one thread moves per access
_TILE: Final = 4096  # words of 4 bytes that one program has in flight
_NUM_WARPS: Final = 8


@triton.jit
def _copy_kernel(
    source, target, pairs, source_stride, target_stride, num_units, TILE: tl.constexpr
):
    """Copies `TILE` words of one block; reads and writes each once."""
    pair = tl.program_id(0).to(tl.int64)
    origin = tl.load(pairs + 2 * pair)
    goal = tl.load(pairs + 2 * pair + 1)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    # The factors of 4 let the compiler infer 16-byte accesses for any block size.
    inside = words < num_units * 4
    values = tl.load(source + origin * (source_stride * 4) + words, inside)
    tl.store(target + goal * (target_stride * 4) + words, values, inside)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies whole blocks.

    A target must be neither a source nor another pair's target, since the order of reads and writes
    is undefined. Returns after the copy is enqueued; host memory may be read or reused after the
    stream has completed it.

    Args:
        source, target: uint8 `[num_blocks, block_bytes]`, blocks contiguous, of a multiple of 16
            bytes. At least one is on the device; the other may be in pinned host memory. They may
            be the same tensor.
        pairs: int64 `[num_pairs, 2]`: (block of `source`, block of `target`). On the device: host
            memory may be freed and reused before the kernel has read it.
    """
    block_bytes = source.shape[-1]
    check_shape("target", target, (len(target), block_bytes))
    check_shape("pairs", pairs, (len(pairs), 2))
    check_dtype("pairs", pairs, torch.int64)
    check_packed("pairs", pairs, 2)
    for name, pool in (("source", source), ("target", target)):
        _check_pool(name, pool)
    if not host_runs_kernels():
        _check_reach(source=source, target=target, pairs=pairs)
    if len(pairs) and block_bytes:
        _copy_kernel[(len(pairs), triton.cdiv(block_bytes, 4 * _TILE))](
            source.view(torch.int32),
            target.view(torch.int32),
            pairs,
            source.stride(0) // UNIT,
            target.stride(0) // UNIT,
            block_bytes // UNIT,
            TILE=_TILE,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=FP_FUSION,
        )


def reference_copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Computes `copy_blocks` in torch."""
    origins, goals = pairs.unbind(1)
    target[goals.to(target.device)] = source[origins.to(source.device)].to(target.device)


def _check_pool(name: str, pool: torch.Tensor) -> None:
    check_dtype(name, pool, torch.uint8)
    check_packed(name, pool)
    for what, value in (("block_bytes", pool.shape[1]), ("stride", pool.stride(0))):
        if value % UNIT:
            raise ValueError(
                f"{name} has a {what} of {value}; must be a multiple of {UNIT}: choose a block "
                "size, head size or type with which a block is"
            )


def _check_reach(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Raises `ValueError` unless the kernel can access every tensor for as long as it runs."""
    if not (source.is_cuda or target.is_cuda):
        raise ValueError("source and target are both in host memory; copy those with torch")
    for name, pool in (("source", source), ("target", target)):
        if not pool.is_cuda and not pool.is_pinned():
            raise ValueError(
                f"{name} is in pageable memory, which the GPU cannot reach: allocate it with "
                "pin_memory=True"
            )
    if not pairs.is_cuda:
        raise ValueError("pairs is in host memory, which may be reused before the kernel reads it")


VARIANTS: Final = (
    Variant(
        name="copy_blocks",
        kernel=_copy_kernel,
        signature=dict.fromkeys(("source", "target"), "*i32")
        | {"pairs": "*i64"}
        | dict.fromkeys(("source_stride", "target_stride", "num_units"), "i32"),
        constants={"TILE": _TILE},
        num_warps=_NUM_WARPS,
        num_stages=1,
    ),
)
