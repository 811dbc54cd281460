"""Batch-invariant matrix products of a mixture of experts (MoE).

The pairs (token, expert) are sorted by expert and padded so that a tile of rows has one expert. As
in `linear`, tiles are fixed, and so is the order of every sum. There is no host synchronization:
the number of tiles is the maximum possible, and excess tiles do nothing.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.launch import FLOATS, TRITON_TYPES, check_dtype, check_packed, check_shape
from baton_kernels.rows.linear import block_k, product
from baton_kernels.variant import Variant

FP_FUSION: Final = True
BLOCK_ROWS: Final = 64
_BLOCK_COLUMNS: Final = 128
_COMBINE_BLOCK: Final = 1024


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing of tokens to experts, for one layer and step.

    Attributes:
        pairs: int32 `[num_tiles * BLOCK_ROWS]`, indices `token * experts_per_token + choice` sorted
            by expert; `num_pairs` for padding of a tile.
        experts: int32 `[num_tiles]`, expert of each tile; `num_experts` for excess tiles.
        num_pairs: tokens times experts per token.
        experts_per_token: number of experts per token.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    num_pairs: int
    experts_per_token: int


def route(chosen: torch.Tensor, num_experts: int) -> Routing:
    """Sorts pairs by expert, without host synchronization.

    Args:
        chosen: `[num_tokens, experts_per_token]` of an integer type, each in [0, num_experts).
    """
    device, num_pairs = chosen.device, chosen.numel()
    num_tiles = triton.cdiv(num_pairs, BLOCK_ROWS) + min(num_experts, num_pairs)
    by_expert, order = chosen.flatten().long().sort(stable=True)
    begins = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=device))
    tiles = (begins.diff() + BLOCK_ROWS - 1) // BLOCK_ROWS
    last_tiles = tiles.cumsum(0)
    within = torch.arange(num_pairs, device=device) - begins[by_expert]
    places = (last_tiles - tiles)[by_expert] * BLOCK_ROWS + within
    pairs = torch.full((num_tiles * BLOCK_ROWS,), num_pairs, dtype=torch.int32, device=device)
    pairs[places] = order.int()
    every = torch.arange(num_tiles, device=device)
    experts = torch.searchsorted(last_tiles, every, right=True).int()
    return Routing(pairs, experts, num_pairs, chosen.shape[1])


@triton.jit(do_not_specialize=["num_pairs"])
def _experts_kernel(
    x, weight, bias, out, pairs, experts, x_stride, expert_stride, weight_stride, out_stride,
    num_pairs, num_columns, depth, num_experts, pairs_per_row,
    HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes one tile: up to `BLOCK_ROWS` pairs of one expert, `BLOCK_COLUMNS` of its weight."""
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < num_experts:
        chosen = tl.load(pairs + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
        columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        is_column = columns < num_columns
        # Rows and columns beyond the end repeat existing ones, and are not stored.
        rows = (tl.minimum(chosen, num_pairs - 1) // pairs_per_row).to(tl.int64)
        weight_rows = expert * expert_stride + (columns % num_columns).to(tl.int64) * weight_stride
        total = product(
            x + rows * x_stride, weight + weight_rows, 0, depth,
            IS_EVEN, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + expert * num_columns + columns, is_column, 0.0).to(tl.float32)
        places = out + chosen.to(tl.int64) * out_stride + columns
        tl.store(places, total.to(out.dtype.element_ty), (chosen < num_pairs) & is_column)


@triton.jit
def _combine_kernel(
    x, weights, out, x_stride, out_stride, width, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds `BLOCK` columns of one token's weighted expert results, in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        part = tl.load(x + pair * x_stride + columns, inside, 0.0).to(tl.float32)
        total += part * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), inside)


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns each pair's row times its expert's weight, plus its bias, `[num_pairs, num_columns]`,
    in the order of the tokens; each row is bitwise the same in any batch.

    Args:
        x: `[num_tokens, depth]`, or `[num_pairs, depth]` with a row for each pair; rows may be
            strided.
        weight: `[num_experts, num_columns, depth]` of the dtype of `x`, contiguous.
        routing: routing of these tokens to these experts.
        bias: `[num_experts, num_columns]` of any float type, contiguous.
    """
    num_experts, num_columns, depth = weight.shape
    _check(x, weight, routing, bias)
    out = torch.empty(routing.num_pairs, num_columns, dtype=x.dtype, device=x.device)
    if routing.num_pairs:
        grid = (triton.cdiv(num_columns, _BLOCK_COLUMNS), len(routing.experts))
        _experts_kernel[grid](
            x, weight, x if bias is None else bias, out, routing.pairs, routing.experts,
            x.stride(0), weight.stride(0), weight.stride(1), out.stride(0),
            routing.num_pairs, num_columns, depth, num_experts, routing.num_pairs // len(x),
            **_constants(x.dtype, depth, bias is not None),
            **_stages(x.dtype),
            enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return out


def combine_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of each token's expert results: `[num_tokens, width]`.

    Args:
        x: `[num_pairs, width]`, as `expert_linear` returns it.
        weights: `[num_tokens, experts_per_token]` of any float type, contiguous.
    """
    num_tokens, choices = weights.shape
    width = x.shape[1]
    check_dtype("x", x, *FLOATS)
    check_shape("x", x, (num_tokens * choices, width))
    check_packed("x", x)
    check_packed("weights", weights, 2)
    out = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    if num_tokens:
        _combine_kernel[(num_tokens, triton.cdiv(width, _COMBINE_BLOCK))](
            x, weights, out, x.stride(0), out.stride(0), width,
            CHOICES=choices, BLOCK=_COMBINE_BLOCK, num_warps=4, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return out


def reference_expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    chosen: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `expert_linear` in torch, in the dtype of `x`; `chosen` as in `route`."""
    rows = x.repeat_interleave(chosen.numel() // len(x), dim=0)
    experts = chosen.flatten().long()
    products: torch.Tensor = weight[experts] @ rows[..., None]
    return products[..., 0] if bias is None else products[..., 0] + bias[experts]


def reference_combine_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Computes `combine_experts` in torch, in the dtype of `x`."""
    total: torch.Tensor = (x.unflatten(0, weights.shape) * weights[..., None]).sum(1)
    return total


def _check(
    x: torch.Tensor, weight: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> None:
    num_experts, num_columns, depth = weight.shape
    check_dtype("x", x, *FLOATS)
    check_dtype("weight", weight, x.dtype)
    check_packed("weight", weight, 3)
    num_tokens = routing.num_pairs // routing.experts_per_token
    if len(x) not in (num_tokens, routing.num_pairs):
        raise ValueError(
            f"x has {len(x)} rows; must have one for each of {num_tokens} tokens, or one for each "
            f"of their {routing.num_pairs} experts' results"
        )
    check_shape("x", x, (len(x), depth))
    check_packed("x", x)
    if bias is not None:
        check_shape("bias", bias, (num_experts, num_columns))
        check_packed("bias", bias, 2)


def _constants(dtype: torch.dtype, depth: int, has_bias: bool) -> dict[str, Any]:
    return {
        "HAS_BIAS": has_bias,
        "IS_EVEN": depth % block_k(dtype) == 0,
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_COLUMNS": _BLOCK_COLUMNS,
        "BLOCK_K": block_k(dtype),
    }


def _stages(dtype: torch.dtype) -> dict[str, Any]:
    return {"num_warps": 4, "num_stages": 1 if dtype == torch.float32 else 4}


def _variant(dtype: torch.dtype) -> Variant:
    name, constants = TRITON_TYPES[dtype], _constants(dtype, 4096, True)
    strides = ("x_stride", "expert_stride", "weight_stride", "out_stride")
    return Variant(
        name=f"expert_linear {name}",
        kernel=_experts_kernel,
        signature=dict.fromkeys(("x", "weight", "bias", "out"), f"*{name}")
        | dict.fromkeys(("pairs", "experts"), "*i32")
        | dict.fromkeys(strides, "i32")
        | dict.fromkeys(("num_columns", "depth"), "i32:16")
        | dict.fromkeys(("num_pairs", "num_experts", "pairs_per_row"), "i32"),
        constants=constants,
        needs_mma="bf16" if dtype == torch.bfloat16 else None,
        **_stages(dtype),
    )


def _combine_variant(dtype: torch.dtype) -> Variant:
    return Variant(
        name=f"combine_experts {TRITON_TYPES[dtype]}",
        kernel=_combine_kernel,
        signature=dict.fromkeys(("x", "weights", "out"), f"*{TRITON_TYPES[dtype]}")
        | {"x_stride": "i32", "out_stride": "i32", "width": "i32:16"},
        constants={"CHOICES": 8, "BLOCK": _COMBINE_BLOCK},
        num_warps=4,
        num_stages=1,
    )


VARIANTS: Final = (*map(_variant, FLOATS), *map(_combine_variant, FLOATS))
