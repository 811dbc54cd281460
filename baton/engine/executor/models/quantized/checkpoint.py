"""Weights of a quantized checkpoint by the names that an unquantized one has.

`checkpoint_weights` returns what transformers takes in place of a folder: by name, an object whose
values are computed when they are taken, and not kept.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from baton.engine.executor.models.quantized import (
    bitsandbytes,
    compressed_tensors,
    fp4,
    fp8,
    grouped_integers,
    modelopt,
)
from baton.engine.executor.models.quantized.packing import (
    PackedWeight,
    Packing,
    Stored,
    StoredTensor,
)
from baton.errors import UnsupportedModelError
from baton.models.quantization import Quantization
from baton.models.weights import weight_files

Weights = Mapping[str, StoredTensor | PackedWeight]
"""The weights of a checkpoint by their plain names."""

_PACKINGS: Final[Mapping[str, Callable[[Mapping[str, Any]], tuple[Packing, ...]]]] = {
    "fp8": fp8.packings,
    "fbgemm_fp8": fp8.packings,
    "mxfp8": fp8.packings,
    "gptq": grouped_integers.gptq,
    "awq": grouped_integers.awq,
    "auto-round": grouped_integers.auto_round,
    "mxfp4": fp4.mxfp4,
    "compressed-tensors": compressed_tensors.packings,
    "bitsandbytes": bitsandbytes.packings,
    "modelopt": modelopt.packings,
}
# Of activations, which Baton does not quantize.
_UNUSED: Final = (
    ".input_scale", ".activation_scale", ".input_scale_ub", ".input_zero_point",
    ".input_global_scale", ".output_scale",
)  # fmt: skip

# Of weights that are quantized in a way that no packing describes: without them they mean nothing.
_UNREAD: Final = (
    ".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".weight_global_scale",
    ".weight_zero_point", ".weight_g_idx", ".qzeros", ".g_idx", ".pre_quant_scale",
    ".svdquant_lora_a", ".svdquant_lora_b", ".SCB", ".weight.absmax", ".weight.quant_map",
)  # fmt: skip


@contextmanager
def checkpoint_weights(folder: Path, quantization: Quantization | None) -> Iterator[Weights]:
    """Opens the files of a checkpoint in a `with` block, and gives its weights. Raises
    `UnsupportedModelError` if a weight lacks some of its tensors."""
    packings: tuple[Packing, ...] = ()
    if quantization is not None:
        packings = _PACKINGS[quantization.method](quantization.settings)
    with ExitStack() as stack:
        stored: dict[str, StoredTensor] = {}
        for path in weight_files(folder):
            file = stack.enter_context(safe_open(path, "pt"))
            stored |= {name: StoredTensor(name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
        yield plain_weights(stored, packings)


def plain_weights(stored: Stored, packings: tuple[Packing, ...]) -> Weights:
    """Returns the weights of a checkpoint: the packed ones, and what is stored beside them. Raises
    `UnsupportedModelError` if a packed one lacks some of its tensors."""
    packed = [weight for tensor in stored.values() if (weight := _packed(tensor, stored, packings))]
    used = {part.name for weight in packed for part in weight.parts.values()}
    plain = {
        name: tensor
        for name, tensor in stored.items()
        if name not in used and not name.endswith(_UNUSED)
    }
    for tensor in plain.values():
        _check_is_plain(tensor, stored, packings)
    return plain | {weight.name: weight for weight in packed}


def _packed(
    tensor: StoredTensor, stored: Stored, packings: tuple[Packing, ...]
) -> PackedWeight | None:
    """Returns the weight whose main tensor is given; None for other tensors."""
    for packing in packings:
        if packing.matches(tensor) and not packing.missing(tensor, stored):
            return packing.weight(tensor, stored)
    return None


def _check_is_plain(tensor: StoredTensor, stored: Stored, packings: tuple[Packing, ...]) -> None:
    """Raises `UnsupportedModelError` for a tensor that belongs to a quantized weight."""
    for packing in packings:
        if packing.matches(tensor):
            raise UnsupportedModelError(
                f"the weights {tensor.name} are quantized, and {packing.missing(tensor, stored)[0]}"
                ", which they need, is missing: download the model again"
            )
    if packings and tensor.name.endswith(_UNREAD):
        raise UnsupportedModelError(
            f"the tensor {tensor.name} belongs to weights that are quantized in a way that Baton "
            "does not read: give a checkpoint in another format, or the original one"
        )
