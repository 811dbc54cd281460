"""Packings: the tensors in which a checkpoint stores one quantized weight, and its values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from baton.engine.executor.models.quantized.quantized_tensor import Codes, held
from baton.errors import UnsupportedModelError
from baton_kernels.cpu.panels import takes
from baton_kernels.cpu.quantized_weight import QuantizedWeight

Parts = Mapping[str, torch.Tensor]
"""The stored tensors of one weight, by their roles in a packing."""

T = TypeVar("T")

MAIN = "packed"
"""Role of the tensor by which a packing is found."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, which is read when its values are taken.

    Attributes:
        name: its name in the checkpoint.
        values: its slice in a file of safetensors, as the library gives it.
    """

    name: str
    values: Any

    @property
    def dtype(self) -> str:
        """Name of its dtype, as the format of safetensors has it."""
        return str(self.values.get_dtype())

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.values[index]
        return tensor

    def codes(self) -> Codes | None:
        """Returns None: it has no codes."""
        return None


Stored = Mapping[str, StoredTensor]
"""The tensors of a checkpoint by their names."""


@dataclass(frozen=True, slots=True)
class Packing:
    """One arrangement of quantized weights.

    Attributes:
        main: how the name of the tensor ends by which the packing is found; its name without that
            is the one that the others' begin with.
        dtypes: dtypes that this tensor may have, as safetensors names them.
        plain: how the weight's name ends instead.
        parts: how the names of the others may end, by role.
        optional: of those that a weight may do without.
        unpack: computes the weight.
        codes: returns the weight in codes, or None if it has none; the numbers are those of
            `unpack` but for what that rounds to a dtype of 16 bits.
        within: part of the names of the weights that it is for.
    """

    main: str
    dtypes: frozenset[str]
    plain: str
    unpack: Callable[[Parts], torch.Tensor]
    parts: Mapping[str, tuple[str, ...]]
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    within: str = ""
    codes: Callable[[Parts], QuantizedWeight | None] = lambda _parts: None

    def matches(self, tensor: StoredTensor) -> bool:
        """Returns whether a tensor can be the main one of a weight in this packing."""
        is_named = tensor.name.endswith(self.main) and self.within in tensor.name
        return is_named and tensor.dtype in self.dtypes

    def missing(self, tensor: StoredTensor, stored: Stored) -> list[str]:
        """Returns names of tensors that a weight needs beside its main tensor, and which a
        checkpoint lacks."""
        stem = tensor.name.removesuffix(self.main)
        lacking = (ends for ends in self.parts.values() if not _first(stem, ends, stored))
        return [stem + ends[0] for ends in lacking]

    def weight(self, tensor: StoredTensor, stored: Stored) -> "PackedWeight":
        """Returns the weight whose main tensor is given, and whose others are stored."""
        stem = tensor.name.removesuffix(self.main)
        found = {
            role: part
            for role, ends in (*self.parts.items(), *self.optional.items())
            if (part := _first(stem, ends, stored)) is not None
        }
        return PackedWeight(stem + self.plain, {MAIN: tensor, **found}, self)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One weight that a checkpoint stores quantized.

    Attributes:
        name: of the plain weight, as an unquantized checkpoint has it.
        parts: the tensors that store it, by role.
        packing: their arrangement.
    """

    name: str
    parts: Mapping[str, StoredTensor]
    packing: Packing

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Computes the weight. Raises `UnsupportedModelError` if its tensors do not fit
        together."""
        whole: torch.Tensor = self._read(self.packing.unpack)[index]
        return whole

    def codes(self) -> Codes | None:
        """Returns the weight in codes; None if it has none that products take. Raises
        `UnsupportedModelError`."""
        weight = self._read(self.packing.codes)
        return None if weight is None or not takes(weight) else held(weight)

    def _read(self, read: Callable[[Parts], T]) -> T:
        tensors = {role: part[...] for role, part in self.parts.items()}
        try:
            return read(tensors)
        except (RuntimeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            shapes = ", ".join(
                f"{part.name} {list(tensors[role].shape)}" for role, part in self.parts.items()
            )
            raise UnsupportedModelError(
                f"the tensors of the quantized weight {self.name} do not fit together ({shapes}): "
                "download the model again, or give the checkpoint that it was made from"
            ) from error


def _first(stem: str, ends: tuple[str, ...], stored: Stored) -> StoredTensor | None:
    return next((stored[stem + end] for end in ends if stem + end in stored), None)
