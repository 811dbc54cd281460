"""Weights in FP8, with a scale for the whole, for each row, or for each block of it.

As DeepSeek V3 and Qwen 3 are published (`weight_scale_inv`, blocks of 128 x 128), as
compressed-tensors, modelopt and fbgemm write them (`weight_scale`), and in MXFP8, where the scales
of 32 numbers are powers of two.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from baton.engine.executor.models.quantized.packing import MAIN, Packing, Parts
from baton_kernels.cpu.quantized_weight import QuantizedWeight

FP8: Final = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALES: Final = ("_scale_inv", "_scale")
# DeepSeek V4 and Mistral name the scales of a layer without its weight.
_SCALES_OF_LAYERS: Final = (".scale", ".qscale_weight")
_EXPONENT_BIAS: Final = 127
_NAN: Final = 0x7F  # of e4m3, without its sign


def packings(settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packings of the methods fp8, mxfp8 and fbgemm_fp8."""
    block = _block(settings.get("weight_block_size"))
    in_blocks, coded = partial(unpack, block=block), partial(codes, block=block)
    return (
        Packing("", FP8, "", in_blocks, {"scale": _SCALES}, codes=coded),
        Packing(".weight", FP8, ".weight", in_blocks, {"scale": _SCALES_OF_LAYERS}, codes=coded),
    )


def unpack(parts: Parts, *, block: tuple[int, int] | None = None) -> torch.Tensor:
    """Returns a weight times its scales, in float32."""
    return scaled(parts[MAIN], exponents(parts["scale"]).float(), block)


def codes(parts: Parts, *, block: tuple[int, int] | None = None) -> QuantizedWeight | None:
    """Returns a matrix in codes; None for numbers of e5m2, or of blocks that end early in a row."""
    values, scale = parts[MAIN], exponents(parts["scale"]).float()
    if values.dim() != 2 or values.dtype != torch.float8_e4m3fn:
        return None
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale.reshape(len(scale), -1)
    num_rows, num_columns = _sizes(values.shape, scale.shape, block)
    has_nan = bool(((values.view(torch.uint8) & _NAN) == _NAN).any())
    if values.shape[1] != scale.shape[1] * num_columns or has_nan:
        return None
    return QuantizedWeight(values, scale.repeat_interleave(num_rows, dim=0)[: len(values)])


def scaled(
    values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None = None
) -> torch.Tensor:
    """Returns values times scales, in the dtype of `scale`.

    Args:
        values: `[..., rows, columns]`, of another dtype than `scale`.
        scale: one number; or one for each row of a matrix; or for each block, `[..., rows of
            blocks, columns of blocks]`, of which the last ones may be cut off.
        block: rows and columns of a block; None, or blocks that do not fit: they divide the values
            evenly.
    """
    values = values.to(scale.dtype)
    if scale.numel() == 1:
        return values.mul_(scale.reshape(()))
    if scale.dim() > values.dim():
        raise ValueError("the scales have more dimensions than the values")
    if scale.dim() < values.dim():
        scale = scale.reshape(*scale.shape, *(1,) * (values.dim() - scale.dim()))
    num_rows, num_columns = _sizes(values.shape, scale.shape, block)
    by_row = scale if scale.shape[-2] == 1 else scale.repeat_interleave(num_rows, dim=-2)
    by_row = by_row[..., : values.shape[-2], :]
    if scale.shape[-1] == 1:
        return values.mul_(by_row)
    if values.shape[-1] == scale.shape[-1] * num_columns:
        # The scales of whole blocks are not written out: they would take as much as the values.
        values.unflatten(-1, (-1, num_columns)).mul_(by_row[..., None])
        return values
    return values.mul_(by_row.repeat_interleave(num_columns, dim=-1)[..., : values.shape[-1]])


def _sizes(
    values: torch.Size, scales: torch.Size, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Returns rows and columns of the blocks that have a scale each."""
    if block is not None and all(
        -(-have // size) == count
        for have, size, count in zip(values[-2:], block, scales[-2:], strict=True)
    ):
        return block
    if any(have % count for have, count in zip(values[-2:], scales[-2:], strict=True)):
        raise ValueError("the scales do not divide the values")
    return values[-2] // scales[-2], values[-1] // scales[-1]


def exponents(scale: torch.Tensor) -> torch.Tensor:
    """Returns the powers of two that bytes stand for as exponents (E8M0); other scales as they
    are."""
    if scale.dtype != torch.uint8:
        return scale
    return (scale.float() - _EXPONENT_BIAS).exp2()


def _block(named: Any) -> tuple[int, int] | None:
    return (int(named[0]), int(named[1])) if named else None
