"""Llama-shaped decoders (Llama, Mistral, Qwen 2, Qwen 3) with fused projections.

The same arithmetic as transformers' modules in fewer, larger calls: one projection for Q, K and V,
one for gate and up, packed weights, residual adds fused into matrix products, and products and
row-wise operations in C where they are available. In float32 the rows of the Q and K projections
are reordered so that rotated pairs are adjacent, for torch's complex multiplication; scores do not
change, but keys are cached in that order, so `execution` names it and workers that differ do not
pair.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from baton.engine.executor.attention.interface import Attention, LayerAttention, StepBatch
from baton.engine.executor.models.encoder_features import EncoderFeatures
from baton.engine.executor.models.hf import PreTrainedModel
from baton.engine.executor.models.linear import Part, Products
from baton.engine.executor.models.mrope import angles_at, dimensions_of_pairs
from baton.engine.executor.models.quantized.quantized_tensor import in_memory, rows_of
from baton.engine.executor.models.recorded_layers import RecordedLayers, is_short
from baton.engine.executor.models.rowwise import Rowwise
from baton_kernels.cpu.linear import PackedLinear
from baton_kernels.cpu.rowwise import Rotation


class FusedModel:
    """Decoder of fused layers. Takes over the weights of `model`, which is unusable afterwards."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: list[LayerAttention],
        max_len: int,
        rowwise: Rowwise,
        products: Products,
    ) -> None:
        decoder = model.model
        self._rowwise = rowwise
        self._final_norm = _copy_of(decoder.norm.weight)
        self._lm_head, self._embed = _head_and_embedding(model, products)
        is_adjacent = model.dtype == torch.float32
        arrangement = "fused-adjacent" if is_adjacent else "fused-halves"
        self.execution = arrangement + products.execution
        self._rotation = _rotation(decoder, max_len, is_adjacent)
        self._dimensions = dimensions_of_pairs(decoder)
        self.has_mrope = self._dimensions is not None
        self._layers = [
            _FusedLayer(i, layer, attention, is_adjacent, rowwise, products)
            for i, (layer, attention) in enumerate(zip(decoder.layers, layers, strict=True))
        ]
        self._eps = decoder.norm.variance_epsilon
        self._paged: Attention | None = None
        self._recorded = RecordedLayers(self._compute)

    def use(self, paged: Attention | None) -> None:
        """Implements `DecoderModel.use`."""
        self._paged = paged
        self._recorded = RecordedLayers(self._compute)  # of this cache

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logit_rows: torch.Tensor,
        features: EncoderFeatures | None = None,
    ) -> torch.Tensor:
        """Returns logits, as `TransformersModel.forward`."""
        assert self._paged is not None
        hidden = self._embed(token_ids)
        if features is not None:
            features.place(hidden)
        if features is None and positions.ndim == 1 and is_short(batch):
            return self._logits(self._recorded(hidden, positions, batch)[logit_rows])
        rotation, positions = self._rotation_at(positions)
        for i, layer in enumerate(self._layers[:-1]):
            attended = layer.attend(hidden, positions, rotation, self._paged, batch)
            hidden = layer.finish(hidden, attended)
            if features is not None:
                features.add(i, hidden)
        # After the last attention only the rows whose logits are requested are computed.
        attended = self._layers[-1].attend(hidden, positions, rotation, self._paged, batch)
        hidden = self._layers[-1].finish(hidden[logit_rows], attended[logit_rows])
        return self._logits(hidden)

    def _compute(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        """Computes all layers of all tokens."""
        assert self._paged is not None
        for layer in self._layers:
            attended = layer.attend(hidden, positions, self._rotation, self._paged, batch)
            hidden = layer.finish(hidden, attended)
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self._rowwise.rms_norm(hidden, self._final_norm, self._eps)
        logits: torch.Tensor = self._lm_head(normed)
        return logits

    def _rotation_at(self, positions: torch.Tensor) -> tuple[Rotation, torch.Tensor]:
        """Returns a rotary table and positions in it, `[num_tokens]`; positions of three dimensions
        get a table of their own."""
        if self._dimensions is None or positions.ndim == 1:
            return self._rotation, positions
        table = angles_at(positions, self._rotation.table, self._dimensions)
        rows = torch.arange(len(table), device=table.device)
        return replace(self._rotation, table=table), rows


class _FusedLayer:
    """Decoder layer: attention and gated MLP, each with its norm before and residual after."""

    def __init__(
        self,
        index: int,
        layer: Any,
        attention: LayerAttention,
        is_adjacent: bool,
        rowwise: Rowwise,
        products: Products,
    ) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._attention = attention
        self._head_dim: int = attn.head_dim
        self._num_kv_heads = attn.k_proj.out_features // self._head_dim
        self._num_heads = attn.q_proj.out_features // self._head_dim
        self._rowwise = rowwise
        self._input_norm = _copy_of(layer.input_layernorm.weight)
        self._post_norm = _copy_of(layer.post_attention_layernorm.weight)
        self._eps: float = layer.input_layernorm.variance_epsilon
        order = _adjacent_order(self._head_dim) if is_adjacent else slice(None)
        self._qkv = products.layer(
            lambda: [
                _reorder_heads(attn.q_proj, self._head_dim, order),
                _reorder_heads(attn.k_proj, self._head_dim, order),
                _part(attn.v_proj),
            ]
        )
        self._qk_norms = [
            _copy_of(getattr(attn, name).weight[order])
            for name in ("q_norm", "k_norm")
            if hasattr(attn, name)
        ]
        self._out = products.layer(lambda: [_part(attn.o_proj)])
        self._gate_up = products.layer(lambda: [_part(mlp.gate_proj), _part(mlp.up_proj)])
        self._down = products.layer(lambda: [_part(mlp.down_proj)])

    def attend(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rotation: Rotation,
        paged: Attention,
        batch: StepBatch,
    ) -> torch.Tensor:
        """Writes K and V and returns the heads' outputs, `[num_tokens, num_heads * head_dim]`.
        `hidden`: `[num_tokens, hidden_size]`."""
        normed = self._rowwise.rms_norm(hidden, self._input_norm, self._eps)
        query, key, value = self._project(normed, positions, rotation)
        attended = paged.forward(self._index, self._attention, query, key, value, batch)
        return attended.flatten(1)

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Computes output projection, MLP and residuals, row by row: `[rows, hidden_size]`."""
        hidden = self._out.plus(attended, hidden)
        gate_up = self._gate_up(self._rowwise.rms_norm(hidden, self._post_norm, self._eps))
        return self._down.plus(self._rowwise.silu_and_multiply(gate_up), hidden)

    def _project(
        self, normed: torch.Tensor, positions: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns Q and K, rotated, and V, `[num_tokens, heads, head_dim]` each."""
        num_rotated = self._num_heads + self._num_kv_heads
        heads = self._qkv(normed).view(len(normed), -1, self._head_dim)
        rotated, value = heads.split([num_rotated, self._num_kv_heads], dim=1)
        if self._qk_norms:
            heads_of = rotated.split([self._num_heads, self._num_kv_heads], dim=1)
            for of_one, weight in zip(heads_of, self._qk_norms, strict=True):
                self._rowwise.rms_norm_(of_one, weight, self._eps)
        rotated = self._rowwise.rotate(rotated, positions, rotation)
        query, key = rotated.split([self._num_heads, self._num_kv_heads], dim=1)
        return query, key, value


def _head_and_embedding(
    model: PreTrainedModel, products: Products
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the head, and what returns the embeddings of tokens: of a weight that both have in
    common, by rows of the packed one."""
    weight, head = model.model.embed_tokens.weight, model.lm_head
    linear = head
    if not isinstance(head, torch.nn.Identity):
        linear = products.head(lambda: [(head.weight, None)])
        if head.weight is weight and isinstance(linear, PackedLinear):
            return linear, linear.rows_of_weight
    return linear, partial(F.embedding, weight=in_memory(weight))


def _copy_of(weight: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a small weight, without which all of its file would stay mapped."""
    return weight.detach().clone()


def _rotation(decoder: Any, max_len: int, is_adjacent: bool) -> Rotation:
    """Returns the rotary table by position, from the model's own module to keep its scaling."""
    weight = decoder.embed_tokens.weight
    cos, sin = decoder.rotary_emb(weight, torch.arange(max_len, device=weight.device)[None])
    half = cos.shape[-1] // 2
    table = torch.stack([cos[0, :, :half], sin[0, :, :half]], dim=-1)
    return Rotation(table.contiguous(), is_adjacent)


def _adjacent_order(head_dim: int) -> torch.Tensor:
    """Returns the order that makes element i and its rotary partner i + head_dim / 2 adjacent."""
    return torch.arange(head_dim).view(2, -1).t().flatten()


def _part(linear: Any) -> Part:
    return linear.weight, linear.bias


def _reorder_heads(linear: Any, head_dim: int, order: torch.Tensor | slice) -> Part:
    """Returns a projection's weight and bias with each head's outputs in another order."""
    weight, bias = linear.weight, linear.bias
    if isinstance(order, slice):
        return weight, bias
    rows = torch.arange(len(weight)).view(-1, head_dim)[:, order].flatten()
    return rows_of(weight, rows), None if bias is None else bias[rows]
