"""Quantized checkpoints as transformers itself loads them, with plain weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel

from baton.models.quantization import read_quantization


def load_plain(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Returns the model in a folder. Of bitsandbytes, transformers keeps the layers, and has their
    weights in float32 by `dequantize`."""
    described = read_quantization(Path(path))
    method = None if described is None else described.method
    options: dict[str, Any] = {}
    if method == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", **options
    )
    return model.dequantize() if method == "bitsandbytes" else model
