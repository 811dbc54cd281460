"""Kernel replacements for RMSNorm and gated MLP modules of a model of transformers.

An RMSNorm is recognized by the end of its class name, a gated MLP by its projections; a probe then
has to confirm it: on random rows, some so small that eps dominates and some so large that a clamp
would show, the kernel's output has to match the module's. Other modules stay unchanged. A call of a
form that was not probed goes to the module's own forward.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from baton.engine.executor.models.linear import merged
from baton_kernels.launch import FLOATS
from baton_kernels.rows.activation import silu_and_multiply
from baton_kernels.rows.norm import MAX_WIDTH, add_rms_norm, rms_norm

# Relative to the largest number of a row: modules round intermediate results, kernels do not.
_TOLERANCES: Final = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
_ROWS_OF_A_SIZE: Final = 2
_EPS_NAMES: Final = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True, slots=True)
class Swapped:
    """Number of modules that were swapped for kernels."""

    num_norms: int
    num_mlps: int


@torch.no_grad()
def swap_modules(model: nn.Module) -> Swapped:
    """Replaces the forward of every module that a kernel can compute; the model is on its device.
    Merges gate and up projections of a swapped MLP into one weight, of which they become views."""
    num_norms = num_mlps = 0
    for module in model.modules():
        if (norm := _as_norm(module)) is not None:
            module.forward = norm
            num_norms += 1
        elif (mlp := _as_gated_mlp(module)) is not None:
            module.forward = mlp
            num_mlps += 1
    return Swapped(num_norms, num_mlps)


class KernelNorm:
    """RMSNorm forward on a kernel, for any shape `[..., width]`."""

    def __init__(self, module: nn.Module, weight: torch.Tensor, eps: float) -> None:
        self._otherwise: Callable[..., Any] = module.forward
        self._dtype = next(module.parameters()).dtype
        self._weight = weight
        self._eps = eps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not self.takes(args[0]):
            return self._otherwise(*args, **kwargs)
        return rms_norm(self._rows(args[0]), self._weight, self._eps).view(args[0].shape)

    def takes(self, x: torch.Tensor) -> bool:
        """Returns whether the kernel can compute `x`."""
        return x.dtype == self._dtype and x.is_contiguous()

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Returns the norm of `x` + `residual`, both of which `takes` accepts; writes the sum into
        `residual`."""
        normed = add_rms_norm(self._rows(x), self._rows(residual), self._weight, self._eps)
        return normed.view(x.shape)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, len(self._weight))


class _GatedMlp:
    """Gated MLP forward on a kernel, for any shape `[..., hidden_size]`."""

    def __init__(self, module: nn.Module, gate_up: Sequence[nn.Linear], down: nn.Linear) -> None:
        self._otherwise: Callable[..., Any] = module.forward
        self._weight, self._bias = _one_product(gate_up)
        self._down = down

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return self._otherwise(*args, **kwargs)
        product = F.linear(args[0], self._weight, self._bias)
        middle = silu_and_multiply(product.view(-1, product.shape[-1]))
        return self._down(middle.view(*product.shape[:-1], middle.shape[-1]))


def _as_norm(module: nn.Module) -> KernelNorm | None:
    """Returns the kernel's forward if the module is an RMSNorm: times its weight, or, as in Gemma,
    times one plus its weight."""
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)), None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if [*module.state_dict()] != ["weight"] or weight is None or weight.dtype not in FLOATS:
        return None
    if weight.ndim != 1 or len(weight) > MAX_WIDTH or eps <= 0:
        return None
    # Compared in float32, where rounding hides nothing, and in its own dtype.
    exact = copy.deepcopy(module).float()
    for factor in (weight.detach(), 1 + weight.detach().float()):
        candidate = KernelNorm(module, factor, eps)
        in_float32 = KernelNorm(exact, factor.float(), eps)
        sizes = (1.0, 30.0, eps**0.5, 0.1 * eps**0.5)
        rows = _random_rows(len(weight), sizes, weight.device)
        if _agree(in_float32, exact, rows) and _agree(candidate, module, rows.to(weight.dtype)):
            return candidate
    return None


def _as_gated_mlp(module: nn.Module) -> _GatedMlp | None:
    """Returns the kernel's forward if the module is a gated MLP with SiLU."""
    names = ("gate_up_proj",) if hasattr(module, "gate_up_proj") else ("gate_proj", "up_proj")
    *gate_up, down = (getattr(module, name, None) for name in (*names, "down_proj"))
    if not _are_linear(gate_up) or type(down) is not nn.Linear:
        return None
    if sum(part.out_features for part in gate_up) != 2 * down.in_features:
        return None
    if len({part.in_features for part in gate_up}) > 1:
        return None
    if down.weight.dtype not in FLOATS:
        return None

    def unmerged(x: torch.Tensor) -> torch.Tensor:
        product = torch.cat([part(x) for part in gate_up], dim=-1)
        middle = silu_and_multiply(product.flatten(0, -2))
        out: torch.Tensor = down(middle).unflatten(0, x.shape[:-1])
        return out

    # Scaled so that gates are about 1 at size 1, where SiLU is clearly nonlinear.
    width, device, dtype = gate_up[0].in_features, down.weight.device, down.weight.dtype
    rows = _random_rows(width, (1.0,), device).to(dtype)
    unit = float(gate_up[0](rows)[..., : down.in_features].float().std().clamp(min=1e-3))
    rows = _random_rows(width, [size / unit for size in (0.5, 1.0, 2.0, 32.0)], device)
    if not _agree(unmerged, module, rows.to(dtype)):
        return None
    return _GatedMlp(module, gate_up, down)


def _are_linear(parts: list[Any]) -> TypeGuard[list[nn.Linear]]:
    return all(type(part) is nn.Linear for part in parts)


def _one_product(parts: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Merges the weights and biases of projections into one; theirs become views of it, so that
    none is in memory twice."""
    if len(parts) == 1:
        return parts[0].weight.detach(), parts[0].bias
    weight, bias = merged([(part.weight.detach(), part.bias) for part in parts])
    begin = 0
    for part in parts:
        end = begin + part.out_features
        part.weight.data = weight[begin:end]
        if part.bias is not None and bias is not None:
            part.bias.data = bias[begin:end]
        begin = end
    return weight, bias


def _random_rows(width: int, sizes: Sequence[float], device: torch.device) -> torch.Tensor:
    """Returns float32 `[1, rows, width]`, some rows of each size; the same on each call."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(sizes), _ROWS_OF_A_SIZE, width, generator=generator)
    rows *= torch.tensor(sizes)[:, None, None]
    return rows.flatten(0, 1)[None].to(device)


def _agree(
    candidate: Callable[[torch.Tensor], torch.Tensor],
    module: nn.Module,
    rows: torch.Tensor,
) -> bool:
    """Returns whether both give the same result for every row, up to rounding."""
    try:
        expected = module(rows)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False  # the module takes other arguments
    return is_close(candidate(rows), expected)


def is_close(found: Any, expected: Any) -> bool:
    """Returns whether both are tensors of one shape and dtype, with rows equal up to rounding."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    difference = (found.float() - expected.float()).abs().amax(-1)
    allowed = _TOLERANCES[expected.dtype] * expected.float().abs().amax(-1)
    return bool((difference <= allowed).all())
