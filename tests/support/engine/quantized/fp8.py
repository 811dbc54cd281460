"""Weights in FP8, as they are published."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.support.engine.quantized.written import Format, Tensors

_E4M3, _E4M3_LARGEST = torch.float8_e4m3fn, 448


def _fp8_blocks(weight: torch.Tensor, size: int = 8) -> tuple[Tensors, torch.Tensor]:
    """In FP8 with a scale for each block of `size` x `size`, the last ones cut off."""
    scale = torch.nn.functional.max_pool2d(weight.abs()[None], size, ceil_mode=True)[0]
    spread = scale.repeat_interleave(size, 0).repeat_interleave(size, 1) / _E4M3_LARGEST
    spread = spread[: weight.shape[0], : weight.shape[1]]
    packed = (weight / spread).to(_E4M3)
    scales = scale / _E4M3_LARGEST
    return {".weight": packed, ".weight_scale_inv": scales}, packed.float() * spread


def _fp8(
    ends: str, axes: tuple[int, ...]
) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    """In FP8 with a scale of all numbers along `axes`, which is named by `ends`."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = weight.abs().amax(axes, keepdim=len(axes) == 1) / _E4M3_LARGEST
        packed = (weight / scale).to(_E4M3)
        unused = {".input_scale": torch.ones(())}
        return {".weight": packed, ends: scale, **unused}, packed.float() * scale

    return pack


def _mxfp8(weight: torch.Tensor, size: int = 32) -> tuple[Tensors, torch.Tensor]:
    """In FP8 with an exponent of two for each `size` numbers of a row."""
    blocks = weight.unflatten(-1, (-1, size))
    exponents = (blocks.abs().amax(-1) / _E4M3_LARGEST).log2().ceil()
    packed = (blocks / exponents.exp2()[..., None]).to(_E4M3)
    values = (packed.float() * exponents.exp2()[..., None]).flatten(-2)
    scales = (exponents + 127).to(torch.uint8)
    return {".weight": packed.flatten(-2), ".weight_scale_inv": scales}, values


def _blocks(size: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size] * 2}


_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}

FORMATS: dict[str, Format] = {
    "fp8 in blocks": Format(_blocks(8), _fp8_blocks),
    "fp8 in cut blocks": Format(_blocks(40), partial(_fp8_blocks, size=40)),
    "fp8 as a whole": Format(_FP8, _fp8(".weight_scale_inv", (0, 1))),
    "fp8 by vLLM": Format(_FP8, _fp8(".weight_scale", (0, 1))),
    "modelopt fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8(".weight_scale", (0, 1))
    ),
    "fbgemm": Format({"quant_method": "fbgemm_fp8"}, _fp8(".weight_scale", (1,))),
    "mxfp8": Format(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, _mxfp8
    ),
}
