"""Weights by the package compressed-tensors itself."""

from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from tests.support.engine.quantized.written import Format, Tensors

_FP4_LARGEST, _E4M3_LARGEST = 6, 448


def _pack(
    weight: torch.Tensor, scheme: QuantizationScheme, dtype: torch.dtype
) -> tuple[Tensors, torch.Tensor]:
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    state = {"weight": weight.to(dtype), **_scales(weight.to(dtype), scheme.weights)}
    stored = compressor.compress(state, scheme)
    values = compressor.decompress(dict(stored), scheme)["weight"]
    return {f".{name}": part for name, part in stored.items()}, values.float()


def _scales(weight: torch.Tensor, args: QuantizationArgs) -> Tensors:
    """The scales and zero points of a weight, by the smallest and largest number of its parts."""
    axes: tuple[int, ...]
    if args.block_structure:
        parts, axes = _blocks(weight, args.block_structure), (1, 3)
    elif args.group_size:
        parts, axes = weight.unflatten(-1, (-1, args.group_size)), (-1,)
    else:
        parts, axes = weight, ((0, 1) if args.strategy == "tensor" else (1,))
    low, high = parts.amin(axes), parts.amax(axes)
    of_all = None
    if args.strategy == "tensor_group":
        of_all = (_FP4_LARGEST * _E4M3_LARGEST / weight.abs().max().float()).reshape(1)
    scale, zeros = calculate_qparams(low, high, args, global_scale=of_all)
    if args.strategy == "channel":
        scale, zeros = scale[:, None], zeros[:, None]
    state = {"weight_scale": scale, "weight_zero_point": zeros}
    return state if of_all is None else {**state, "weight_global_scale": of_all}


def _blocks(weight: torch.Tensor, block: list[int]) -> torch.Tensor:
    rows, columns = block
    return weight.reshape(len(weight) // rows, rows, -1, columns)


def _format(name: str, dtype: torch.dtype = torch.bfloat16, **weights: Any) -> Format:
    """Returns a format of linear layers.

    Args:
        dtype: of the weights before, and so of the scales.
    """
    args = {"num_bits": 8, "type": "int", "symmetric": True, **weights}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=name)
    groups = {"group_0": {"targets": ["Linear"], "format": name, "weights": args}}
    settings = {
        "quant_method": "compressed-tensors", "format": name, "config_groups": groups,
        "quantization_status": "compressed", "ignore": ["lm_head"],
    }  # fmt: skip
    return Format(settings, partial(_pack, scheme=scheme, dtype=dtype))


_GROUPS: dict[str, Any] = {"strategy": "group", "group_size": 8}
_PACKED = "pack-quantized"

FORMATS: dict[str, Format] = {
    "w4a16": _format(_PACKED, num_bits=4, **_GROUPS),
    "w4a16 asymmetric": _format(_PACKED, torch.float16, num_bits=4, symmetric=False, **_GROUPS),
    "w4 by channels": _format(_PACKED, num_bits=4, strategy="channel"),
    "w3 asymmetric": _format(_PACKED, num_bits=3, symmetric=False, **_GROUPS),
    "w8a16": _format(_PACKED, num_bits=8, **_GROUPS),
    "w8a8": _format("int-quantized", strategy="channel"),
    "w8 asymmetric": _format("int-quantized", symmetric=False, strategy="channel"),
    "w8 naive": _format("naive-quantized", torch.float32, strategy="tensor"),
    "fp8 by channels": _format("float-quantized", torch.float32, type="float", strategy="channel"),
    "fp8 by tensors": _format("float-quantized", torch.float32, type="float", strategy="tensor"),
    "fp8 by blocks": _format(
        "float-quantized", torch.float32, type="float", strategy="block", block_structure=[16, 32]
    ),
    "nvfp4": _format(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16,
        scale_dtype="torch.float8_e4m3fn",
    ),
    "compressed mxfp4": _format(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32,
        scale_dtype="torch.uint8",
    ),
    "compressed mxfp8": _format(
        "mxfp8-quantized", type="float", strategy="group", group_size=32, scale_dtype="torch.uint8",
    ),
}  # fmt: skip
# Of these, transformers rounds the values of a layer to bfloat16, and those of experts not.
ROUNDED = {"fp8 in bfloat16": _format("float-quantized", type="float", strategy="channel")}
