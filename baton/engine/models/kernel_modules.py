"""Modules of a model of transformers whose forward our kernels compute instead.

An RMSNorm is known by the end of its class's name, a gated MLP by its projections, and neither is
taken for it before a probe: on random rows, some so small that eps decides and some so large that a
clamp would show, the kernel has to give what the module gives. Whatever else there is stays as it
is. Modules stay whole: a call of another kind than was probed goes to their own forward.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from baton.engine.models.linear import merged
from baton_kernels.activation import silu_and_multiply
from baton_kernels.launch import FLOATS
from baton_kernels.norm import MAX_WIDTH, add_rms_norm, rms_norm

# Parts of the largest number of a row: modules round on their way, where kernels do not.
_TOLERANCES: Final = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
_ROWS_OF_A_SIZE: Final = 2
_EPS_NAMES: Final = ("variance_epsilon", "eps", "epsilon")


@dataclass(frozen=True, slots=True)
class Swapped:
    """Number of modules of a model that kernels compute."""

    num_norms: int
    num_mlps: int


@torch.no_grad()
def swap_modules(model: nn.Module) -> Swapped:
    """Has our kernels compute what they can of a model, which is on its device. Gate and up
    projections of a swapped MLP become one, which they are views of."""
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
    """The forward of an RMSNorm, of any shape `[..., width]`."""

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
        """Whether the kernel computes it."""
        return x.dtype == self._dtype and x.is_contiguous()

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The norm of the sum of two that the kernel takes; `residual` becomes the sum."""
        normed = add_rms_norm(self._rows(x), self._rows(residual), self._weight, self._eps)
        return normed.view(x.shape)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, len(self._weight))


class _GatedMlp:
    """The forward of a gated MLP, of any shape `[..., hidden_size]`."""

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
    """What computes this module, if it is an RMSNorm: times its weight, or, as in Gemma, times one
    more than that."""
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)), None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if [*module.state_dict()] != ["weight"] or weight is None or weight.dtype not in FLOATS:
        return None
    if weight.ndim != 1 or len(weight) > MAX_WIDTH or eps <= 0:
        return None
    # In float32, where nothing is lost in rounding, and as it is.
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
    """What computes this module, if it is a gated MLP with SiLU."""
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

    # Such that gates are about as large as 1 at the size 1, where SiLU is neither a line nor two.
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
    """The weights and biases of several projections as those of one, of which theirs become parts,
    so that nothing is held twice."""
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
    """Float32 `[1, rows, width]`, some of each size; the same each time."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(sizes), _ROWS_OF_A_SIZE, width, generator=generator)
    rows *= torch.tensor(sizes)[:, None, None]
    return rows.flatten(0, 1)[None].to(device)


def _agree(
    candidate: Callable[[torch.Tensor], torch.Tensor],
    module: nn.Module,
    rows: torch.Tensor,
) -> bool:
    """Whether both make the same of every row."""
    try:
        expected = module(rows)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False  # it wants to be called in another way
    return is_close(candidate(rows), expected)


def is_close(found: Any, expected: Any) -> bool:
    """Whether two are tensors alike, and no row is further apart than rounding takes it."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    difference = (found.float() - expected.float()).abs().amax(-1)
    allowed = _TOLERANCES[expected.dtype] * expected.float().abs().amax(-1)
    return bool((difference <= allowed).all())
