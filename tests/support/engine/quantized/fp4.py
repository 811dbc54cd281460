"""Weights in FP4, as gpt-oss has its experts, and by modelopt."""

import torch

from tests.support.engine.quantized.written import Format, Tensors

_POSITIVE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST = 6.0


def _codes(values: torch.Tensor) -> torch.Tensor:
    """The code of the nearest number: three bits, and the sign before them."""
    magnitude = (values.abs()[..., None] - _POSITIVE).abs().argmin(-1)
    return magnitude + 8 * (values < 0)


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    return _POSITIVE[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def _nvfp4(weight: torch.Tensor, size: int = 16) -> tuple[Tensors, torch.Tensor]:
    blocks = weight.unflatten(-1, (-1, size))
    of_all = weight.abs().max() / (_LARGEST * 448)
    scale = (blocks.abs().amax(-1) / _LARGEST / of_all).to(torch.float8_e4m3fn)
    spread = (scale.float() * of_all)[..., None]
    codes = _codes(blocks / spread)
    stored = {
        ".weight": _pairs(codes.flatten(-2)),
        ".weight_scale": scale,
        ".weight_scale_2": of_all,
        ".input_scale": torch.ones(()),
    }
    return stored, (_numbers(codes) * spread).flatten(-2)


def _experts(weight: torch.Tensor, size: int = 32) -> tuple[Tensors, torch.Tensor]:
    """Experts of gpt-oss, `[experts, inputs, outputs]`, in blocks of inputs."""
    blocks = weight.transpose(1, 2).unflatten(-1, (-1, size))
    exponents = (blocks.abs().amax(-1) / _LARGEST).log2().ceil()
    codes = _codes(blocks / exponents.exp2()[..., None])
    values = (_numbers(codes) * exponents.exp2()[..., None]).flatten(-2)
    stored = {"_blocks": _pairs(codes), "_scales": (exponents + 127).to(torch.uint8)}
    return stored, values.transpose(1, 2)


def _is_of_experts(name: str, weight: torch.Tensor) -> bool:
    return "experts" in name and weight.dim() == 3


FORMATS: dict[str, Format] = {
    "modelopt nvfp4": Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4),
}
MXFP4 = {"mxfp4": Format({"quant_method": "mxfp4"}, _experts, _is_of_experts)}
