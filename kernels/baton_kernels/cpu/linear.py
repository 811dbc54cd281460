"""Linear layers on a CPU by the C library, over weights that are packed for it."""

import ctypes
from typing import Final

import torch

from baton_kernels.cpu.arguments import pointer_fields, size_fields
from baton_kernels.cpu.library import KERNELS, load
from baton_kernels.cpu.panels import AnyPanels, panels_of
from baton_kernels.cpu.quantized_weight import QuantizedWeight
from baton_kernels.cpu.recording import launch


class _Call(ctypes.Structure):
    """Arguments of one call, as `Call` in linear.c."""

    _fields_ = (
        *pointer_fields(
            "rows",
            "weight",
            "codebook",
            "scales",
            "minima",
            "bias",
            "residual",
            "out",
            "arranged",
            "group_sums",
        ),
        *size_fields(
            "num_rows",
            "row_stride",
            "num_units",
            "group_units",
            "out_features",
            "out_stride",
            "num_threads",
        ),
    )


class PackedLinear:
    """Linear layer y = x @ weight.T + bias, summed in float32 and rounded once. An output is
    bitwise the same however many rows are computed with it.

    Args:
        weight: `[out_features, in_features]`, float32 or bfloat16, of an even number of inputs if
            bfloat16; or one in codes that `takes` takes. It is copied; panels of one are not.
        bias: `[out_features]`, of `dtype`. It is copied.
        dtype: of x and y, float32 or bfloat16, not narrower than that of a plain weight.

    Attributes:
        panels: the weight.
        bias: in the dtype that it is added in.

    Raises `NoLibraryError` if the library is not available.
    """

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight | AnyPanels,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        library = load(KERNELS)
        # x is converted on CPUs that do not multiply bfloat16.
        is_native = bool(library.baton_linear_multiplies_bfloat16())
        self.dtype: Final = dtype
        self._computed = dtype if is_native else torch.float32
        if isinstance(weight, torch.Tensor | QuantizedWeight):
            weight = panels_of(weight, library.baton_linear_panel())
        self.panels: Final = weight
        self._function = getattr(library, weight.functions[self._computed])
        self._function.restype = None
        self._num_arranged = library.baton_linear_arranged_rows
        self._num_arranged.argtypes, self._num_arranged.restype = [ctypes.c_int64], ctypes.c_int64
        self.bias: Final = None if bias is None else bias.detach().to(self._computed, copy=True)
        fixed = _Call(**weight.arguments)
        fixed.bias = None if self.bias is None else self.bias.data_ptr()
        self._fixed = bytes(fixed)
        self._in_features = weight.in_features
        self._num_group_sums = weight.num_group_sums

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y, `[rows, out_features]`, for `x`, `[rows, in_features]`."""
        return self.write(x, x.new_empty(len(x), self.panels.out_features))

    def write(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes y to `out`, `[rows, out_features]`, whose rows may be strided. Returns it."""
        if self._computed is self.dtype:
            return self._multiply(x, None, out)
        wide = x.new_empty(out.shape, dtype=self._computed)
        return out.copy_(self._multiply(x.to(self._computed), None, wide))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns `residual`, `[rows, out_features]`, plus y, which is rounded before."""
        if self._computed is self.dtype:
            out = x.new_empty(len(x), self.panels.out_features)
            return self._multiply(x, residual.contiguous(), out)
        return self(x).add_(residual)

    def rows_of_weight(self, indices: torch.Tensor) -> torch.Tensor:
        """Returns rows of the weight, `[len(indices), in_features]`, in the dtype of x."""
        return self.panels.rows(indices).to(self.dtype)

    def _multiply(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, num_features = x.shape
        if num_features != self._in_features:  # others would be read beyond their end
            raise ValueError(f"rows have {num_features} inputs; the weight has {self._in_features}")
        memory: list[torch.Tensor | None] = [x, residual, out]
        call = _Call.from_buffer_copy(self._fixed)
        call.rows, call.num_rows, call.row_stride = x.data_ptr(), num_rows, x.stride(0)
        call.out, call.out_stride = out.data_ptr(), out.stride(0)
        if residual is not None:
            call.residual = residual.data_ptr()
        if num_arranged := self._num_arranged(num_rows):
            arranged = x.new_empty(num_arranged, num_features)
            call.arranged = arranged.data_ptr()
            memory.append(arranged)
        if num_groups := self._num_group_sums:
            sums = x.new_empty(num_rows, num_groups, dtype=torch.float32)
            call.group_sums = sums.data_ptr()
            memory.append(sums)
        call.num_threads = torch.get_num_threads()
        launch(self._function, call, *memory)
        return out
