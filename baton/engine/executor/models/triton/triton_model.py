"""Llama-shaped decoders on Triton kernels: the GPU counterpart of `fused_model`.

Each layer has four matrix products and, between them, four passes over the activations: rotary
embedding and cache write, attention, the gate, and each norm fused with the residual before it.
Layers with experts have more of both (`triton_mlp`). The products are the library's; in
deterministic mode Baton's own, which are batch-invariant.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from baton.engine.executor.attention.interface import LayerAttention
from baton.engine.executor.models.encoder_features import EncoderFeatures
from baton.engine.executor.models.hf import PreTrainedModel
from baton.engine.executor.models.mrope import angles_at, dimensions_of_pairs
from baton.engine.executor.models.triton.triton_mlp import Product, mlp_of, spent
from baton_kernels.rows.linear import linear
from baton_kernels.rows.norm import add_rms_norm, rms_norm
from baton_kernels.rows.rotary import HeadNorms, Rotation, rotate_and_write


class PagedLayers(Protocol):
    """Paged attention of a model on Triton kernels; `TritonAttention` implements it."""

    def blocks(self, index: int) -> Any:
        """Returns the K and V blocks of a layer, for writing."""
        ...

    def slots(self, index: int, batch: Any) -> torch.Tensor:
        """Returns the slots of a step's tokens in that layer's pool, `[num_tokens]`."""
        ...

    def attend(
        self, index: int, layer: LayerAttention, query: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        """Returns the attention of queries whose K and V are already in the cache: `[num_tokens,
        num_heads, dim]`."""
        ...


def library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns the library's product, the fastest; a row's result may depend on the batch."""
    return F.linear(x, weight, bias)


def batch_invariant(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns the batch-invariant product: a row does not depend on other rows or their number."""
    return linear(x, weight, bias)


class TritonModel:
    """Decoder on Triton kernels. Takes over the weights of `model`, unusable afterwards."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: list[LayerAttention],
        max_len: int,
        product: Product = library,
    ) -> None:
        # Workers pair only if they compute bitwise the same.
        self.execution = "fused-halves" + "-invariant" * (product is batch_invariant)
        decoder = model.model
        self._embedding = decoder.embed_tokens.weight
        self._final_norm = decoder.norm.weight
        self._eps: float = decoder.norm.variance_epsilon
        self._lm_head = getattr(model.lm_head, "weight", None)  # None: removed
        self._product = product
        self._rotation = _rotation(decoder, max_len)
        self._dimensions = dimensions_of_pairs(decoder)
        self.has_mrope = self._dimensions is not None
        self._layers = [
            _Layer(i, layer, attention, product)
            for i, (layer, attention) in enumerate(zip(decoder.layers, layers, strict=True))
        ]
        self._paged: PagedLayers | None = None

    def use(self, paged: Any) -> None:
        """Implements `DecoderModel.use`."""
        self._paged = paged

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: Any,
        logit_rows: torch.Tensor,
        features: EncoderFeatures | None = None,
    ) -> torch.Tensor:
        """Returns logits, as `TransformersModel.forward`."""
        assert self._paged is not None
        stream = F.embedding(token_ids, self._embedding)
        if features is not None:
            features.place(stream)
        normed = rms_norm(stream, self._layers[0].input_norm, self._eps)
        norms = [layer.input_norm for layer in self._layers[1:]] + [self._final_norm]
        rotation, positions = self._rotation_at(positions)
        for i, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            attended = layer.attend(normed, positions, rotation, self._paged, batch)
            if layer is self._layers[-1]:
                # After the last attention only rows whose logits are requested are computed.
                stream, attended = stream[logit_rows], attended[logit_rows]
            normed = layer.finish(attended, stream, next_norm)
            if features is not None and features.add(i, stream):
                normed = rms_norm(stream, next_norm, self._eps)
        return normed if self._lm_head is None else self._product(normed, self._lm_head, None)

    def _rotation_at(self, positions: torch.Tensor) -> tuple[Rotation, torch.Tensor]:
        """Returns a rotary table and positions in it, as `FusedModel._rotation_at`."""
        if self._dimensions is None or positions.ndim == 1:
            return self._rotation, positions
        table = self._rotation.table.transpose(1, 2)
        angles = angles_at(positions, table, self._dimensions).transpose(1, 2).contiguous()
        rows = torch.arange(len(angles), device=angles.device)
        return replace(self._rotation, table=angles), rows


class _Layer:
    """Decoder layer. Adds to the residual stream in place, fused with the norm that follows."""

    def __init__(
        self,
        index: int,
        layer: Any,
        attention: LayerAttention,
        product: Product,
    ) -> None:
        attn = layer.self_attn
        self._index = index
        self._attention = attention
        self._product = product
        self._head_dim: int = attn.head_dim
        self._heads = [
            p.out_features // self._head_dim for p in (attn.q_proj, attn.k_proj, attn.v_proj)
        ]
        self.input_norm = layer.input_layernorm.weight
        self._post_norm = layer.post_attention_layernorm.weight
        self._eps: float = layer.input_layernorm.variance_epsilon
        self._qkv = spent(attn.q_proj, attn.k_proj, attn.v_proj)
        self._out = (attn.o_proj.weight, attn.o_proj.bias)
        self._mlp = mlp_of(layer.mlp, product)
        self._norms: HeadNorms | None = None
        if hasattr(attn, "q_norm"):
            self._norms = HeadNorms(attn.q_norm.weight, attn.k_norm.weight, self._eps)

    def attend(
        self,
        normed: torch.Tensor,
        positions: torch.Tensor,
        rotation: Rotation,
        paged: PagedLayers,
        batch: Any,
    ) -> torch.Tensor:
        """Writes K and V and returns the heads' outputs, `[num_tokens, num_heads * head_dim]`.
        `normed`: `[num_tokens, hidden_size]`."""
        heads = self._product(normed, *self._qkv).view(len(normed), -1, self._head_dim)
        query, key, value = heads.split(self._heads, dim=1)
        query = rotate_and_write(
            query,
            key,
            value,
            positions,
            rotation,
            paged.blocks(self._index),
            paged.slots(self._index, batch),
            self._norms,
        )
        return paged.attend(self._index, self._attention, query, batch).flatten(1)

    def finish(
        self, attended: torch.Tensor, stream: torch.Tensor, next_norm: torch.Tensor
    ) -> torch.Tensor:
        """Computes output projection, MLP and residuals, row by row: adds to `stream` and returns
        it under the next layer's norm, `[rows, hidden_size]`."""
        out = self._product(attended, *self._out)
        normed = add_rms_norm(out, stream, self._post_norm, self._eps)
        return add_rms_norm(self._mlp(normed), stream, next_norm, self._eps)


def _rotation(decoder: Any, max_len: int) -> Rotation:
    """Returns the rotary table by position, from the model's own module to keep its scaling."""
    weight = decoder.embed_tokens.weight
    cos, sin = decoder.rotary_emb(weight.float(), torch.arange(max_len, device=weight.device)[None])
    half = len(decoder.rotary_emb.inv_freq)  # gpt-oss has each angle once, the others twice
    return Rotation(torch.stack([cos[0, :, :half], sin[0, :, :half]], dim=1).contiguous())
