"""RMSNorm, SiLU-and-multiply and rotary embedding on a CPU by the C library."""

import ctypes
from dataclasses import dataclass
from typing import Final

import torch

from baton_kernels.cpu.arguments import pointer_fields, size_fields
from baton_kernels.cpu.library import KERNELS, load
from baton_kernels.cpu.recording import launch

_SUFFIXES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
DTYPES: Final = frozenset(_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of all positions.

    Attributes:
        table: `[max_len, head_dim / 2, 2]`, cosine and sine of each pair, in the heads' dtype.
        is_adjacent: whether numbers 2i and 2i + 1 of a head are a pair; else i and
            i + head_dim / 2 are.
    """

    table: torch.Tensor
    is_adjacent: bool


class _Norm(ctypes.Structure):
    """Arguments, as `Norm` in rowwise.c."""

    _fields_ = (
        *pointer_fields("x", "weight", "out"),
        *size_fields("num_rows", "num_heads", "width", "stride", "out_stride", "num_threads"),
        ("eps", ctypes.c_float),
    )


class _Activation(ctypes.Structure):
    """Arguments, as `Activation` in rowwise.c."""

    _fields_ = (
        *pointer_fields("gate_up", "out"),
        *size_fields("num_rows", "width", "num_threads"),
    )


class _Turn(ctypes.Structure):
    """Arguments, as `Turn` in rowwise.c."""

    _fields_ = (
        *pointer_fields("heads", "positions", "table"),
        *size_fields("num_rows", "num_heads", "dim", "stride", "num_threads", "is_adjacent"),
    )


class RowwiseKernels:
    """Row-wise operations for tensors of one dtype, of `DTYPES`. Raises `NoLibraryError`."""

    def __init__(self, dtype: torch.dtype) -> None:
        library, suffix = load(KERNELS), _SUFFIXES[dtype]
        self._rms_norm, self._silu, self._rotate = (
            getattr(library, f"baton_{name}_{suffix}")
            for name in ("rms_norm", "silu_and_multiply", "rotate")
        )
        for function in (self._rms_norm, self._silu, self._rotate):
            function.restype = None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns x / sqrt(mean(x^2) + eps) * weight, rounded once: contiguous, of the shape of x.

        Args:
            x: `[num_rows, width]` or `[num_rows, num_heads, width]`; rows may be strided.
            weight: `[width]`.
        """
        return self._norm(x, weight, eps, torch.empty(x.shape, dtype=x.dtype))

    def rms_norm_(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Writes what `rms_norm` returns in place of x. Returns x."""
        return self._norm(x, weight, eps, x)

    def _norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> torch.Tensor:
        num_heads = x.shape[1] if x.ndim == 3 else 1
        pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        sizes = len(x), num_heads, x.shape[-1], x.stride(0), out.stride(0)
        call = _Norm(*pointers, *sizes, torch.get_num_threads(), eps)
        launch(self._rms_norm, call, x, weight, out)
        return out

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up, both rounded to the dtype: `[num_rows, width]`.

        Args:
            gate_up: `[num_rows, 2 * width]`, contiguous, the gate first.
        """
        num_rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(num_rows, width, dtype=gate_up.dtype)
        pointers = gate_up.data_ptr(), out.data_ptr()
        call = _Activation(*pointers, num_rows, width, torch.get_num_threads())
        launch(self._silu, call, gate_up, out)
        return out

    def rotate(
        self, heads: torch.Tensor, positions: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Rotates heads in place by position and returns them.

        Args:
            heads: `[num_tokens, num_heads, head_dim]`; tokens may be strided.
            positions: `[num_tokens]`, int64.
        """
        pointers = heads.data_ptr(), positions.data_ptr(), rotation.table.data_ptr()
        sizes = *heads.shape, heads.stride(0), torch.get_num_threads()
        call = _Turn(*pointers, *sizes, rotation.is_adjacent)
        launch(self._rotate, call, heads, positions, rotation.table)
        return heads
