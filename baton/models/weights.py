"""Weights in a checkpoint's folder: their files, and what can be known of them before they are
read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.errors import UnsupportedModelError
from baton.models import GGUF, WEIGHTS, check_is_no_pointer, read_json
from baton.models.gguf.families import family_of
from baton.models.gguf.header import files_in, read_header

_INDEX = "model.safetensors.index.json"
_ADAPTER, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEADER_BYTES = 8  # of the length of a file's header, as the format of safetensors has it


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a checkpoint's weights, sorted: those that its index names, else all of
    safetensors, else of GGUF. Not all of them may be there."""
    index = folder / _INDEX
    if index.is_file():
        names = map(str, read_json(index).get("weight_map", {}).values())
        return sorted({folder / name for name in names})
    found = {file for pattern in WEIGHTS for file in folder.glob(pattern)}
    whole = sorted(file for file in found if file.name != _ADAPTER_WEIGHTS)
    return whole or files_in(folder)


def is_gguf(files: Sequence[Path]) -> bool:
    """Returns whether the files of a checkpoint's weights are GGUF."""
    return any(file.suffix == GGUF for file in files)


def weight_bytes(folder: Path) -> int:
    """Returns the size of those of a checkpoint's weights that are there."""
    return sum(file.stat().st_size for file in weight_files(folder) if file.is_file())


def check_weights(folder: Path) -> None:
    """Raises `UnsupportedModelError` if a folder has no weights in safetensors or GGUF, or not all
    of them. Reads the headers of the files alone."""
    check_is_no_adapter(folder)
    files = weight_files(folder)
    if not files:
        raise UnsupportedModelError(
            f"{str(folder)!r} holds no *.safetensors file; other formats can run code when read. "
            "Convert it with model.save_pretrained(folder) first"
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UnsupportedModelError(
            f"{str(folder)!r} lacks {len(missing)} of {len(files)} files of weights, {missing[0]} "
            f"among them, which {_INDEX} names; download the model again"
        )
    if is_gguf(files):
        family_of(read_header(files).architecture)
        return
    for file in files:
        _check_is_whole(file)


def check_is_no_adapter(folder: Path) -> None:
    """Raises `UnsupportedModelError` for the folder of an adapter without a model."""
    if (folder / _ADAPTER).is_file() and not weight_files(folder):
        base = read_json(folder / _ADAPTER).get("base_model_name_or_path") or "another model"
        raise UnsupportedModelError(
            f"{str(folder)!r} holds an adapter of {base}, and no model; Baton serves no adapters: "
            "merge it into that model first, as merge_and_unload() of the package peft does"
        )


def _check_is_whole(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_HEADER_BYTES), "little")
        header = opened.read(length) if length <= size else b""
    if size < _HEADER_BYTES + length:
        check_is_no_pointer(file)
        raise UnsupportedModelError(
            f"{str(file)!r} ends after {size} bytes, within its header; download it again"
        )
    try:
        tensors: dict[str, Any] = json.loads(header)
        ends = [t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(f"{str(file)!r} has no header of safetensors") from error
    whole = _HEADER_BYTES + length + max(ends, default=0)
    if size != whole:
        raise UnsupportedModelError(
            f"{str(file)!r} has {size} bytes; its header describes {whole}. Download it again"
        )
