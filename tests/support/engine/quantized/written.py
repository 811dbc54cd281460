"""Formats of quantized weights, and checkpoints that are written in them."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def is_of_layer(name: str, weight: torch.Tensor) -> bool:
    """Returns whether the tools that quantize do so with a weight: one of a linear layer, but the
    head, the routers of experts and the encoders of images."""
    kept = (
        "embed", "lm_head", "gate.weight", "router", "norm", "wte", "wpe", "vision", "projector",
        "visual", "score",
    )  # fmt: skip
    return name.endswith(".weight") and weight.dim() == 2 and not any(k in name for k in kept)


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        settings: the `quantization_config` of its checkpoints.
        pack: the tensors that store a weight of a layer, by how their names end, and the values
            that they stand for.
        is_packed: tells the weights that are quantized by their names and values.
    """

    settings: Mapping[str, Any]
    pack: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    is_packed: Callable[[str, torch.Tensor], bool] = is_of_layer


def save_quantized(made: Format, plain: Path, folder: Path) -> Path:
    """Writes a checkpoint whose layers are quantized, of a plain one. Returns the folder of a plain
    one with the values that it stands for."""
    stored, values = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not made.is_packed(name, weight):
            stored[name] = values[name] = weight
            continue
        parts, values[name] = made.pack(weight)
        stem = name.removesuffix(".weight")
        stored |= {stem + end: part.contiguous() for end, part in parts.items()}
    meant = folder.with_name(f"{folder.name}_meant")
    for into, tensors in ((folder, stored), (meant, values)):
        shutil.copytree(plain, into, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            into / "model.safetensors",
            {"format": "pt"},
        )
    describe(folder, made.settings)
    return meant


def describe(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes into a checkpoint's configuration how its weights are quantized."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["quantization_config"] = {**settings}
    file.write_text(json.dumps(config), encoding="utf-8")
