"""Row-wise operations between the matrix products of a decoder layer, and their form in torch.

`RowwiseKernels` of `baton_kernels` computes the same in C on CPUs.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from baton_kernels.cpu.rowwise import Rotation


class Rowwise(Protocol):
    """Row-wise operations, whose results for a row do not depend on other rows."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns the RMSNorm over the last dimension of x, times `weight`."""
        ...

    def rms_norm_(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Writes what `rms_norm` returns in place of x. Returns x."""
        ...

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up of `[num_rows, 2 * width]`, the gate first."""
        ...

    def rotate(
        self, heads: torch.Tensor, positions: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Returns `[num_tokens, num_heads, head_dim]` rotated by position; may reuse `heads`."""
        ...


class TorchRowwise:
    """Row-wise operations of torch, for any device and dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def rms_norm_(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x.copy_(self.rms_norm(x, weight, eps))

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate(
        self, heads: torch.Tensor, positions: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        angles = rotation.table[positions][:, None]
        if rotation.is_adjacent:
            pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * torch.view_as_complex(angles)).flatten(-2)
        cos, sin = angles.unbind(-1)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
