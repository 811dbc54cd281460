"""Linear layer whose weight is packed into oneDNN's layout on the CPU.

With it oneDNN uses the widest vector instructions of an x86 or Arm CPU; on many it is about twice
as fast as the BLAS call of `torch.nn.functional.linear`, which remains for other devices and dtypes
and if oneDNN is not available.
"""

import torch
import torch.nn.functional as F


class Linear:
    """Linear layer y = x @ weight.T + bias. After packing, the original weight may be freed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Args: weight: `[out_features, in_features]`; bias: `[out_features]`."""
        self._bias = bias
        self._packed = _pack(weight)
        self._weight = None if self._packed is not None else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y, `[rows, out_features]`, for `x`, `[rows, in_features]`."""
        if self._weight is not None:
            return F.linear(x, self._weight, self._bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, self._bias, "none", [], ""
        )
        return out

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns `residual` + y, in one oneDNN call if the weight is packed."""
        if self._weight is not None:
            return self(x).add_(residual)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._packed, self._bias, "add"
        )
        return out


def merged(
    parts: list[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias of one linear layer whose output concatenates those of all parts,
    which have the same input. The bias of a part without one is zero."""
    weight = torch.cat([w for w, _ in parts])
    if all(b is None for _, b in parts):
        return weight, None
    return weight, torch.cat([b if b is not None else w.new_zeros(len(w)) for w, b in parts])


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns the weight in oneDNN's layout, or None if oneDNN does not apply."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed
