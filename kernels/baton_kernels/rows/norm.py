"""RMSNorm, alone and fused with the addition to the residual stream.

A row is one program, whose computation depends on the width alone: batch-invariant, so that the
deterministic mode needs no other norm. Memory traffic per element: one read and one write, and with
a residual two of each.
"""

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.dependent_launch import dependent_launch, wait_for_kernel_before
from baton_kernels.launch import FLOATS, TRITON_TYPES, check_dtype, check_packed, check_shape
from baton_kernels.variant import Variant

FP_FUSION: Final = True
MAX_WIDTH: Final = 32768


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    out_stride,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Normalises one row. With a residual, writes the sum into it and normalises the sum."""
    wait_for_kernel_before(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + row * x_stride + columns, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = residual + row * residual_stride + columns
        values += tl.load(stream, inside, 0.0).to(tl.float32)
        # Normalises the rounded sum that is stored, as separate operations in that dtype would.
        rounded = values.to(residual.dtype.element_ty)
        tl.store(stream, rounded, inside)
        values = rounded.to(tl.float32)
    variance = tl.sum(values * values, axis=0) / width
    normed = values * tl.rsqrt(variance + eps)
    scaled = normed * tl.load(weight + columns, inside, 0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, scaled.to(out.dtype.element_ty), inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight of each row, with sums in float32.

    Args:
        x: `[num_rows, width]`, rows may be strided.
        weight: `[width]`, of any float type.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds `x` to `residual` in place and returns the norm of the sum.

    Args:
        x, residual: `[num_rows, width]` of one dtype; rows may be strided.
        weight: `[width]`.
    """
    check_shape("residual", residual, tuple(x.shape))
    check_dtype("residual", residual, x.dtype)
    check_packed("residual", residual)
    return _launch(x, residual, weight, eps)


def reference_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes `rms_norm` in torch, in the dtype of `x`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    num_rows, width = x.shape
    check_dtype("x", x, *FLOATS)
    check_packed("x", x)
    check_shape("weight", weight, (width,))
    check_packed("weight", weight)
    if width > MAX_WIDTH:
        raise ValueError(f"x has rows of {width}; a norm spans at most {MAX_WIDTH}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows:
        stream = out if residual is None else residual
        _rms_norm_kernel[(num_rows,)](
            x,
            stream,
            weight,
            out,
            x.stride(0),
            stream.stride(0),
            out.stride(0),
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            **_shape(width),
            **dependent_launch(x.device),
            enable_fp_fusion=FP_FUSION,
        )
    return out


@functools.cache
def _shape(width: int) -> Mapping[str, Any]:
    """Returns block size and launch options of a program; they depend on the width alone."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16), "num_stages": 1}


def _variant(
    dtype: torch.dtype, width: int, has_residual: bool, weight: torch.dtype | None = None
) -> Variant:
    pointer, weight = f"*{TRITON_TYPES[dtype]}", weight or dtype
    shape = _shape(width)
    types = " by ".join(TRITON_TYPES[of] for of in dict.fromkeys((dtype, weight)))
    return Variant(
        name=f"{'add_' * has_residual}rms_norm {types} {width}",
        kernel=_rms_norm_kernel,
        signature=dict.fromkeys(("x", "residual", "out"), pointer)
        | {"weight": f"*{TRITON_TYPES[weight]}"}
        | dict.fromkeys(("x_stride", "residual_stride", "out_stride"), "i32")
        | {"width": "i32:16", "eps": "fp32"},
        constants={"HAS_RESIDUAL": has_residual, "BLOCK": shape["BLOCK"]},
        num_warps=shape["num_warps"],
        num_stages=shape["num_stages"],
    )


VARIANTS: Final = (
    *(_variant(dtype, 4096, True) for dtype in FLOATS),
    _variant(torch.bfloat16, 4096, False),
    _variant(torch.bfloat16, 4096, False, torch.float32),
    _variant(torch.bfloat16, 16384, True),
)
