"""MLP of a decoder layer on Triton kernels: gated, or a mixture of experts (MoE).

The caller passes the dense matrix product; the products of experts are always Baton's kernels,
which are batch-invariant and need no host synchronization, so that CUDA graphs can capture them.
"""

from collections.abc import Callable
from typing import Any

import torch

from baton.engine.executor.models.linear import merged
from baton_kernels.rows.activation import clamped_swiglu, silu_and_multiply
from baton_kernels.rows.expert_choice import choose_experts
from baton_kernels.rows.experts import combine_experts, expert_linear, route

# x, weight, bias -> x @ weight.T + bias
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# `[num_rows, width]` -> `[num_rows, width]`, row by row
Mlp = Callable[[torch.Tensor], torch.Tensor]
_Weights = tuple[torch.Tensor, torch.Tensor | None]


def mlp_of(block: Any, product: Product) -> Mlp:
    """Returns the MLP of a layer. Takes over the weights of `block`, unusable afterwards."""
    match type(block).__name__:
        case "MixtralSparseMoeBlock":
            return _plain_experts(block, product, is_share_of_chosen=True)
        case "Qwen3MoeSparseMoeBlock":
            return _plain_experts(block, product, is_share_of_chosen=block.gate.norm_topk_prob)
        case "GptOssMLP":
            return _clamped_experts(block, product)
        case _:
            return DenseMlp(block, product)


class DenseMlp:
    """Gated MLP for all tokens."""

    def __init__(self, block: Any, product: Product) -> None:
        self._product = product
        self._gate_up = spent(block.gate_proj, block.up_proj)
        self._down = (block.down_proj.weight, block.down_proj.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(silu_and_multiply(self._product(x, *self._gate_up)), *self._down)


class ExpertMlp:
    """Mixture of experts: each token's output is a weighted sum over a few gated MLPs."""

    def __init__(
        self,
        router: _Weights,
        gate_up: _Weights,
        down: _Weights,
        choices: int,
        product: Product,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        is_share_of_chosen: bool,
    ) -> None:
        """
        Args:
            router: weight `[num_experts, width]`.
            gate_up: weights `[num_experts, 2 * depth, width]`, the gate first.
            down: weights `[num_experts, width, depth]`.
            choices: number of experts per token.
            is_share_of_chosen: as in `choose_experts`.
        """
        self._router = router
        self._gate_up = gate_up
        self._down = down
        self._choices = choices
        self._product = product
        self._activation = activation
        self._is_share_of_chosen = is_share_of_chosen

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        chosen, weights = choose_experts(
            self._product(x, *self._router),
            self._choices,
            is_share_of_chosen=self._is_share_of_chosen,
        )
        routing = route(chosen, len(self._router[0]))
        weight, bias = self._gate_up
        middle = self._activation(expert_linear(x, weight, routing, bias))
        weight, bias = self._down
        return combine_experts(expert_linear(middle, weight, routing, bias), weights)


def _plain_experts(block: Any, product: Product, *, is_share_of_chosen: bool) -> ExpertMlp:
    """Returns the experts of Mixtral or Qwen 3, whose weights have the kernels' layout."""
    experts = block.experts
    return ExpertMlp(
        (block.gate.weight, None),
        (experts.gate_up_proj.data.contiguous(), None),
        (experts.down_proj.data.contiguous(), None),
        block.gate.top_k,
        product,
        silu_and_multiply,
        is_share_of_chosen=is_share_of_chosen,
    )


def _clamped_experts(block: Any, product: Product) -> ExpertMlp:
    """Returns the experts of gpt-oss, whose weights are transposed, gate and up interleaved."""
    experts, router = block.experts, block.router
    down = experts.down_proj.data.transpose(1, 2).contiguous()
    experts.down_proj = None
    gate_up = _deinterleave(experts.gate_up_proj.data.transpose(1, 2))
    experts.gate_up_proj = None
    steepness, limit = float(experts.alpha), float(experts.limit)
    return ExpertMlp(
        (router.weight, router.bias),
        (gate_up, _deinterleave(experts.gate_up_proj_bias.data)),
        (down, experts.down_proj_bias.data),
        router.top_k,
        product,
        lambda rows: clamped_swiglu(rows, steepness, limit),
        is_share_of_chosen=True,
    )


def _deinterleave(interleaved: torch.Tensor) -> torch.Tensor:
    """Returns `[num_experts, 2 * depth, ...]` with all gate rows before all up rows."""
    return torch.cat([interleaved[:, ::2], interleaved[:, 1::2]], dim=1)


def spent(*projections: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Merges projections into one. Removes their weights, so that none is in memory twice."""
    together = merged([(p.weight, p.bias) for p in projections])
    for projection in projections:
        projection.weight = projection.bias = None
    return together
