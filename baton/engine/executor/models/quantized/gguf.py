"""Weights of a GGUF model, dequantized one by one as transformers asks for them.

The names of tensors and the arithmetic of their types are those of the package `gguf`. What
llama.cpp's conversion changes in values is undone here, by architecture.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize

from baton.engine.executor.models.hf import PretrainedConfig, PreTrainedModel
from baton.engine.executor.models.quantized.gguf_codes import codes_of_tensor, has_codes
from baton.engine.executor.models.quantized.quantized_tensor import Codes
from baton.errors import UnsupportedModelError
from baton.models.gguf.configuration import ROPE_FACTORS
from baton.models.gguf.header import GgufHeader, GgufTensor, read_header
from baton_kernels.cpu.quantized_weight import QuantizedWeight

Undo = Callable[[torch.Tensor], torch.Tensor]

_CHUNK = 1 << 18  # values that are dequantized at once
_SUFFIX = re.compile(r"\.(weight|bias)$")
_GATE_UP = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj")
_QUERY_OR_KEY = re.compile(r"\.attn_([qk])\.")
# Weights that GPT-2 has transposed.
_CONV1D = re.compile(r"\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight$")


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """Weight of a model; `[...]` reads it, and nothing of it is kept.

    Attributes:
        parts: tensors that it is made of, one below the other in each of its matrices.
        undo: takes back what the conversion did to the values.
    """

    parts: tuple[GgufTensor, ...]
    undo: Undo
    dtype: torch.dtype

    def codes(self) -> Codes | None:
        """Returns the weight in codes; None if it has none."""
        if len(self.parts) > 1 or not has_codes(self.parts[0]):
            return None
        return Codes(self.parts[0].shape, self._quantized)

    def _quantized(self) -> QuantizedWeight:
        """Returns the weight in codes. What the conversion did to layers is to order their
        outputs."""
        whole = codes_of_tensor(self.parts[0])
        return whole[self.undo(torch.arange(len(whole.codes)))]

    def __getitem__(self, _everything: EllipsisType) -> torch.Tensor:
        shape = self.parts[0].shape
        if len(shape) == 1:
            # Vectors are small, and what is subtracted from them wants all digits.
            (part,) = self.parts
            values = torch.empty(shape, dtype=torch.float32)
            _read(part, values[None])
            return self.undo(values)
        heights = [part.shape[-2] for part in self.parts]
        values = torch.empty((*shape[:-2], sum(heights), shape[-1]), dtype=self.dtype)
        for part, below in zip(self.parts, values.split(heights, dim=-2), strict=True):
            _read(part, below)
        return self.undo(values)


def gguf_weights(
    files: list[Path], model: PreTrainedModel, dtype: torch.dtype
) -> dict[str, GgufWeight]:
    """Returns the weights in `files` by their names in `model`, which may be on the meta device.
    Raises `UnsupportedModelError` for a tensor that the model has no place for."""
    header = read_header(files)
    places = dict(_places(header, model))
    used = {part for parts in places.values() for part in parts}
    for name in sorted(header.tensors.keys() - used - {ROPE_FACTORS}):
        raise UnsupportedModelError(
            f"{str(files[0])!r} has the tensor {name}, for which {type(model).__name__} of "
            "transformers has no place; give the original checkpoint, a folder or a hub id"
        )
    return {
        name: GgufWeight(
            tuple(header.tensors[part] for part in parts),
            _undo(header.architecture, parts[0], model.config),
            dtype,
        )
        for name, parts in places.items()
    }


def _places(header: GgufHeader, model: PreTrainedModel) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields a model's weights with the tensors that they are made of, if the file has them."""
    (architecture,) = (a for a, n in MODEL_ARCH_NAMES.items() if n == header.architecture)
    names = get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for name in model.state_dict():
        if fused := _GATE_UP.fullmatch(name):
            parts = tuple(f"blk.{fused[1]}.ffn_{kind}_exps.weight" for kind in ("gate", "up"))
        else:
            suffix = _SUFFIX.search(name)
            found = names.get_name(_SUFFIX.sub("", name))
            parts = (f"{found}{suffix[0] if suffix else '.weight'}",)
        if all(part in header.tensors for part in parts):
            yield name, parts


def _undo(architecture: str, name: str, config: PretrainedConfig) -> Undo:
    """Returns what takes back the change that llama.cpp's conversion made to a tensor."""
    if architecture == "llama" and (found := _QUERY_OR_KEY.search(name)):
        is_query = found[1] == "q"
        heads = config.num_attention_heads if is_query else config.num_key_value_heads
        return partial(_in_halves, heads=heads)
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return lambda values: values - 1
    if architecture == "gpt2" and _CONV1D.search(name):
        return lambda values: values.T.contiguous()
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return lambda values: values.reshape(1, -1)
    return lambda values: values


def _in_halves(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns rows whose rotary pairs are half a head apart, of rows where they are neighbours."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _read(tensor: GgufTensor, out: torch.Tensor) -> None:
    """Dequantizes a tensor into matrices `out` of its shape."""
    at = 0
    for matrix in out.flatten(0, -3) if out.dim() > 2 else [out]:
        for rows in matrix.split(max(1, _CHUNK // tensor.shape[-1])):
            rows.copy_(torch.from_numpy(_rows(tensor, at, len(rows))))
            at += len(rows)


def _rows(tensor: GgufTensor, start: int, count: int) -> np.ndarray:
    """Returns `count` rows of a tensor in float32, from the row `start`."""
    kind = tensor.stored_as
    row_bytes = tensor.shape[-1] // kind.block_size * kind.block_bytes
    stored = np.fromfile(
        tensor.file, np.uint8, count * row_bytes, offset=tensor.start + start * row_bytes
    )
    return dequantize(stored.reshape(count, row_bytes), GGMLQuantizationType(tensor.type_number))
