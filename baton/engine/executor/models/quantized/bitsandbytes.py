"""Weights by bitsandbytes, in 8 bits with a scale for each row, and in 4 bits (NF4, FP4).

Four bits are indices of a table of 16 numbers, times the largest number of their block, which may
be quantized itself ("double quantization"). Values stay in float32, as its layers multiply them.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import torch

from baton.engine.executor.models.quantized.packing import MAIN, Packing, Parts
from baton_kernels.cpu.quantized_weight import QuantizedWeight, halves_of

_FLOAT32: Final = frozenset({"F32"})
_PLAIN: Final = ".weight"
_FOUR_BITS: Final = {
    "values": (".weight",),
    "largest": (".weight.absmax",),
    "state": (
        ".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4",
    ),
}  # fmt: skip
_DOUBLE: Final = {
    "largest_of_largest": (".weight.nested_absmax",),
    "table_of_largest": (".weight.nested_quant_map",),
}
_OF_127: Final = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it


def packings(_settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packings of bitsandbytes."""
    arrangement = {"arrangement": (".weight_format",)}
    return (
        Packing(
            ".weight.quant_map",
            _FLOAT32,
            _PLAIN,
            _unpack_4_bits,
            _FOUR_BITS,
            _DOUBLE,
            codes=_codes_of_4_bits,
        ),
        Packing(
            ".SCB",
            _FLOAT32,
            _PLAIN,
            _unpack_8_bits,
            {"values": (".weight",)},
            arrangement,
            codes=_codes_of_8_bits,
        ),
    )


def _unpack_8_bits(parts: Parts) -> torch.Tensor:
    _check_arrangement(parts)
    return parts["values"].float().mul_(parts[MAIN][:, None]).mul_(_OF_127)


def _codes_of_8_bits(parts: Parts) -> QuantizedWeight:
    _check_arrangement(parts)
    return QuantizedWeight(parts["values"], parts[MAIN].mul(_OF_127)[:, None])


def _check_arrangement(parts: Parts) -> None:
    if "arrangement" in parts and parts["arrangement"].any():
        raise ValueError("the rows are arranged for a GPU")


def _codes_of_4_bits(parts: Parts) -> QuantizedWeight | None:
    """Returns a weight in codes; None if blocks cross its rows."""
    state = _state(parts)
    num_outputs, num_inputs = state["shape"]
    if num_inputs % state["blocksize"]:
        return None
    packed = parts["values"].contiguous().view(torch.uint8).view(num_outputs, -1)
    each = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(1)
    return QuantizedWeight(
        halves_of(each), _largest(parts, state).view(num_outputs, -1), codebook=parts[MAIN]
    )


def _unpack_4_bits(parts: Parts) -> torch.Tensor:
    state = _state(parts)
    packed = parts["values"].contiguous().view(torch.uint8).flatten()
    table = parts[MAIN]
    of_byte = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=-1)
    values = torch.nn.functional.embedding(packed.int(), of_byte).flatten()
    shape = torch.Size(state["shape"])
    largest = _largest(parts, state)
    return _scale(values[: shape.numel()], largest, state["blocksize"]).reshape(shape)


def _state(parts: Parts) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(bytes(parts["state"].tolist()))
    return state


def _largest(parts: Parts, state: Mapping[str, Any]) -> torch.Tensor:
    """Returns the largest number of each block, of which some are numbers of a table."""
    largest = parts["largest"]
    if "table_of_largest" in parts:
        largest = parts["table_of_largest"][largest.int()]
        _scale(largest, parts["largest_of_largest"], state["nested_blocksize"])
        largest += state["nested_offset"]
    return largest


def _scale(values: torch.Tensor, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Multiplies the values of each block of `size`, of which the last may be cut off, in place.
    Returns them."""
    num_whole = len(values) // size
    values[: num_whole * size].view(num_whole, size).mul_(scales[:num_whole, None])
    values[num_whole * size :].mul_(scales[num_whole:])
    return values
