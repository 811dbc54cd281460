"""Sampling parameters of a batch's rows, as the sampling kernels read them."""

from dataclasses import dataclass
from typing import Final

import torch

from baton_kernels.launch import check_dtype, check_packed, check_shape


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of each row on the device, `[num_rows]` each, contiguous.

    Attributes:
        temperature: float32; 0 takes the most likely token and ignores all else.
        top_k: int32, in [1, vocab_size]; vocab_size keeps all.
        top_p: float64, in (0, 1]; 1 keeps all.
        min_p: float64, in [0, 1]; 0 keeps all.
        seeds: int64, the bits of the unsigned seed.
        sequence_indices: int64, index of the sequence in its request.
        positions: int64, position of the token in the output.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    sequence_indices: torch.Tensor
    positions: torch.Tensor


_TYPES: Final = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float64,
    "min_p": torch.float64,
    "seeds": torch.int64,
    "sequence_indices": torch.int64,
    "positions": torch.int64,
}
# Their types as arguments of the kernels.
ROW_SIGNATURE: Final = {
    "temperatures": "*fp32",
    "top_ks": "*i32",
    "top_ps": "*fp64",
    "min_ps": "*fp64",
    "seeds": "*i64",
    "indices": "*i64",
    "positions": "*i64",
}


def check_rows(rows: SamplingRows, num_rows: int) -> None:
    """Raises `ValueError` unless every column is of its type and as long as the batch."""
    for name, dtype in _TYPES.items():
        column = getattr(rows, name)
        check_shape(name, column, (num_rows,))
        check_dtype(name, column, dtype)
        check_packed(name, column)
