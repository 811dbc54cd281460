"""Weights in a checkpoint's folder: their files, and what can be known of them before they are
read."""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from baton.errors import UnsupportedModelError
from baton.models import GGUF, WEIGHTS, check_is_no_pointer, read_json
from baton.models.decoder_weights import Shape, decoder_weights
from baton.models.gguf.families import family_of
from baton.models.gguf.header import files_in, read_header
from baton.models.quantization import read_quantization

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
    """Raises `UnsupportedModelError` if a folder has no weights in safetensors or GGUF, not all of
    them, or some of another shape than its configuration has, as far as the headers of the files
    tell. Reads no more of them."""
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
    shapes: dict[str, Shape] = {}
    for file in files:
        shapes |= _shapes_of_whole(file)
    _check_names_and_shapes(folder, shapes)


def check_complete(
    path: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]], missing: Set[str]
) -> None:
    """Raises `UnsupportedModelError` for weights that are missing, and for weights of another shape
    than the configuration has: by name, shape and expected shape."""
    for name, shape, expected in sorted(mismatched):
        raise UnsupportedModelError(
            f"{path!r} has weights {name} of shape {list(shape)}; its configuration expects "
            f"{list(expected)}: one of both is of another model. Download the model again"
        )
    if missing:
        raise UnsupportedModelError(
            f"{path!r} lacks {len(missing)} of the model's weights, {min(missing)} among them; "
            "download the model again"
        )


def check_is_no_adapter(folder: Path) -> None:
    """Raises `UnsupportedModelError` for the folder of an adapter without a model."""
    if (folder / _ADAPTER).is_file() and not weight_files(folder):
        base = read_json(folder / _ADAPTER).get("base_model_name_or_path") or "another model"
        raise UnsupportedModelError(
            f"{str(folder)!r} holds an adapter of {base}, and no model; Baton serves no adapters: "
            "merge it into that model first, as merge_and_unload() of the package peft does"
        )


def _check_names_and_shapes(folder: Path, shapes: Mapping[str, Shape]) -> None:
    """Raises `UnsupportedModelError` if the weights that the headers have are not those that the
    configuration tells."""
    if read_quantization(folder) is not None:  # with other names, and shapes of codes
        return
    named = {name.removeprefix("model."): name for name in shapes}  # without it: of an embedder
    if (head := "lm_head.weight") in shapes:  # one weight may have either name
        named.setdefault("embed_tokens.weight", head)
    expected = decoder_weights(read_json(folder / "config.json"))
    mismatched = [
        (named[name], shapes[named[name]], shape)
        for name, shape in expected.items()
        if name in named and tuple(shapes[named[name]]) != tuple(shape)
    ]
    check_complete(str(folder), mismatched, {f"model.{n}" for n in expected.keys() - named.keys()})


def _shapes_of_whole(file: Path) -> dict[str, Shape]:
    """Returns the shapes of the weights in a file. Raises `UnsupportedModelError` if it is not
    whole."""
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
        tensors.pop("__metadata__", None)
        shapes = {name: tuple(map(int, tensor["shape"])) for name, tensor in tensors.items()}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{str(file)!r} has no header of safetensors; download it again"
        ) from error
    whole = _HEADER_BYTES + length + end
    if size != whole:
        raise UnsupportedModelError(
            f"{str(file)!r} has {size} bytes; its header describes {whole}. Download it again"
        )
    return shapes
