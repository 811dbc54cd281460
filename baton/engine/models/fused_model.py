"""Llama-shaped decoders (Llama, Mistral, Qwen 2, Qwen 3) with fused projections.

The same arithmetic as transformers' modules in fewer, larger calls: one projection for Q, K and V,
one for gate and up, packed weights, residual adds fused into matrix products, and, in float32, the
rotary embedding as one complex multiplication. For that, the rows of the Q and K projections are
reordered so that rotated pairs are adjacent; scores do not change, but keys are cached in that
order, so `execution` names it and workers that differ do not pair.
"""

from typing import Any

import torch
import torch.nn.functional as F

from baton.engine.attention.interface import Attention, LayerAttention, StepBatch
from baton.engine.models.hf import PreTrainedModel
from baton.engine.models.linear import Linear, merged


class FusedModel:
    """Decoder of fused layers. Takes over the weights of `model`, which is unusable afterwards."""

    def __init__(self, model: PreTrainedModel, layers: list[LayerAttention], max_len: int) -> None:
        decoder = model.model
        self._embedding = decoder.embed_tokens.weight
        self._final_norm = decoder.norm.weight
        head = model.lm_head
        self._lm_head = head if isinstance(head, torch.nn.Identity) else Linear(head.weight)
        self._pairs_adjacent = self._embedding.dtype == torch.float32
        self.execution = "fused-adjacent" if self._pairs_adjacent else "fused-halves"
        self._rotary = _Rotary(decoder, max_len, self._pairs_adjacent)
        self._layers = [
            _FusedLayer(i, layer, attention, self._pairs_adjacent)
            for i, (layer, attention) in enumerate(zip(decoder.layers, layers, strict=True))
        ]
        self._eps = decoder.norm.variance_epsilon
        self._paged: Attention | None = None

    def use(self, paged: Attention) -> None:
        """Sets the attention over the paged KV cache."""
        self._paged = paged

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """Returns logits, as `TransformersModel.forward`."""
        assert self._paged is not None
        hidden = F.embedding(token_ids, self._embedding)
        rotation = self._rotary.at(positions)
        for layer in self._layers[:-1]:
            attended = layer.attend(hidden, rotation, self._paged, batch)
            hidden = layer.finish(hidden, attended)
        # After the last attention only the rows whose logits are requested are computed.
        attended = self._layers[-1].attend(hidden, rotation, self._paged, batch)
        hidden = self._layers[-1].finish(hidden[logit_rows], attended[logit_rows])
        logits: torch.Tensor = self._lm_head(_rms_norm(hidden, self._final_norm, self._eps))
        return logits


class _Rotary:
    """Rotary table by position, from the model's own rotary module, so that scaling is kept."""

    def __init__(self, decoder: Any, max_len: int, pairs_adjacent: bool) -> None:
        weight = decoder.embed_tokens.weight
        positions = torch.arange(max_len, device=weight.device)[None]
        cos, sin = decoder.rotary_emb(weight, positions)
        half = cos.shape[-1] // 2
        if pairs_adjacent:
            self._table = torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]
        else:
            self._table = torch.stack([cos[0], sin[0]], dim=1)[:, :, None]

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns `[num_tokens, 1, head_dim / 2]` complex, or `[num_tokens, 2, 1, head_dim]` (cos,
        sin)."""
        return self._table[positions]


class _FusedLayer:
    """Decoder layer: attention and gated MLP, each with its norm before and residual after."""

    def __init__(
        self, index: int, layer: Any, attention: LayerAttention, pairs_adjacent: bool
    ) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._attention = attention
        self._head_dim: int = attn.head_dim
        self._num_kv_heads = attn.k_proj.out_features // self._head_dim
        self._num_heads = attn.q_proj.out_features // self._head_dim
        self._pairs_adjacent = pairs_adjacent
        self._input_norm = layer.input_layernorm.weight
        self._post_norm = layer.post_attention_layernorm.weight
        self._eps: float = layer.input_layernorm.variance_epsilon
        order = _adjacent_order(self._head_dim) if pairs_adjacent else slice(None)
        self._qkv = Linear(
            *merged(
                [
                    _reorder_heads(attn.q_proj, self._head_dim, order),
                    _reorder_heads(attn.k_proj, self._head_dim, order),
                    (attn.v_proj.weight, attn.v_proj.bias),
                ]
            )
        )
        self._qk_norms = [
            getattr(attn, name).weight[order]
            for name in ("q_norm", "k_norm")
            if hasattr(attn, name)
        ]
        self._out = Linear(attn.o_proj.weight, attn.o_proj.bias)
        self._gate_up = Linear(*merged([(p.weight, p.bias) for p in (mlp.gate_proj, mlp.up_proj)]))
        self._down = Linear(mlp.down_proj.weight, mlp.down_proj.bias)

    def attend(
        self,
        hidden: torch.Tensor,
        rotation: torch.Tensor,
        paged: Attention,
        batch: StepBatch,
    ) -> torch.Tensor:
        """Writes K and V and returns the heads' outputs, `[num_tokens, num_heads * head_dim]`.
        `hidden`: `[num_tokens, hidden_size]`."""
        query, key, value = self._project(_rms_norm(hidden, self._input_norm, self._eps), rotation)
        attended = paged.forward(self._index, self._attention, query, key, value, batch)
        return attended.flatten(1)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Computes output projection, MLP and residuals, row by row: `[rows, hidden_size]`."""
        hidden = self._out.plus(attended, hidden)
        gate, up = self._gate_up(_rms_norm(hidden, self._post_norm, self._eps)).chunk(2, dim=-1)
        return self._down.plus(F.silu(gate).mul_(up), hidden)

    def _project(
        self, normed: torch.Tensor, rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns Q and K, rotated, and V, `[num_tokens, heads, head_dim]` each."""
        num_rotated = self._num_heads + self._num_kv_heads
        heads = self._qkv(normed).view(len(normed), -1, self._head_dim)
        rotated, value = heads.split([num_rotated, self._num_kv_heads], dim=1)
        if self._qk_norms:
            query, key = rotated.split([self._num_heads, self._num_kv_heads], dim=1)
            normed_heads = [
                _rms_norm(t, w, self._eps)
                for t, w in zip((query, key), self._qk_norms, strict=True)
            ]
            rotated = torch.cat(normed_heads, dim=1)
        rotated = self._rotate(rotated, rotation)
        query, key = rotated.split([self._num_heads, self._num_kv_heads], dim=1)
        return query, key, value

    def _rotate(self, heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        if self._pairs_adjacent:
            pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * rotation).flatten(-2)
        cos, sin = rotation.unbind(1)
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _adjacent_order(head_dim: int) -> torch.Tensor:
    """Returns the order that makes element i and its rotary partner i + head_dim / 2 adjacent."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


def _reorder_heads(
    linear: Any, head_dim: int, order: torch.Tensor | slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a projection's weight and bias with each head's outputs in another order."""
    weight = linear.weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
    bias = linear.bias
    if bias is not None:
        bias = bias.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
    return weight, bias


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)
