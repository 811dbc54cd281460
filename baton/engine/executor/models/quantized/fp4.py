"""Weights in FP4 (e2m1), two numbers a byte, with a scale for each block of a row.

MXFP4 has exponents of two for 32 numbers, as the experts of gpt-oss; NVFP4 has scales in FP8 for 16
numbers, and one more for the whole weight.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch

from baton.engine.executor.models.quantized.fp8 import exponents
from baton.engine.executor.models.quantized.packing import MAIN, Packing, Parts
from baton_kernels.cpu.quantized_weight import QuantizedWeight, halves_of

BYTES: Final = frozenset({"U8"})
_NUMBERS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODEBOOK: Final = (*_NUMBERS, *(-number for number in _NUMBERS))
_BYTES_TOGETHER: Final = 4  # whose codes are packed together


def mxfp4(_settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packing of the experts of gpt-oss."""
    return (Packing("_blocks", BYTES, "", _unpack_experts, {"scale": ("_scales",)}),)


def numbers(packed: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of bytes, the lower half of each first: float32, twice as many along the
    last dimension."""
    halves = torch.tensor(_CODEBOOK, device=packed.device)
    of_byte = torch.stack([halves.repeat(16), halves.repeat_interleave(16)], dim=-1)
    return torch.nn.functional.embedding(packed.int(), of_byte).flatten(-2)


def codes(packed: torch.Tensor, scale: torch.Tensor) -> QuantizedWeight | None:
    """Returns a matrix in codes; None if its inputs are not a multiple of those packed together.

    Args:
        packed: bytes, as of `numbers`.
        scale: float32, of each block of a row.
    """
    if packed.dim() != 2 or packed.shape[1] % _BYTES_TOGETHER:
        return None
    each = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return QuantizedWeight(halves_of(each), scale, codebook=torch.tensor(_CODEBOOK))


def codes_of_nvfp4(parts: Parts) -> QuantizedWeight | None:
    """Returns a weight by modelopt in codes."""
    return codes(parts[MAIN], parts["scale"].float() * parts["global_scale"].float())


def unpack_nvfp4(parts: Parts) -> torch.Tensor:
    """Returns a weight by modelopt, whose scales are multiplied by the scale of the whole."""
    return scaled_fp4(numbers(parts[MAIN]), parts["scale"].float() * parts["global_scale"].float())


def scaled_fp4(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns values times the scale of each block of a row."""
    if values.shape[:-1] != scale.shape[:-1]:
        raise ValueError("the scales have other rows than the values")
    values.unflatten(-1, (scale.shape[-1], -1)).mul_(scale[..., None])
    return values


def _unpack_experts(parts: Parts) -> torch.Tensor:
    """Returns `[experts, inputs, outputs]` of blocks `[experts, outputs, blocks, bytes]`."""
    scale = exponents(parts["scale"])
    if scale.shape != parts[MAIN].shape[:-1]:
        raise ValueError("the scales are not those of the blocks")
    values = numbers(parts[MAIN]).mul_(scale[..., None]).flatten(-2)
    return values.transpose(1, 2).contiguous()
