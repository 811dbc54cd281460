"""SwiGLU activations of a gated MLP whose gate and up projections are one matrix product.

SiLU-and-multiply, and its clamped form of gpt-oss.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.dependent_launch import dependent_launch, wait_for_kernel_before
from baton_kernels.launch import FLOATS, TRITON_TYPES, check_dtype, check_packed
from baton_kernels.variant import Variant

FP_FUSION: Final = True
_BLOCK: Final = 1024
_NUM_WARPS: Final = 4


@triton.jit
def _silu_and_multiply_kernel(
    gate_up, out, gate_up_stride, out_stride, width,
    BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes a part of one row: reads `BLOCK` of gate and of up, writes `BLOCK`."""
    wait_for_kernel_before(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = gate_up + row * gate_up_stride
    gate = tl.load(start + columns, inside, 0.0).to(tl.float32)
    up = tl.load(start + width + columns, inside, 0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), inside)


@triton.jit
def _clamped_swiglu_kernel(
    gate_up, out, gate_up_stride, out_stride, width, steepness, limit,
    BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes a part of one row, as above."""
    wait_for_kernel_before(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = gate_up + row * gate_up_stride
    gate = tl.minimum(tl.load(start + columns, inside, 0.0).to(tl.float32), limit)
    up = tl.load(start + width + columns, inside, 0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    result = gate * tl.sigmoid(gate * steepness) * (up + 1.0)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), inside)


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, computed in float32: `[num_rows, width]`.

    Args:
        gate_up: `[num_rows, 2 * width]`, the gate first; rows may be strided.
    """
    return _launch(_silu_and_multiply_kernel, gate_up)


def clamped_swiglu(gate_up: torch.Tensor, steepness: float, limit: float) -> torch.Tensor:
    """Returns gate * sigmoid(steepness * gate) * (up + 1) with gate clamped to at most `limit` and
    up to [-limit, limit], computed in float32: `[num_rows, width]`.

    Args: as in `silu_and_multiply`.
    """
    return _launch(_clamped_swiglu_kernel, gate_up, steepness, limit)


def reference_silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes `silu_and_multiply` in torch, in the dtype of `gate_up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def reference_clamped_swiglu(gate_up: torch.Tensor, steepness: float, limit: float) -> torch.Tensor:
    """Computes `clamped_swiglu` in torch, in the dtype of `gate_up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(steepness * gate) * (up + 1)


def _launch(kernel: Any, gate_up: torch.Tensor, *parameters: float) -> torch.Tensor:
    num_rows, twice = gate_up.shape
    if twice % 2:
        raise ValueError(f"gate_up has {twice} columns; must have gate and up, equally many each")
    check_dtype("gate_up", gate_up, *FLOATS)
    check_packed("gate_up", gate_up)
    width = twice // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, gate_up.stride(0), out.stride(0), width, *parameters,
            BLOCK=_BLOCK, num_warps=_NUM_WARPS, enable_fp_fusion=FP_FUSION,
            **dependent_launch(gate_up.device),
        )  # fmt: skip
    return out


def _variant(dtype: torch.dtype, is_clamped: bool) -> Variant:
    pointer = f"*{TRITON_TYPES[dtype]}"
    return Variant(
        name=f"{'clamped_swiglu' if is_clamped else 'silu_and_multiply'} {TRITON_TYPES[dtype]}",
        kernel=_clamped_swiglu_kernel if is_clamped else _silu_and_multiply_kernel,
        signature={
            "gate_up": pointer,
            "out": pointer,
            "gate_up_stride": "i32",
            "out_stride": "i32",
            "width": "i32:16",
        }
        | ({"steepness": "fp32", "limit": "fp32"} if is_clamped else {}),
        constants={"BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


VARIANTS: Final = tuple(
    _variant(dtype, is_clamped) for is_clamped in (False, True) for dtype in FLOATS
)
