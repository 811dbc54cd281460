"""Weights in the panels that linear.c reads."""

import math
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from baton_kernels.cpu import huge_pages
from baton_kernels.cpu.quantized_weight import QuantizedWeight

# By the dtype of codes.
_FORMATS: Final = {
    torch.int8: "codes8",
    torch.float8_e4m3fn: "float8",
    torch.uint8: "codes4",
}
_PART: Final = 128  # units, as in linear.c: a group of inputs must divide them


class Panels(Protocol):
    """Weight in panels.

    Attributes:
        out_features: outputs of the weight; those of the last panel may be more.
    """

    @property
    def out_features(self) -> int: ...

    @property
    def in_features(self) -> int: ...

    @property
    def functions(self) -> dict[torch.dtype, str]:
        """Name of the function that multiplies it, by the dtype of the rows."""
        ...

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a call about it, by their names in `Call` of linear.c."""
        ...

    @property
    def num_group_sums(self) -> int:
        """Groups whose inputs are summed for each row."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns rows of the plain weight, `[len(indices), in_features]`."""
        ...


@dataclass(frozen=True, slots=True)
class NumberPanels:
    """Plain weight, float32 or bfloat16.

    Attributes:
        units: `[num_panels, num_units, panel]`, int32.
        dtype: of the numbers.
        out_features: as of `Panels`.
    """

    units: torch.Tensor
    dtype: torch.dtype
    out_features: int

    @property
    def in_features(self) -> int:
        return self.units.shape[1] * self.units.itemsize // self.dtype.itemsize

    @property
    def functions(self) -> dict[torch.dtype, str]:
        is_wide = self.dtype == torch.float32
        return {
            torch.float32: "baton_linear_float32" if is_wide else "baton_linear_bfloat16_weight",
            torch.bfloat16: "baton_linear_bfloat16",
        }

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "weight": self.units.data_ptr(),
            "num_units": self.units.shape[1],
            "out_features": self.out_features,
        }

    @property
    def num_group_sums(self) -> int:
        return 0

    @property
    def num_bytes(self) -> int:
        return self.units.nbytes

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return _rows(self.units, indices).view(self.dtype)


@dataclass(frozen=True, slots=True)
class CodePanels:
    """Weight in codes.

    Attributes:
        units: codes, `[num_panels, num_units, panel]`, int32.
        scales, minima: `[num_panels, num_groups, panel]`, float32.
        codebook: as of `QuantizedWeight`.
        dtype: of the codes.
        out_features: as of `Panels`.
    """

    units: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    codebook: torch.Tensor | None
    dtype: torch.dtype
    out_features: int

    @property
    def in_features(self) -> int:
        return self.units.shape[1] * _inputs_of_unit(self.codebook)

    @property
    def functions(self) -> dict[torch.dtype, str]:
        name = _FORMATS[self.dtype]
        return {
            torch.float32: f"baton_linear_{name}",
            torch.bfloat16: f"baton_linear_{name}_bfloat16",
        }

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "weight": self.units.data_ptr(),
            "codebook": _address(self.codebook),
            "scales": _address(self.scales),
            "minima": _address(self.minima),
            "num_units": self.units.shape[1],
            "group_units": self.units.shape[1] // self.scales.shape[1],
            "out_features": self.out_features,
        }

    @property
    def num_group_sums(self) -> int:
        return 0 if self.minima is None else self.minima.shape[1]

    @property
    def num_bytes(self) -> int:
        used = (self.units, self.scales, self.minima)
        return sum(each.nbytes for each in used if each is not None)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        codes = _rows(self.units, indices).view(self.dtype)
        minima = None if self.minima is None else _rows(self.minima, indices)
        return QuantizedWeight(codes, _rows(self.scales, indices), minima, self.codebook).numbers()


AnyPanels: TypeAlias = NumberPanels | CodePanels


def takes(weight: QuantizedWeight) -> bool:
    """Returns whether the groups of a weight are of whole units."""
    return _inputs_of_group(weight) % _inputs_of_unit(weight.codebook) == 0


def panels_of(weight: torch.Tensor | QuantizedWeight, panel: int) -> AnyPanels:
    """Returns a weight, which is copied, in panels of `panel` outputs. Raises `ValueError` for one
    in codes that `takes` does not take."""
    if not isinstance(weight, QuantizedWeight):
        units = _in_panels(weight.contiguous().view(torch.int32), panel)
        return NumberPanels(units, weight.dtype, len(weight))
    size = _inputs_of_group(weight)
    if not takes(weight):
        per_unit = _inputs_of_unit(weight.codebook)
        raise ValueError(f"{size} inputs of a group are no multiple of {per_unit}")
    repeated = weight.group_size // size
    minima = weight.minima
    return CodePanels(
        _in_panels(weight.codes.contiguous().view(torch.int32), panel),
        _in_panels(weight.scales.repeat_interleave(repeated, dim=1), panel),
        None if minima is None else _in_panels(minima.repeat_interleave(repeated, dim=1), panel),
        weight.codebook,
        weight.codes.dtype,
        len(weight.codes),
    )


def _inputs_of_unit(codebook: torch.Tensor | None) -> int:
    return 4 if codebook is None else 8


def _inputs_of_group(weight: QuantizedWeight) -> int:
    """Returns the inputs of a group as it is packed: a larger one is in several parts."""
    return math.gcd(weight.group_size, _PART * _inputs_of_unit(weight.codebook))


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _in_panels(units: torch.Tensor, panel: int) -> torch.Tensor:
    """Returns what outputs have, `[out_features, n]`, in panels, `[num_panels, n, panel]`; what
    there is no output for is zero."""
    units = F.pad(units, (0, 0, 0, -len(units) % panel))
    panels = units.view(-1, panel, units.shape[1]).transpose(1, 2)
    return huge_pages.empty(*panels.shape, dtype=panels.dtype).copy_(panels)


def _rows(panels: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns what some outputs have, `[len(indices), n]`."""
    panel = panels.shape[2]
    return panels[indices // panel, :, indices % panel]
