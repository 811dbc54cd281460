"""RMSNorm, SiLU-and-multiply and rotary embedding on a CPU by the C library."""

import ctypes
from dataclasses import dataclass
from typing import Any, Final

import torch

from baton_kernels.cpu.library import KERNELS, load

_SUFFIXES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
DTYPES: Final = frozenset(_SUFFIXES)
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


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


class RowwiseKernels:
    """Row-wise operations for tensors of one dtype, of `DTYPES`. Raises `NoLibraryError`."""

    def __init__(self, dtype: torch.dtype) -> None:
        suffix = _SUFFIXES[dtype]
        pointers, sizes = [_POINTER] * 3, [_INT64] * 4
        self._rms_norm = _function(f"baton_rms_norm_{suffix}", *pointers, *sizes, ctypes.c_float)
        self._silu = _function(f"baton_silu_and_multiply_{suffix}", *pointers[:2], *sizes[:2])
        self._rotate = _function(f"baton_rotate_{suffix}", *pointers, *sizes, ctypes.c_int)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns x / sqrt(mean(x^2) + eps) * weight, rounded once: contiguous, of the shape of x.

        Args:
            x: `[num_rows, width]` or `[num_rows, num_heads, width]`; rows may be strided.
            weight: `[width]`.
        """
        num_heads = x.shape[1] if x.ndim == 3 else 1
        out = torch.empty(x.shape, dtype=x.dtype)
        pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        sizes = len(x), num_heads, x.shape[-1], x.stride(0)
        self._rms_norm(*pointers, *sizes, eps, torch.get_num_threads())
        return out

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up, both rounded to the dtype: `[num_rows, width]`.

        Args:
            gate_up: `[num_rows, 2 * width]`, contiguous, the gate first.
        """
        num_rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(num_rows, width, dtype=gate_up.dtype)
        pointers = gate_up.data_ptr(), out.data_ptr()
        self._silu(*pointers, num_rows, width, torch.get_num_threads())
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
        sizes = *heads.shape, heads.stride(0)
        self._rotate(*pointers, *sizes, rotation.is_adjacent, torch.get_num_threads())
        return heads


def _function(name: str, *types: Any) -> Any:
    """Returns a function of the library, whose last argument is the number of threads."""
    function = getattr(load(KERNELS), name)
    function.restype, function.argtypes = None, (*types, ctypes.c_int)
    return function
