"""Weights in the panels that linear.c reads."""

import math
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F

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
        functions: name of the function that multiplies it, by the dtype of the rows.
        arguments: what a call says of it, by the names in `Call` of linear.c.
        num_group_sums: groups whose inputs are summed for each row.
        num_bytes: its size.
    """

    functions: dict[torch.dtype, str]
    arguments: dict[str, Any]
    num_group_sums: int
    num_bytes: int

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns rows of the plain weight, `[len(indices), in_features]`."""
        ...


def takes(weight: QuantizedWeight) -> bool:
    """Returns whether the groups of a weight are of whole units."""
    return _inputs_of_group(weight) % _inputs_of_unit(weight) == 0


def panels_of(weight: torch.Tensor | QuantizedWeight, panel: int) -> Panels:
    """Returns a weight, which is copied, in panels of `panel` outputs. Raises `ValueError` for one
    in codes that `takes` does not take."""
    return _Codes(weight, panel) if isinstance(weight, QuantizedWeight) else _Numbers(weight, panel)


class _Numbers:
    """Plain weight, float32 or bfloat16."""

    def __init__(self, weight: torch.Tensor, panel: int) -> None:
        self._dtype = weight.dtype
        is_wide = weight.dtype == torch.float32
        self.functions = {
            torch.float32: "baton_linear_float32" if is_wide else "baton_linear_bfloat16_weight",
            torch.bfloat16: "baton_linear_bfloat16",
        }
        self._units = _in_panels(weight.contiguous().view(torch.int32), panel)
        self.num_group_sums = 0
        self.num_bytes = self._units.nbytes
        self.arguments = {
            "weight": self._units.data_ptr(),
            "num_units": self._units.shape[1],
            "out_features": len(weight),
        }

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return _rows(self._units, indices).view(self._dtype)


class _Codes:
    """Weight in codes."""

    def __init__(self, weight: QuantizedWeight, panel: int) -> None:
        size, per_unit = _inputs_of_group(weight), _inputs_of_unit(weight)
        if not takes(weight):
            raise ValueError(f"{size} inputs of a group are no multiple of {per_unit}")
        name, self._dtype = _FORMATS[weight.codes.dtype], weight.codes.dtype
        self.functions = {
            torch.float32: f"baton_linear_{name}",
            torch.bfloat16: f"baton_linear_{name}_bfloat16",
        }
        self._units = _in_panels(weight.codes.contiguous().view(torch.int32), panel)
        self._scales, self._minima = (
            None
            if each is None
            else _in_panels(each.repeat_interleave(weight.group_size // size, dim=1), panel)
            for each in (weight.scales, weight.minima)
        )
        self._codebook = weight.codebook
        self.num_group_sums = 0 if self._minima is None else self._minima.shape[1]
        used = (self._units, self._scales, self._minima)
        self.num_bytes = sum(each.nbytes for each in used if each is not None)
        self.arguments = {
            "weight": self._units.data_ptr(),
            "codebook": _address(self._codebook),
            "scales": _address(self._scales),
            "minima": _address(self._minima),
            "num_units": self._units.shape[1],
            "group_units": size // per_unit,
            "out_features": len(weight.codes),
        }

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        assert self._scales is not None
        codes = _rows(self._units, indices).view(self._dtype)
        minima = None if self._minima is None else _rows(self._minima, indices)
        scales = _rows(self._scales, indices)
        return QuantizedWeight(codes, scales, minima, self._codebook).numbers()


def _inputs_of_unit(weight: QuantizedWeight) -> int:
    return 4 if weight.codebook is None else 8


def _inputs_of_group(weight: QuantizedWeight) -> int:
    """Returns the inputs of a group as it is packed: a larger one is in several parts."""
    return math.gcd(weight.group_size, _PART * _inputs_of_unit(weight))


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _in_panels(units: torch.Tensor, panel: int) -> torch.Tensor:
    """Returns what outputs have, `[out_features, n]`, in panels, `[num_panels, n, panel]`; what
    there is no output for is zero."""
    units = F.pad(units, (0, 0, 0, -len(units) % panel))
    return units.view(-1, panel, units.shape[1]).transpose(1, 2).contiguous()


def _rows(panels: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns what some outputs have, `[len(indices), n]`."""
    panel = panels.shape[2]
    return panels[indices // panel, :, indices % panel]
