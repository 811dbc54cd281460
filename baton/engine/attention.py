"""Attention over the paged pool in torch, for one ragged batch of prefill chunks and decodes.

There is no padding across the batch: the queries of all sequences lie in one flat `[num_tokens]`.
Sequences are put into a few groups of similar length; a group is one gather and one attention call
per layer. Knows nothing of models beyond a layer's number, scale and mask rule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.engine.kv_pool import KvPool
from baton.engine.mask_rule import MaskRule

# Two groups are merged when the padding this adds, in cached tokens read, costs less than a call.
MERGE_WASTE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """One sequence of a step: rows [row, row + num_queries) of the batch are its tokens
    [context_len - num_queries, context_len), whose KV and all before it is in `block_ids`."""

    row: int
    num_queries: int
    context_len: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer's attention needs beside its tensors.

    Attributes:
        scale: factor of the scores.
        rule: which tokens are seen.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: `[num_heads]` logits that take part in the softmax and carry no value.
    """

    scale: float
    rule: MaskRule
    softcap: float | None = None
    sinks: torch.Tensor | None = None


Rows = slice | torch.Tensor


class _Group:
    """Sequences with equally many queries and similarly long contexts.

    `rows`: where the group's queries lie in the flat batch: a slice where they are neighbours.
    """

    def __init__(self, spans: list[QuerySpan], pool: KvPool, device: torch.device) -> None:
        block_size = pool.layout.block_size
        self.batch = len(spans)
        self.num_queries = spans[0].num_queries
        width = max(_num_blocks(s.context_len, block_size) for s in spans)
        self.num_keys = width * block_size
        self.table = torch.tensor(
            [b for s in spans for b in _table(s, width, pool)],
            dtype=torch.int64,
            device=device,
        )
        self.rows = _rows(spans, device)
        context = torch.tensor([s.context_len for s in spans], device=device)
        # Position of each query within its sequence: [batch, num_queries].
        steps = torch.arange(self.num_queries, device=device)
        self._positions = (context - self.num_queries)[:, None] + steps
        self._biases: dict[tuple[MaskRule, torch.dtype, int], torch.Tensor] = {}

    def bias(self, rule: MaskRule, dtype: torch.dtype, repeats: int) -> torch.Tensor:
        """What is added to the scores: 0 for keys a query sees, else -inf.

        `[batch, 1, num_queries * repeats, num_keys]`, each query's row `repeats` times.
        """
        key = (rule, dtype, repeats)
        if key not in self._biases:
            keys = torch.arange(self.num_keys, device=self.table.device)
            seen = keys <= self._positions[:, :, None]
            if rule.window is not None:
                seen &= keys > self._positions[:, :, None] - rule.window
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            bias = bias.masked_fill_(~seen, -math.inf).repeat_interleave(repeats, dim=1)
            self._biases[key] = bias[:, None]
        return self._biases[key]


class AttentionBatch:
    """One step's attention, the same for all layers: where to write and what to read.

    Making one clears the blocks that the step enters without filling them.
    """

    def __init__(self, spans: Sequence[QuerySpan], pool: KvPool, device: torch.device) -> None:
        block_size = pool.layout.block_size
        blocks, offsets = [], []
        for span in spans:
            for position in range(span.context_len - span.num_queries, span.context_len):
                blocks.append(span.block_ids[position // block_size])
                offsets.append(position % block_size)
        pool.clear_blocks([b for s in spans for b in _fresh_tail(s, block_size)])
        places = torch.tensor([blocks, offsets], dtype=torch.int64, device=device)
        self.blocks, self.offsets = places
        self.num_rows = len(blocks)
        self.groups = [_Group(g, pool, device) for g in _grouped(spans, block_size)]
        self._slots: dict[int, torch.Tensor] = {}

    def slots(self, rows_per_block: int, first_row: int) -> torch.Tensor:
        """Row of the pool for each token: `[num_tokens]`."""
        if rows_per_block not in self._slots:
            self._slots[rows_per_block] = self.blocks * rows_per_block + self.offsets
        return self._slots[rows_per_block] + first_row


class PagedAttention:
    """Writes K and V of a step into the pool and attends over it."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._block_size = pool.layout.block_size

    def forward(
        self,
        index: int,
        layer: LayerAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """One layer.

        Args:
            index: which layer of the pool.
            query: `[num_tokens, num_heads, key_head_dim]`.
            key: `[num_tokens, num_kv_heads, key_head_dim]`, positions already in it.
            value: `[num_tokens, num_kv_heads, value_head_dim]`.

        Returns `[num_tokens, num_heads, value_head_dim]`.
        """
        self._write(index, key, value, batch)
        if len(batch.groups) == 1 and isinstance(batch.groups[0].rows, slice):
            return self._attend(index, layer, query, batch.groups[0])
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for group in batch.groups:
            out[group.rows] = self._attend(index, layer, query[group.rows], group)
        return out

    def _write(
        self, index: int, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> None:
        cache = self._pool.layers[index]
        if cache.has_rows:
            key_rows = batch.slots(cache.key_rows_per_block, cache.first_key_row)
            value_rows = batch.slots(cache.value_rows_per_block, cache.first_value_row)
            cache.key_rows.index_copy_(0, key_rows, key.flatten(1))
            cache.value_rows.index_copy_(0, value_rows, value.flatten(1))
            return
        for blocks, tensor in ((cache.key_blocks, key), (cache.value_blocks, value)):
            width = tensor.shape[1] * tensor.shape[2]
            columns = torch.arange(width, device=tensor.device) + batch.offsets[:, None] * width
            blocks[batch.blocks[:, None], columns] = tensor.flatten(1)

    def _attend(
        self, index: int, layer: LayerAttention, query: torch.Tensor, group: _Group
    ) -> torch.Tensor:
        """Attention of one group; `query` is `[batch * num_queries, num_heads, key_head_dim]`."""
        cache = self._pool.layers[index]
        shape = (group.batch, group.num_keys, cache.num_kv_heads, -1)
        keys = cache.key_blocks.index_select(0, group.table).view(shape).transpose(1, 2)
        values = cache.value_blocks.index_select(0, group.table).view(shape).transpose(1, 2)
        num_heads, head_dim = query.shape[1:]
        per_kv = num_heads // cache.num_kv_heads
        # The query heads of one KV head become queries of it, `per_kv` for each query, so that
        # [batch * queries, heads, d] is [batch, kv_heads, queries * per_kv, d].
        folded = query.reshape(group.batch, group.num_queries, cache.num_kv_heads, per_kv, head_dim)
        folded = folded.transpose(1, 2).reshape(group.batch, cache.num_kv_heads, -1, head_dim)
        repeats = per_kv if group.num_queries > 1 else 1
        bias = group.bias(layer.rule, query.dtype, repeats)
        if layer.softcap is None and layer.sinks is None:
            out = F.scaled_dot_product_attention(
                folded, keys, values, attn_mask=bias, scale=layer.scale
            )
        else:
            out = _attend_explicitly(layer, folded, keys, values, bias, per_kv)
        out = out.view(group.batch, cache.num_kv_heads, group.num_queries, per_kv, -1)
        return out.transpose(1, 2).reshape(query.shape[0], num_heads, -1)


def _attend_explicitly(
    layer: LayerAttention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    per_kv: int,
) -> torch.Tensor:
    """Attention with soft cap or sinks, which the library's fused call lacks."""
    scores = (query @ keys.transpose(-1, -2)).float() * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores + bias
    if layer.sinks is None:
        return scores.softmax(-1).to(values.dtype) @ values
    # Head h = kv_head * per_kv + g is column g of its KV head's folded queries.
    sinks = layer.sinks.float().view(1, keys.shape[1], 1, per_kv)
    sinks = sinks.expand(query.shape[0], -1, query.shape[2] // per_kv, -1)
    sinks = sinks.reshape(*query.shape[:3], 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    return weights.to(values.dtype) @ values


def _rows(spans: list[QuerySpan], device: torch.device) -> Rows:
    """The rows of the batch that a group's queries are, in the group's order."""
    rows = [s.row + i for s in spans for i in range(s.num_queries)]
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _grouped(spans: Sequence[QuerySpan], block_size: int) -> list[list[QuerySpan]]:
    """Splits a batch: chunks by themselves, decodes by similar context length.

    Decodes are walked from the shortest to the longest; a group is closed when padding it to the
    next one's length would read more than `MERGE_WASTE_TOKENS` for nothing.
    """
    groups = [[s] for s in spans if s.num_queries > 1]
    decodes = sorted((s for s in spans if s.num_queries == 1), key=lambda s: s.context_len)
    open_group: list[QuerySpan] = []
    for span in decodes:
        if open_group:
            extra = _num_blocks(span.context_len, block_size) - _num_blocks(
                open_group[-1].context_len, block_size
            )
            if extra * block_size * len(open_group) > MERGE_WASTE_TOKENS:
                groups.append(open_group)
                open_group = []
        open_group.append(span)
    if open_group:
        groups.append(sorted(open_group, key=lambda s: s.row))
    return groups


def _fresh_tail(span: QuerySpan, block_size: int) -> Sequence[int]:
    """The block, if any, that the span's tokens are the first of and do not fill."""
    index, num_filled = divmod(span.context_len, block_size)
    is_fresh = index * block_size >= span.context_len - span.num_queries
    return [span.block_ids[index]] if num_filled and is_fresh else []


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _table(span: QuerySpan, width: int, pool: KvPool) -> list[int]:
    """The blocks of a span's context, filled up to `width` with the block that is always zero."""
    used = _num_blocks(span.context_len, pool.layout.block_size)
    return [*span.block_ids[:used], *[pool.null_block] * (width - used)]
