"""Weights by NVIDIA's modelopt, in FP8 and NVFP4."""

from collections.abc import Mapping
from typing import Any, Final

from baton.engine.executor.models.quantized import fp4, fp8
from baton.engine.executor.models.quantized.packing import Packing

_NVFP4: Final = {"scale": (".weight_scale",), "global_scale": (".weight_scale_2",)}


def packings(_settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packings of modelopt, of which layers may have different ones."""
    return (
        Packing(
            ".weight",
            fp4.BYTES,
            ".weight",
            fp4.unpack_nvfp4,
            _NVFP4,
            codes=fp4.codes_of_nvfp4,
        ),
        Packing(
            ".weight",
            fp8.FP8,
            ".weight",
            fp8.unpack,
            {"scale": (".weight_scale",)},
            codes=fp8.codes,
        ),
    )
