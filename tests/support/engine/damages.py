"""Damages of a checkpoint's files, as interrupted downloads and mistaken copies leave them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_WEIGHTS = "model.safetensors"
_NAME = "model.layers.1.self_attn.q_proj.weight"
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of a checkpoint in one file of safetensors.

    Attributes:
        change: damages a folder.
        sentence: expression for the sentence that names what is damaged, and what to do.
        is_told: whether the headers of files and the configuration of a common decoder tell of it.
    """

    change: Callable[[Path], object]
    sentence: str
    is_told: bool = True


def _rewritten(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def of_folder(folder: Path) -> None:
        file = folder / _WEIGHTS
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})

    return of_folder


def _of_two_files(folder: Path) -> None:
    """Writes the weights as two files, without the second."""
    whole, first = folder / _WEIGHTS, folder / "model-00001-of-00002.safetensors"
    tensors = load_file(whole)
    places = dict.fromkeys(tensors, first.name) | {_NAME: "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    del tensors[_NAME]
    save_file(tensors, first, {"format": "pt"})
    whole.unlink()


def _of_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (folder / _WEIGHTS).rename(folder / "adapter_model.safetensors")


def _cut(num_bytes: int, name: str = _WEIGHTS) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_bytes(file.read_bytes()[:num_bytes])

    return change


def _bytes(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


_POINTED = "is a pointer of Git LFS in place of the file; run `git lfs pull` in its folder"

DAMAGES = {
    "cut off": Damage(
        _cut(-1000),
        r"model.safetensors' has \d+ bytes; its header describes \d+. Download it again",
    ),
    "cut off in its header": Damage(
        _cut(100),
        "model.safetensors' ends after 100 bytes, within its header; download it again",
    ),
    "empty": Damage(_cut(0), "model.safetensors' ends after 0 bytes, .*; download it again"),
    "no header": Damage(
        _bytes(_WEIGHTS, bytes([2, *[0] * 7]) + b"hi"),
        "model.safetensors' has no header of safetensors; download it again",
    ),
    "pointer": Damage(_bytes(_WEIGHTS, _POINTER.encode()), f"model.safetensors' {_POINTED}"),
    "pointer of configuration": Damage(
        _bytes("config.json", _POINTER.encode()), f"config.json' {_POINTED}"
    ),
    "configuration cut off": Damage(
        _cut(100, "config.json"), "config.json' is not JSON: .*; download it again"
    ),
    "configuration missing": Damage(
        lambda folder: (folder / "config.json").unlink(),
        "holds no config.json; expected a checkpoint's folder, as model.save_pretrained",
    ),
    "index cut off": Damage(
        _bytes("model.safetensors.index.json", b'{"weight_map": {'),
        "model.safetensors.index.json' is not JSON: .*; download it again",
    ),
    "file missing": Damage(
        _of_two_files, "lacks 1 of 2 files of weights, model-00002.*; download the model again"
    ),
    "adapter": Damage(
        _of_adapter, "holds an adapter of org/base, and no model; .*: merge it into that model"
    ),
    "weight missing": Damage(
        _rewritten(lambda weights: weights.pop(_NAME)),
        f"lacks 1 of the model's weights, {_NAME} among them; download the model again",
    ),
    "another shape": Damage(
        _rewritten(lambda weights: weights.update({_NAME: weights[_NAME][1:].contiguous()})),
        rf"{_NAME} of shape \[\d+, \d+\]; its configuration expects \[\d+, \d+\]: "
        "one of both is of another model. Download the model again",
    ),
    "no numbers": Damage(
        _rewritten(lambda weights: weights[_NAME].fill_(float("nan"))),
        f"the weights {_NAME} of LlamaForCausalLM are not all finite numbers; download the model",
        is_told=False,
    ),
}

_TOKENIZER = "tokenizer.json"
TOKENIZER_DAMAGES = {
    "tokenizer missing": Damage(
        lambda folder: (folder / _TOKENIZER).unlink(),
        "holds no tokenizer.json; save the tokenizer there with AutoTokenizer",
    ),
    "pointer of tokenizer": Damage(
        _bytes(_TOKENIZER, _POINTER.encode()), f"tokenizer.json' {_POINTED}"
    ),
    "tokenizer cut off": Damage(
        _cut(-1000, _TOKENIZER),
        "tokenizer.json' holds no tokenizer: .*; download it again",
        is_told=False,
    ),
}
"""Damages of the tokenizer, without which a router serves nothing."""
