"""Linear layers on a CPU by the C library, over weights that are packed for it."""

import ctypes
from typing import Final

import torch
import torch.nn.functional as F

from baton_kernels.cpu.library import KERNELS, load

# By the dtypes of rows and weight.
_FUNCTIONS: Final = {
    (torch.float32, torch.float32): "baton_linear_float32",
    (torch.float32, torch.bfloat16): "baton_linear_bfloat16_weight",
    (torch.bfloat16, torch.bfloat16): "baton_linear_bfloat16",
}


class _Call(ctypes.Structure):
    """Arguments of one call, as `Call` in linear.c."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("arranged", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("num_units", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


class PackedLinear:
    """Linear layer y = x @ weight.T + bias, summed in float32 and rounded once. An output is
    bitwise the same however many rows are computed with it.

    Args:
        weight: `[out_features, in_features]`, float32 or bfloat16, of an even number of inputs if
            bfloat16. It is copied.
        bias: `[out_features]`, of `dtype`. It is copied.
        dtype: of x and y, float32 or bfloat16, not narrower than that of the weight.

    Raises `NoLibraryError` if the library is not available.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        library = load(KERNELS)
        # x is converted on CPUs that do not multiply bfloat16.
        is_native = bool(library.baton_linear_multiplies_bfloat16())
        self._dtype, self._computed = dtype, dtype if is_native else torch.float32
        self._function = getattr(library, _FUNCTIONS[self._computed, weight.dtype])
        self._function.restype = None
        self._num_arranged = library.baton_linear_arranged_rows
        self._num_arranged.argtypes, self._num_arranged.restype = [ctypes.c_int64], ctypes.c_int64
        self._out_features = len(weight)
        self.weight_dtype: Final = weight.dtype
        self._packed = _packed(weight, library.baton_linear_panel())
        self._bias = None if bias is None else bias.detach().to(self._computed, copy=True)
        self._fixed = bytes(
            _Call(
                weight=self._packed.data_ptr(),
                bias=None if self._bias is None else self._bias.data_ptr(),
                num_units=self._packed.shape[1],
                out_features=len(weight),
            )
        )

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
        panel = self._packed.shape[2]
        units = self._packed[indices // panel, :, indices % panel]
        return units.view(self.weight_dtype).to(self._dtype)

    def _multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, num_features = x.shape
        out = x.new_empty(num_rows, self._out_features)
        call = _Call.from_buffer_copy(self._fixed)
        call.rows, call.num_rows, call.row_stride = x.data_ptr(), num_rows, x.stride(0)
        call.out = out.data_ptr()
        if residual is not None:
            call.residual = residual.data_ptr()
        if num_arranged := self._num_arranged(num_rows):
            arranged = x.new_empty(num_arranged, num_features)
            call.arranged = arranged.data_ptr()
        call.num_threads = torch.get_num_threads()
        self._function(ctypes.byref(call))
        return out


def _packed(weight: torch.Tensor, panel: int) -> torch.Tensor:
    """Returns a weight in panels, `[num_panels, num_units, panel]` of 32 bits each; what there is
    no output for is zero."""
    units = weight.contiguous().view(torch.int32)
    units = F.pad(units, (0, 0, 0, -len(units) % panel))
    return units.view(-1, panel, units.shape[1]).transpose(1, 2).contiguous()
