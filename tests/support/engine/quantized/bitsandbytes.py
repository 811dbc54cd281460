"""Weights by the package bitsandbytes itself."""

from functools import partial
from typing import Any

import torch
from bitsandbytes import functional

from tests.support.engine.quantized.written import Format, Tensors


def _eight_bits(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    packed, scales, _ = functional.int8_vectorwise_quant(weight.half())
    stored = {
        ".weight": packed,
        ".SCB": scales,
        ".weight_format": torch.zeros((), dtype=torch.uint8),
    }
    return stored, functional.int8_vectorwise_dequant(packed, scales)


def _four_bits(
    weight: torch.Tensor, kind: str, *, double: bool, storage: torch.dtype = torch.uint8
) -> tuple[Tensors, torch.Tensor]:
    # The package's code for CPUs takes a block that crosses rows for one that does not.
    size = 64 if weight.shape[1] % 64 == 0 else 32
    packed, state = functional.quantize_4bit(
        weight, blocksize=size, quant_type=kind, compress_statistics=double, quant_storage=storage
    )
    beside = state.as_dict(packed=True)
    stored = {".weight": packed, **{f".weight.{name}": part for name, part in beside.items()}}
    return stored, functional.dequantize_4bit(packed, state)


def _of_4_bits(kind: str, **options: Any) -> Format:
    settings = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": options["double"],
        "bnb_4bit_quant_storage": str(options.get("storage", torch.uint8)).removeprefix("torch."),
    }  # fmt: skip
    return Format(settings, partial(_four_bits, kind=kind, **options))


FORMATS: dict[str, Format] = {
    "int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, _eight_bits),
    "nf4": _of_4_bits("nf4", double=False),
    "nf4 doubly": _of_4_bits("nf4", double=True),
    "fp4": _of_4_bits("fp4", double=False),
    "nf4 in bfloat16": _of_4_bits("nf4", double=True, storage=torch.bfloat16),
}
