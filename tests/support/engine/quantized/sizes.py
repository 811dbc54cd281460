"""Bytes that a weight takes in each format: in files and, of a model in bfloat16, in memory.

A GPU has the plain values that an engine without products of codes has.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from baton.models import DESCRIPTION, WEIGHTS, checkpoint_folder
from baton.models.gguf.tensor_types import TENSOR_TYPES
from tests.support.engine.quantized.codes import in_codes, loaded
from tests.support.engine.quantized.written import Format
from tests.support.gguf.models import blocks_config, random_model
from tests.support.gguf.vocabularies import sentence_piece
from tests.support.gguf.writing import write_gguf

_BY_NAME = {each.name: each for each in TENSOR_TYPES.values()}


def stored_parts(made: Format, path: str, meant: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns the tensors that store the first quantized weight of a checkpoint, and its values,
    which are in the folder `meant`."""
    stored, values = (load_file(Path(each) / "model.safetensors") for each in (path, meant))
    plain, weight = next((n, w) for n, w in values.items() if made.is_packed(n, w))
    stem = plain.removesuffix(".weight")
    return [part for name, part in stored.items() if name.startswith(stem)], weight


def sizes(made: Format, path: str, meant: str) -> dict[str, Any]:
    """Returns the bytes of a weight of a checkpoint, scales included: "file", "cpu", "gpu"; and, in
    memory on a CPU, the bits of its code and the weights that have a scale: "codes", "group", None
    for plain ones."""
    parts, weight = stored_parts(made, path, meant)
    in_files = sum(part.nbytes for part in parts) / weight.numel()
    return {"file": round(in_files, 3), **_in_memory(path)}


def gguf_sizes(kind: str, folder: Path) -> dict[str, Any]:
    """Returns the same of a type of GGUF, of a file that is written to a folder."""
    file, stored_as = folder / f"{kind}.gguf", _BY_NAME[kind]
    write_gguf(file, random_model(blocks_config()), sentence_piece(), lambda _name: kind)
    path = str(checkpoint_folder(str(file), (*DESCRIPTION, *WEIGHTS)))
    in_file = stored_as.block_bytes / stored_as.block_size
    return {"file": round(in_file, 3), **_in_memory(path)}


def _in_memory(path: str) -> Mapping[str, Any]:
    plain = loaded(path, dtype="bfloat16", kernels="torch").values()
    of_plain = sum(weight.nbytes for weight in plain) / sum(weight.numel() for weight in plain)
    coded = [each.quantized for each in in_codes(loaded(path, dtype="bfloat16"))]
    if not coded:
        return {"cpu": of_plain, "gpu": of_plain, "codes": None, "group": None}
    of_codes = sum(each.num_bytes for each in coded) / sum(each.shape.numel() for each in coded)
    bits = max(8 if each.codebook is None else 4 for each in coded)
    group = coded[0].group_size
    return {"cpu": round(of_codes, 3), "gpu": of_plain, "codes": bits, "group": group}
