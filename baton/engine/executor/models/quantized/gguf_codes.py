"""Codes of GGUF's tensors: the types whose numbers are codes times a scale of their group.

The layouts of blocks are those of the package `gguf` (`gguf.quants`), whose `dequantize` gives the
same numbers, bit for bit.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
import torch
from gguf.quants import IQ4_NL, MXFP4, Q4_K

from baton.models.gguf.header import GgufTensor
from baton_kernels.cpu.quantized_weight import INTEGERS, QuantizedWeight, halves_of

_UNSIGNED: Final = torch.arange(16.0)


class _Groups(NamedTuple):
    """Contents of blocks, `[rows, num_blocks, n]` each: codes and, of the groups of a block, scales
    and minima."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None


def has_codes(tensor: GgufTensor) -> bool:
    """Returns whether a tensor of a file is a matrix of a type that has codes."""
    return tensor.stored_as.name in CODED_TYPES and len(tensor.shape) == 2


def codes_of_tensor(tensor: GgufTensor) -> QuantizedWeight:
    """Returns a matrix that `has_codes`, in codes."""
    read, codebook = CODED_TYPES[tensor.stored_as.name]
    num_rows, num_inputs = tensor.shape
    kind = tensor.stored_as
    num_blocks = num_inputs // kind.block_size
    stored = np.fromfile(
        tensor.file, np.uint8, num_rows * num_blocks * kind.block_bytes, offset=tensor.start
    )
    groups = read(torch.from_numpy(stored).view(num_rows, num_blocks, kind.block_bytes))
    codes = groups.codes.flatten(1)
    minima = None if groups.minima is None else groups.minima.flatten(1)
    packed = codes.view(torch.int8) if codebook is None else halves_of(codes)
    return QuantizedWeight(packed, groups.scales.flatten(1), minima, codebook)


def _q4_0(blocks: torch.Tensor) -> _Groups:
    return _Groups(_fours(blocks[..., 2:], 16), _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> _Groups:
    return _Groups(_fours(blocks[..., 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> _Groups:
    return _Groups(_fives(blocks[..., 2:6], blocks[..., 6:]) - 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> _Groups:
    codes = _fives(blocks[..., 4:8], blocks[..., 8:])
    return _Groups(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> _Groups:
    return _Groups(blocks[..., 2:], _half(blocks, 0))


def _q4_k(blocks: torch.Tensor) -> _Groups:
    return _Groups(_fours(blocks[..., 16:], 32), *_scales_and_minima(blocks))


def _q5_k(blocks: torch.Tensor) -> _Groups:
    high = _bits(blocks[..., 16:48], 1, 32)
    return _Groups(_fours(blocks[..., 48:], 32) | high << 4, *_scales_and_minima(blocks))


def _q6_k(blocks: torch.Tensor) -> _Groups:
    high = _bits(blocks[..., 128:192], 2, 32)
    scales = blocks[..., 192:208].view(torch.int8).float()
    return _Groups((_fours(blocks[..., :128], 64) | high << 4) - 32, _half(blocks, 208) * scales)


def _mxfp4(blocks: torch.Tensor) -> _Groups:
    scales = MXFP4.e8m0_to_fp32_half(blocks[..., :1].numpy())
    return _Groups(_fours(blocks[..., 1:], 16), torch.from_numpy(scales))


CODED_TYPES: Final[Mapping[str, tuple[Callable[[torch.Tensor], _Groups], torch.Tensor | None]]] = {
    "Q4_0": (_q4_0, INTEGERS),
    "Q4_1": (_q4_1, _UNSIGNED),
    "Q5_0": (_q5_0, None),
    "Q5_1": (_q5_1, None),
    "Q8_0": (_q8_0, None),
    "Q4_K": (_q4_k, _UNSIGNED),
    "Q5_K": (_q5_k, None),
    "Q6_K": (_q6_k, None),
    "IQ4_NL": (_q4_0, torch.tensor(IQ4_NL.kvalues, dtype=torch.float32)),
    "MXFP4": (_mxfp4, torch.tensor(MXFP4.kvalues, dtype=torch.float32)),
}
"""By the name of a type: what reads its blocks, and what codes of 4 bits stand for."""


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Returns the float16 at an offset of each block, in float32: `[rows, num_blocks, 1]`."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _bits(stored: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Returns integers of a few bits: of each `width` bytes first those in the lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    parts: torch.Tensor = stored.unflatten(-1, (-1, 1, width)) >> shifts
    return parts.bitwise_and_(2**bits - 1).flatten(-3)


def _fours(stored: torch.Tensor, width: int) -> torch.Tensor:
    return _bits(stored, 4, width)


def _fives(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Returns 32 integers of 5 bits, of which the highest are apart, one after the other."""
    return _fours(low, 16) | _bits(high, 1, 1) << 4


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns those of the 8 groups of 256 numbers: 6 bits of each, times a float16 of all."""
    packed = blocks[..., 4:16].reshape(-1, 12).numpy()
    scales, minima = (
        torch.from_numpy(each).view(*blocks.shape[:2], -1).float()
        for each in Q4_K.get_scale_min(packed)
    )
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)
