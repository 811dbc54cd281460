"""Linear layers on a CPU by the C library, over weights that are packed for it."""

import ctypes
import math
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F

from baton_kernels.cpu.coded_weight import CodedWeight
from baton_kernels.cpu.library import KERNELS, load
from baton_kernels.cpu.recording import launch

# By the dtype of codes.
_FORMATS: Final = {
    torch.int8: "codes8",
    torch.float8_e4m3fn: "float8",
    torch.uint8: "codes4",
}
_PART: Final = 128  # units, as in linear.c: a group of inputs must divide them


class _Call(ctypes.Structure):
    """Arguments of one call, as `Call` in linear.c."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("levels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minima", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("arranged", ctypes.c_void_p),
        ("group_sums", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("num_units", ctypes.c_int64),
        ("group_units", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


class _Packed(Protocol):
    """Weight in the panels of linear.c.

    Attributes:
        functions: name of the function that multiplies it, by the dtype of the rows.
        arguments: what `_Call` says of it.
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


class PackedLinear:
    """Linear layer y = x @ weight.T + bias, summed in float32 and rounded once. An output is
    bitwise the same however many rows are computed with it.

    Args:
        weight: `[out_features, in_features]`, float32 or bfloat16, of an even number of inputs if
            bfloat16; or one in codes that `takes` takes. It is copied.
        bias: `[out_features]`, of `dtype`. It is copied.
        dtype: of x and y, float32 or bfloat16, not narrower than that of a plain weight.

    Raises `NoLibraryError` if the library is not available.
    """

    def __init__(
        self, weight: torch.Tensor | CodedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        library = load(KERNELS)
        # x is converted on CPUs that do not multiply bfloat16.
        is_native = bool(library.baton_linear_multiplies_bfloat16())
        self._dtype, self._computed = dtype, dtype if is_native else torch.float32
        self._packed = _packed(weight, library.baton_linear_panel())
        self._function = getattr(library, self._packed.functions[self._computed])
        self._function.restype = None
        self._num_arranged = library.baton_linear_arranged_rows
        self._num_arranged.argtypes, self._num_arranged.restype = [ctypes.c_int64], ctypes.c_int64
        self._bias = None if bias is None else bias.detach().to(self._computed, copy=True)
        fixed = _Call(**self._packed.arguments)
        self._out_features: int = fixed.out_features
        fixed.bias = None if self._bias is None else self._bias.data_ptr()
        self._fixed = bytes(fixed)
        self.num_bytes: Final = self._packed.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y, `[rows, out_features]`, for `x`, `[rows, in_features]`."""
        if self._computed is self._dtype:
            return self._multiply(x, None)
        return self._multiply(x.to(self._computed), None).to(self._dtype)

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns `residual`, `[rows, out_features]`, plus y, which is rounded before."""
        if self._computed is self._dtype:
            return self._multiply(x, residual.contiguous())
        return self(x).add_(residual)

    def rows_of_weight(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns rows of the weight, `[len(indices), in_features]`, in the dtype of x."""
        return self._packed.rows(indices).to(self._dtype)

    def _multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, num_features = x.shape
        out = x.new_empty(num_rows, self._out_features)
        memory: list[torch.Tensor | None] = [x, residual, out]
        call = _Call.from_buffer_copy(self._fixed)
        call.rows, call.num_rows, call.row_stride = x.data_ptr(), num_rows, x.stride(0)
        call.out = out.data_ptr()
        if residual is not None:
            call.residual = residual.data_ptr()
        if num_arranged := self._num_arranged(num_rows):
            arranged = x.new_empty(num_arranged, num_features)
            call.arranged = arranged.data_ptr()
            memory.append(arranged)
        if num_groups := self._packed.num_group_sums:
            sums = x.new_empty(max(num_rows, num_arranged), num_groups, dtype=torch.float32)
            call.group_sums = sums.data_ptr()
            memory.append(sums)
        call.num_threads = torch.get_num_threads()
        launch(self._function, call, *memory)
        return out


def takes(weight: CodedWeight) -> bool:
    """Returns whether the groups of a weight are of whole units."""
    return _inputs_of_group(weight) % _inputs_of_unit(weight) == 0


def _inputs_of_unit(weight: CodedWeight) -> int:
    return 4 if weight.levels is None else 8


def _inputs_of_group(weight: CodedWeight) -> int:
    """Returns the inputs of a group as it is packed: a larger one is in several parts."""
    return math.gcd(weight.group_size, _PART * _inputs_of_unit(weight))


def _packed(weight: torch.Tensor | CodedWeight, panel: int) -> _Packed:
    return _Codes(weight, panel) if isinstance(weight, CodedWeight) else _Numbers(weight, panel)


class _Numbers:
    """Plain weight, float32 or bfloat16."""

    def __init__(self, weight: torch.Tensor, panel: int) -> None:
        self.dtype: Final = weight.dtype
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
        return _rows(self._units, indices).view(self.dtype)


class _Codes:
    """Weight in codes."""

    def __init__(self, weight: CodedWeight, panel: int) -> None:
        name = _FORMATS[weight.codes.dtype]
        self.functions = {
            torch.float32: f"baton_linear_{name}",
            torch.bfloat16: f"baton_linear_{name}_bfloat16",
        }
        self._dtype = weight.codes.dtype
        size, per_unit = _inputs_of_group(weight), _inputs_of_unit(weight)
        if not takes(weight):
            raise ValueError(f"{size} inputs of a group are no multiple of {per_unit}")
        repeated = weight.group_size // size
        self._panels = CodedWeight(
            _in_panels(weight.codes.contiguous().view(torch.int32), panel),
            _in_panels(weight.scales.repeat_interleave(repeated, dim=1), panel),
            None
            if weight.minima is None
            else _in_panels(weight.minima.repeat_interleave(repeated, dim=1), panel),
            weight.levels,
        )
        panels = self._panels
        self.num_group_sums = 0 if panels.minima is None else panels.minima.shape[1]
        self.num_bytes = panels.num_bytes
        self.arguments = {
            "weight": panels.codes.data_ptr(),
            "levels": None if panels.levels is None else panels.levels.data_ptr(),
            "scales": panels.scales.data_ptr(),
            "minima": None if panels.minima is None else panels.minima.data_ptr(),
            "num_units": panels.codes.shape[1],
            "group_units": size // per_unit,
            "out_features": len(weight.codes),
        }

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        panels = self._panels
        minima = None if panels.minima is None else _rows(panels.minima, indices)
        codes, scales = (_rows(each, indices) for each in (panels.codes, panels.scales))
        codes = codes.view(self._dtype)
        return CodedWeight(codes, scales, minima, panels.levels).numbers()


def _in_panels(units: torch.Tensor, panel: int) -> torch.Tensor:
    """Returns what outputs have, `[out_features, n]`, in panels, `[num_panels, n, panel]`; what
    there is no output for is zero."""
    units = F.pad(units, (0, 0, 0, -len(units) % panel))
    return units.view(-1, panel, units.shape[1]).transpose(1, 2).contiguous()


def _rows(panels: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns what some outputs have, `[len(indices), n]`."""
    panel = panels.shape[2]
    return panels[indices // panel, :, indices % panel]
