"""Paged attention in torch.

Sequences are put into a few groups of similar length; a group is one gather and one attention call
per layer. Blocks that a sliding window hides are not read. On a CPU, decodes attend over a prefix
that they share once, and each over the rest of its own context; both results are merged (cascade).
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from baton.engine.executor.attention.cache_rows import BlockPlaces, LayerRows, TokenPlaces
from baton.engine.executor.attention.interface import LayerAttention, RaggedBatch
from baton.engine.executor.attention.masked_keys import without_masked_keys
from baton.engine.executor.cache.kv_layout import KvLayout
from baton.engine.executor.cache.kv_pool import KvCache
from baton.engine.executor.device_stream import Upload, uploader
from baton.engine.scheduler.sequences.batch_slots import Int64Array, TokenArray
from baton_kernels.attention.cascade import SharedPrefixes, SharingCost
from baton_kernels.attention.plan import SharedPrefix
from baton_kernels.attention.split_rule import SplitRule

# Two groups are merged when the padding this adds, in scores computed, costs less than a call.
MERGE_WASTE = 1024

# A shared prefix is attended once where that saves reading more than these bytes of K and V per
# layer. On one core of a Xeon, with 2 to 64 members, 32 to 2,048 shared tokens and three shapes of
# heads, it took 1.03 to 35 times less time from 1 MiB on, and up to 2.7 times more below (medians
# of five, interleaved).
CASCADE_BYTES = 2**20

# Attention of contiguous tensors that also returns the logarithm of the sum of the exponents.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

Rows = slice | Int64Array


class _Group:
    """Group of sequences with equally many queries and similar contexts, in one cache group.

    `rows`: rows of the group's queries in the flat batch; a slice if they are adjacent. Keys before
    position `hidden` of a sequence are not seen: a shared prefix, attended apart. `last_keys`, of
    each of these rows, as in `RaggedBatch`.
    """

    def __init__(
        self,
        rows: Rows,
        starts: Int64Array,
        num_queries: int,
        first_keys: Int64Array | None,
        table: TokenArray,
        layout: KvLayout,
        upload: Upload,
        hidden: Int64Array | None = None,
        last_keys: Int64Array | None = None,
    ) -> None:
        self.rows = rows if isinstance(rows, slice) else upload(rows)
        self.batch, width = table.shape
        self.num_queries = num_queries
        self.num_keys = width * layout.block_size
        self.blocks = BlockPlaces(upload(table))
        # Position of the first query, and of the first key, within each sequence: [batch].
        self._starts = upload(starts)
        self._first_keys = None if first_keys is None else upload(first_keys)
        self._hidden = None if hidden is None else upload(hidden)
        self._last_keys = None if last_keys is None else upload(last_keys)
        self._window = layout.window
        self._biases: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def bias(self, dtype: torch.dtype, repeats: int) -> torch.Tensor:
        """Returns the bias of the scores: 0 for keys a query sees, else -inf.

        `[batch, 1, num_queries * repeats, num_keys]`, each query's row `repeats` times.
        """
        key = (dtype, repeats)
        if key not in self._biases:
            device = self._starts.device
            keys = torch.arange(self.num_keys, device=device)
            if self._first_keys is not None:
                keys = self._first_keys[:, None, None] + keys
            steps = torch.arange(self.num_queries, device=device)
            queries = (self._starts[:, None] + steps)[:, :, None]
            lasts = queries if self._last_keys is None else self._last_keys.view(queries.shape)
            hidden = keys > lasts
            if self._window is not None:
                hidden |= keys <= queries - self._window
            if self._hidden is not None:
                hidden |= keys < self._hidden[:, None, None]
            bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
            bias = bias.masked_fill_(hidden, -math.inf).repeat_interleave(repeats, dim=1)
            self._biases[key] = bias[:, None]
        return self._biases[key]


class _Prefix:
    """Prefix that several decodes share: all of it is seen by all of them.

    `rows`: rows of their queries in the flat batch. `blocks`: its blocks, read as one sequence of
    `num_keys` tokens.
    """

    batch = 1

    def __init__(
        self,
        prefix: SharedPrefix,
        ragged: RaggedBatch,
        table: TokenArray,
        block_size: int,
        upload: Upload,
    ) -> None:
        num_blocks = prefix.num_tokens // block_size
        self.rows = upload(prefix.members)
        self.num_keys = prefix.num_tokens
        # A copy of the row, as the scheduler changes the block tables after a launch.
        slot = ragged.batch_slots[prefix.members[:1]]
        self.blocks = BlockPlaces(upload(table[slot, :num_blocks]))


class _Cascade:
    """Split of a step's decodes into shared prefixes and the rest of each context."""

    def __init__(self, prefixes: list[_Prefix], rests: list[_Group]) -> None:
        self.prefixes = prefixes
        self.rests = rests

    @staticmethod
    def serves(layer: LayerAttention, cache: LayerRows) -> bool:
        """Returns whether a layer's partial results can be merged: not with a soft cap or sinks,
        nor with V of another width than K, which torch's operation lacks."""
        is_plain = layer.softcap is None and layer.sinks is None
        return is_plain and cache.keys.head_dim == cache.values.head_dim


class _CacheGroupBatch:
    """Attention batch of one step in the layers of one cache group: places to write and to read.

    Attributes:
        tokens: places to write the K and V of each token to.
        cascade: split into shared prefixes and the rest; None where it would not be faster.
    """

    def __init__(
        self,
        ragged: RaggedBatch,
        table: TokenArray,
        cells: Int64Array,
        indices: Int64Array,
        offsets: torch.Tensor,
        layout: KvLayout,
        upload: Upload,
    ) -> None:
        self.tokens = TokenPlaces(upload(table.take(cells).astype(np.int64)), offsets)
        self.cascade: _Cascade | None = None
        if offsets.device.type == "cpu":
            self.cascade = _cascade(ragged, table, indices, layout, upload)
        # Made at once: the scheduler changes the block tables after a launch.
        self.groups = list(_groups(ragged, table, indices, layout, upload))


class TorchBatch:
    """Attention batch of one step, as `StepBatch`."""

    def __init__(
        self, ragged: RaggedBatch, layouts: Sequence[KvLayout], device: torch.device
    ) -> None:
        self.token_slots, self.positions = ragged.places()
        tables = ragged.block_tables
        # Block index and offset of each token in its sequence, and its cell in the block table.
        indices, offsets = np.divmod(self.positions, layouts[0].block_size)
        cells = self.token_slots * tables[0].shape[1] + indices
        upload = uploader(device)
        on_device = upload(offsets)
        self.cache_groups = [
            _CacheGroupBatch(ragged, table, cells, indices, on_device, layout, upload)
            for table, layout in zip(tables, layouts, strict=True)
        ]


class TorchAttention:
    """Paged attention on any torch device, fastest on a CPU."""

    reads_unwritten = True

    def __init__(self, cache: KvCache) -> None:
        self._layouts = cache.layouts
        self._device = cache.pools[0].device
        self._places = cache.places
        self._layers = [LayerRows(cache.pools[p.group].layers[p.index]) for p in cache.places]
        self._scales = cache.scales

    def prepare(self, ragged: RaggedBatch) -> TorchBatch:
        """Implements `Attention.prepare`."""
        return TorchBatch(ragged, self._layouts, self._device)

    def shares_prefixes(self, ragged: RaggedBatch) -> bool:
        """Returns whether decodes share prefixes that are attended faster apart."""
        tables = zip(ragged.block_tables, self._layouts, strict=True)
        return any(_prefixes(ragged, table, layout) for table, layout in tables)

    def forward(
        self,
        index: int,
        layer: LayerAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: TorchBatch,
    ) -> torch.Tensor:
        """Implements `Attention.forward`."""
        of_group = batch.cache_groups[self._places[index].group]
        scales = self._scales[index]
        if scales is None:
            return self._write_and_attend(index, layer, query, key, value, of_group)
        # Scaling queries for K, and the output for V, is equivalent and cheaper.
        key, value = scales.store(key, value)
        query = _scaled(query, scales.key)
        out = self._write_and_attend(index, layer, query, key, value, of_group)
        return _scaled(out, scales.value)

    def _write_and_attend(
        self,
        index: int,
        layer: LayerAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: _CacheGroupBatch,
    ) -> torch.Tensor:
        cache = self._layers[index]
        cache.write(batch.tokens, key, value)
        if batch.cascade is not None and _Cascade.serves(layer, cache):
            return self._attend_in_cascade(cache, layer, query, batch.cascade)
        groups = batch.groups
        if len(groups) == 1 and isinstance(groups[0].rows, slice):
            return self._attend(cache, layer, query, groups[0])
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for group in groups:
            out[group.rows] = self._attend(cache, layer, query[group.rows], group)
        return out

    def _attend(
        self, cache: LayerRows, layer: LayerAttention, query: torch.Tensor, group: _Group
    ) -> torch.Tensor:
        """Attends one group; `query` is `[batch * num_queries, num_heads, key_head_dim]`."""
        keys, values = cache.read(group.blocks, query.dtype)
        folded = _folded(query, group.batch, cache.num_kv_heads)
        num_heads = query.shape[1]
        per_kv = num_heads // cache.num_kv_heads
        repeats = per_kv if group.num_queries > 1 else 1
        bias = group.bias(query.dtype, repeats)

        def attend(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor]:
            if layer.softcap is None and layer.sinks is None:
                return (
                    F.scaled_dot_product_attention(
                        folded, keys, values, attn_mask=bias, scale=layer.scale
                    ),
                )
            return (_attend_explicitly(layer, folded, keys, values, bias, per_kv),)

        (out,) = without_masked_keys(attend, keys, values, bias)
        out = out.view(group.batch, cache.num_kv_heads, group.num_queries, per_kv, -1)
        return out.transpose(1, 2).reshape(query.shape[0], num_heads, -1)

    def _attend_in_cascade(
        self, cache: LayerRows, layer: LayerAttention, query: torch.Tensor, cascade: _Cascade
    ) -> torch.Tensor:
        """Attends decodes; `query` is `[num_tokens, num_heads, head_dim]`."""
        out = torch.empty_like(query)
        logsums = query.new_empty(query.shape[:2], dtype=torch.float32)
        for group in cascade.rests:
            part = _partial(cache, layer, query[group.rows], group, group.bias(query.dtype, 1))
            out[group.rows], logsums[group.rows] = part
        for prefix in cascade.prefixes:
            rows = prefix.rows
            shared, logsum = _partial(cache, layer, query[rows], prefix, None)
            weights = torch.sigmoid(logsum - logsums[rows])[..., None].to(out.dtype)
            out[rows] = torch.lerp(out[rows], shared, weights)
        return out


def _partial(
    cache: LayerRows,
    layer: LayerAttention,
    query: torch.Tensor,
    of: _Group | _Prefix,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends over a part of the contexts of some decodes.

    Returns `[num_tokens, num_heads, head_dim]`, and the logarithms of the sums of the exponents of
    the scores, `[num_tokens, num_heads]`.
    """
    keys, values = cache.read(of.blocks, query.dtype)
    folded = _folded(query, of.batch, cache.num_kv_heads)

    def attend(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, logsums = _flash_attention(folded, keys, values, attn_mask=bias, scale=layer.scale)
        return out, logsums[..., None]

    if bias is None:
        out, logsums = attend(keys, values)
    else:
        out, logsums = without_masked_keys(attend, keys, values, bias)
    num_queries, per_kv = query.shape[0] // of.batch, query.shape[1] // cache.num_kv_heads
    split = (of.batch, cache.num_kv_heads, num_queries, per_kv)
    return (
        out.reshape(*split, -1).transpose(1, 2).reshape(query.shape),
        logsums.reshape(split).transpose(1, 2).reshape(query.shape[:2]),
    )


def _folded(query: torch.Tensor, batch: int, num_kv_heads: int) -> torch.Tensor:
    """Returns `[batch * num_queries, num_heads, d]` as `[batch, num_kv_heads, num_queries * per_kv,
    d]`: the query heads of one KV head become queries of it, `per_kv` for each query."""
    num_queries, head_dim = query.shape[0] // batch, query.shape[2]
    split = query.reshape(batch, num_queries, num_kv_heads, -1, head_dim)
    return split.transpose(1, 2).reshape(batch, num_kv_heads, -1, head_dim)


def _scaled(heads: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns `heads`, `[num_tokens, num_heads, head_dim]`, times the scale of their KV heads."""
    of_heads = scales.repeat_interleave(heads.shape[1] // len(scales))
    return (heads * of_heads[:, None]).to(heads.dtype)


def _attend_explicitly(
    layer: LayerAttention,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
    per_kv: int,
) -> torch.Tensor:
    """Computes attention with soft cap or sinks, which torch's fused call lacks."""
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


def _cascade(
    ragged: RaggedBatch,
    table: TokenArray,
    indices: Int64Array,
    layout: KvLayout,
    upload: Upload,
) -> _Cascade | None:
    """Returns the split of a step of decodes alone, in layers without a window, if it is faster.

    Args:
        indices: `[num_tokens]`, the index of each token's block in its sequence.
    """
    found = _prefixes(ragged, table, layout)
    if not found:
        return None
    num_shared = np.zeros(ragged.num_decodes, np.int64)  # tokens of each that are attended apart
    for prefix in found:
        num_shared[prefix.members] = prefix.num_tokens
    rests = _groups(ragged, table, indices, layout, upload, num_shared)
    size = layout.block_size
    return _Cascade([_Prefix(p, ragged, table, size, upload) for p in found], list(rests))


def _prefixes(ragged: RaggedBatch, table: TokenArray, layout: KvLayout) -> list[SharedPrefix]:
    """Returns the prefixes that decodes share and that are attended faster apart."""
    num_decodes, size = ragged.num_decodes, layout.block_size
    if layout.window is not None or num_decodes < max(2, len(ragged.batch_slots)):
        return []
    token_bytes = layout.block_bytes / size / len(layout.layers)
    cost = SharingCost(num_decodes, token_bytes, CASCADE_BYTES)  # all members read K and V once
    splits = SplitRule.fixed(size)
    return SharedPrefixes(len(table), size, splits, cost).find(ragged.ranges, table)


def _groups(
    ragged: RaggedBatch,
    table: TokenArray,
    indices: Int64Array,
    layout: KvLayout,
    upload: Upload,
    num_shared: Int64Array | None = None,
) -> Iterator[_Group]:
    """Splits a batch into groups of equally many queries and similar numbers of visible blocks.

    Args:
        indices: `[num_tokens]`, the index of each token's block in its sequence.
        num_shared: `[num_ranges]`, leading tokens to leave out, whole blocks; None: none.
    """
    size, num_blocks = layout.block_size, table.shape[1]
    # The first block that each range sees.
    begins = None if num_shared is None else num_shared // size
    if layout.window is not None:
        begins = np.maximum(ragged.starts - (layout.window - 1), 0) // size

    def group(rows: Rows, at: Rows, num_queries: int, width: int) -> _Group:
        batch_slots, starts = ragged.batch_slots[at], ragged.starts[at]
        last_keys = None if ragged.last_keys is None else ragged.last_keys[rows]
        if begins is None:
            seen = table[batch_slots, :width]
            return _Group(
                rows, starts, num_queries, None, seen, layout, upload, last_keys=last_keys
            )
        # Blocks read before the first one that is seen are masked, but must be the sequence's own.
        firsts = np.minimum(begins[at], num_blocks - width)
        cells = (batch_slots * num_blocks + firsts)[:, None] + np.arange(width)
        hidden = None if num_shared is None else num_shared[at]
        seen = table.take(cells)
        return _Group(
            rows, starts, num_queries, firsts * size, seen, layout, upload, hidden, last_keys
        )

    if ragged.num_decodes == len(ragged.batch_slots):
        for members, width in _split(indices if begins is None else indices - begins, size):
            yield group(members, members, 1, width)
        return
    last_rows = np.cumsum(ragged.num_queries) - 1
    lasts = indices[last_rows]
    if begins is not None:
        lasts -= begins
    for count in np.unique(ragged.num_queries).tolist():
        ranges = np.flatnonzero(ragged.num_queries == count)
        for members, width in _split(lasts[ranges], size * count):
            at = ranges[members]
            numbers = (last_rows[at][:, None] + np.arange(1 - count, 1)).ravel()
            yield group(_neighbours(numbers), at, count, width)


def _split(lasts: Int64Array, cost: int) -> Iterator[tuple[Rows, int]]:
    """Groups sequences that read similarly many blocks: yields members and blocks per member.

    Goes from the fewest blocks to the most, and closes a group when padding it to the next number
    would waste more than `MERGE_WASTE`.

    Args:
        lasts: index of the last block that each sequence reads, relative to the first it reads.
        cost: cost of one block of one sequence: its tokens, once per query.
    """
    counts = np.bincount(lasts)
    steps = counts.nonzero()[0].tolist()
    opened, before, size = steps[0], steps[0], 0
    for last in steps:
        if (last - before) * cost * size > MERGE_WASTE:
            yield _neighbours(((lasts >= opened) & (lasts <= before)).nonzero()[0]), before + 1
            opened, size = last, 0
        size += int(counts[last])
        before = last
    if opened == steps[0]:
        yield slice(0, len(lasts)), before + 1
    else:
        yield _neighbours((lasts >= opened).nonzero()[0]), before + 1


def _neighbours(members: Int64Array) -> Rows:
    """Returns a slice if the members are consecutive, since a slice needs no gather."""
    first, last = int(members[0]), int(members[-1])
    return slice(first, last + 1) if last - first == len(members) - 1 else members
