"""Batch-invariant linear layer: a row's result does not depend on the batch.

Library products choose tiles and splits, and so the order of sums, by the number of rows. Here
tiles are fixed, and the number of splits of K depends on the weight's shape alone. For few rows,
separate programs compute the splits in parallel and a second kernel adds them (split-K); for many,
one program computes all splits of a tile in sequence. Both add in the same order, so a row has
bitwise the same result in either.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.launch import (
    FLOATS,
    INTERPRETED,
    TRITON_TYPES,
    check_dtype,
    check_packed,
    check_shape,
)
from baton_kernels.variant import Variant

FP_FUSION: Final = True
_BLOCK: Final = 128  # rows and columns of a tile
_BLOCK_FLOAT32: Final = 64  # float32 does not use tensor cores
_GROUP: Final = 8  # adjacent tiles of rows, which share columns in the L2 cache
_ENOUGH_PROGRAMS: Final = 128
_MOST_SPLITS: Final = 8
_LEAST_SPLIT: Final = 512  # of K
_SUM_BLOCK: Final = 1024


@triton.jit
def product(
    x_rows, weight_rows, first, last, IS_EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns x @ weight.T over [first, last) of K in float32, `[BLOCK_ROWS, BLOCK_COLUMNS]`.

    `x_rows` `[BLOCK_ROWS, 1]` and `weight_rows` `[1, BLOCK_COLUMNS]` point to the first numbers of
    existing rows; `IS_EVEN`: all of K is a multiple of `BLOCK_K`. The order of the sum is always
    that of K.
    """
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    steps = tl.arange(0, BLOCK_K)
    for k in range(first, last, BLOCK_K):
        if IS_EVEN:
            a = tl.load(x_rows + (k + steps)[None, :])
            b = tl.load(weight_rows + (k + steps)[:, None])
        else:
            a = tl.load(x_rows + (k + steps)[None, :], (k + steps)[None, :] < last, 0.0)
            b = tl.load(weight_rows + (k + steps)[:, None], (k + steps)[:, None] < last, 0.0)
        if INTERPRETED:
            # In numpy's matrix product a row's last bits would depend on its place in the tile.
            a, b = a.to(tl.float32), b.to(tl.float32)
            total += tl.sum(a[:, :, None] * b[None, :, :], axis=1)
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x, weight, bias, out, x_stride, weight_stride, out_stride, num_rows, num_columns, depth,
    split_depth, NUM_SPLITS: tl.constexpr, IS_PARTIAL: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Computes one tile of the output; if `IS_PARTIAL`, one split of it, and `out` is
    `[NUM_SPLITS, rows, columns]`."""
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_columns, BLOCK_COLUMNS)
    group, member = (
        tl.program_id(0) // (GROUP * column_tiles),
        tl.program_id(0) % (GROUP * column_tiles),
    )
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    rows = (group * GROUP + member % height) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    columns = member // height * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    is_row, is_column = rows < num_rows, columns < num_columns
    # Rows and columns beyond the end repeat existing ones, and are not stored.
    x_rows = x + (rows % num_rows).to(tl.int64) * x_stride
    weight_rows = weight + (columns % num_columns).to(tl.int64) * weight_stride
    if IS_PARTIAL:
        split = tl.program_id(1)
        total = product(
            x_rows, weight_rows,
            split * split_depth, tl.minimum((split + 1) * split_depth, depth),
            IS_EVEN, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_K,
        )  # fmt: skip
        out += split.to(tl.int64) * num_rows * out_stride
    else:
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for split in range(NUM_SPLITS):
            total += product(
                x_rows, weight_rows,
                split * split_depth, tl.minimum((split + 1) * split_depth, depth),
                IS_EVEN, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_K,
            )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + columns, is_column, 0.0).to(tl.float32)
    places = out + rows.to(tl.int64) * out_stride + columns
    tl.store(places, total.to(out.dtype.element_ty), is_row & is_column)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(
    parts, bias, out, out_stride, num_rows, num_columns,
    NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the splits of `BLOCK` columns of a row, in their order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(parts + (split * num_rows + row) * num_columns + columns, inside, 0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, inside, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, total.to(out.dtype.element_ty), inside)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    enough_tiles: int = _ENOUGH_PROGRAMS,
) -> torch.Tensor:
    """Returns x @ weight.T + bias, each row bitwise the same in any batch:
    `[num_rows, num_columns]`. Sums are in float32; float32 inputs are not rounded to TF32.

    Args:
        x: `[num_rows, depth]`; rows may be strided.
        weight: `[num_columns, depth]` of the dtype of `x`; rows may be strided.
        bias: `[num_columns]` of any float type.
        enough_tiles: number from which on one program computes all splits of a tile.
    """
    num_rows, depth = x.shape
    num_columns = len(weight)
    _check(x, weight, bias)
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    num_splits, split_depth = splits(num_columns, depth, x.dtype)
    num_tiles = triton.cdiv(num_rows, _block(x.dtype)) * triton.cdiv(num_columns, _block(x.dtype))
    if not num_rows:
        return out
    is_partial = num_splits > 1 and num_tiles < enough_tiles
    target = out
    if is_partial:
        target = torch.empty(num_splits * num_rows, num_columns, device=x.device)
    given_bias = x if bias is None else bias
    _linear_kernel[(num_tiles, num_splits if is_partial else 1)](
        x, weight, given_bias, target, x.stride(0), weight.stride(0), target.stride(0),
        num_rows, num_columns, depth, split_depth,
        **_constants(x.dtype, depth, num_splits, is_partial, bias is not None),
        **_options(x.dtype),
        enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    if is_partial:
        _sum_kernel[(num_rows, triton.cdiv(num_columns, _SUM_BLOCK))](
            target, given_bias, out, out.stride(0), num_rows, num_columns,
            NUM_SPLITS=num_splits, HAS_BIAS=bias is not None, BLOCK=_SUM_BLOCK,
            num_warps=4, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return out


def splits(num_columns: int, depth: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the number of splits of K and the length of each; they depend on the weight's shape
    and dtype alone, so that every GPU gives the same result."""
    wanted = _ENOUGH_PROGRAMS // triton.cdiv(num_columns, _block(dtype))
    most = max(min(wanted, depth // _LEAST_SPLIT, _MOST_SPLITS), 1)
    block = block_k(dtype)
    split_depth = triton.cdiv(triton.cdiv(depth, most), block) * block
    return max(triton.cdiv(depth, split_depth), 1) if split_depth else 1, max(split_depth, block)


def _block(dtype: torch.dtype) -> int:
    return _BLOCK_FLOAT32 if dtype == torch.float32 else _BLOCK


def block_k(dtype: torch.dtype) -> int:
    """Returns the part of K that a program holds in shared memory: 128 bytes of each row."""
    return 128 // dtype.itemsize


def reference_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes `linear` in torch, in the dtype of `x`; not batch-invariant in its last bits."""
    return torch.nn.functional.linear(x, weight, bias)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check_dtype("x", x, *FLOATS)
    check_dtype("weight", weight, x.dtype)
    check_shape("weight", weight, (len(weight), x.shape[1]))
    check_packed("x", x)
    check_packed("weight", weight)
    if bias is not None:
        check_shape("bias", bias, (len(weight),))
        check_packed("bias", bias)


def _constants(
    dtype: torch.dtype, depth: int, num_splits: int, is_partial: bool, has_bias: bool
) -> dict[str, Any]:
    return {
        "NUM_SPLITS": num_splits,
        "IS_PARTIAL": is_partial,
        "HAS_BIAS": has_bias,
        "IS_EVEN": depth % block_k(dtype) == 0,
        "BLOCK_ROWS": _block(dtype),
        "BLOCK_COLUMNS": _block(dtype),
        "BLOCK_K": block_k(dtype),
        "GROUP": _GROUP,
    }


def _options(dtype: torch.dtype) -> dict[str, Any]:
    """Returns Triton's options. In float32 the assembler would spill for an occupancy of 3."""
    if dtype == torch.float32:
        return {"num_warps": 8, "num_stages": 1, "maxnreg": 128}
    return {"num_warps": 8, "num_stages": 3, "maxnreg": None}


def _variant(dtype: torch.dtype, is_partial: bool) -> Variant:
    name, constants = TRITON_TYPES[dtype], _constants(dtype, 4096, 4, is_partial, True)
    options = _options(dtype)
    strides = ("x_stride", "weight_stride", "out_stride")
    return Variant(
        name=f"linear {name}{' in parts' * is_partial}",
        kernel=_linear_kernel,
        signature=dict.fromkeys(("x", "weight", "bias"), f"*{name}")
        | {"out": "*fp32" if is_partial else f"*{name}", "num_rows": "i32"}
        | dict.fromkeys(strides, "i32")
        | dict.fromkeys(("num_columns", "depth", "split_depth"), "i32:16"),
        constants=constants,
        needs_mma="bf16" if dtype == torch.bfloat16 else None,
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        max_registers=options["maxnreg"],
    )


def _sum_variant(dtype: torch.dtype) -> Variant:
    return Variant(
        name=f"linear {TRITON_TYPES[dtype]}, sum of parts",
        kernel=_sum_kernel,
        signature={"parts": "*fp32", "num_rows": "i32", "num_columns": "i32:16"}
        | dict.fromkeys(("bias", "out"), f"*{TRITON_TYPES[dtype]}")
        | {"out_stride": "i32"},
        constants={"NUM_SPLITS": 4, "HAS_BIAS": True, "BLOCK": _SUM_BLOCK},
        num_warps=4,
        num_stages=1,
    )


VARIANTS: Final = (
    *(_variant(dtype, is_partial) for dtype in FLOATS for is_partial in (False, True)),
    *map(_sum_variant, FLOATS),
)
