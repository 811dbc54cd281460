"""Matrix products with a fixed weight, packed for the CPU's best routine.

oneDNN's own layout lets it use the widest vector instructions of any x86 or Arm CPU; on many it is
about twice as fast as the BLAS call behind `torch.nn.functional.linear`. Where it is not available,
or for other devices and types, the plain call is used.
"""

import torch
import torch.nn.functional as F


class Linear:
    """y = x @ weight.T + bias. Owns what it needs of the weight; the original may be let go."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Args: weight: `[out_features, in_features]`; bias: `[out_features]`."""
        self._bias = bias
        self._packed = _pack(weight)
        self._weight = None if self._packed is not None else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in_features]` -> `[rows, out_features]`."""
        if self._weight is not None:
            return F.linear(x, self._weight, self._bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, self._bias, "none", [], ""
        )
        return out

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + y, in one call where the library can."""
        if self._weight is not None:
            return self(x).add_(residual)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._packed, self._bias, "add"
        )
        return out


def merged(
    parts: list[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights and biases of several products with one input as those of one product, whose
    output has theirs side by side. Parts without a bias have a bias of zero."""
    weight = torch.cat([w for w, _ in parts])
    if all(b is None for _, b in parts):
        return weight, None
    return weight, torch.cat([b if b is not None else w.new_zeros(len(w)) for w, b in parts])


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's layout, or None where that does not apply."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed
