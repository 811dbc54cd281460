"""Paged attention by Triton kernels, planned on the host in numpy.

A step's plan is the same for all layers of one kind: one cache group, head size and number of query
heads for each KV head. Knows nothing of models beyond that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from baton.engine.executor.attention.interface import LayerAttention, RaggedBatch
from baton.engine.executor.cache.kv_layout import LayerPlace
from baton.engine.executor.cache.kv_pool import KvCache
from baton.engine.executor.device_stream import uploader
from baton.engine.scheduler.sequences.batch_slots import Int64Array, TokenArray
from baton_kernels.attention.cascade import SharedPrefixes, SharingCost
from baton_kernels.attention.decode_inputs import KindInputs
from baton_kernels.attention.inputs import PagedKv, ScoreRule
from baton_kernels.attention.paged_attention import (
    AttentionArrays,
    AttentionPlan,
    paged_attention,
    plan_attention,
)
from baton_kernels.attention.paged_decode import Workspace
from baton_kernels.attention.plan import Ranges, SharedPrefix
from baton_kernels.attention.plan_arrays import SplitCapacity
from baton_kernels.attention.tile_descriptors import describe_tiles
from baton_kernels.attention.tiling import AttentionTiling, choose_tiling
from baton_kernels.gpu import Gpu
from baton_kernels.rows.cache_write import CacheBlocks, write_kv

# Bytes that a GPU reads from its L2 cache, which has the blocks after the first member's read, in
# the time of the additional kernel launch that a shared prefix takes.
LAUNCH_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Kind of layers that share one attention plan.

    Attributes:
        cache_group: cache group whose blocks they read.
        num_heads: query heads.
        window: sliding window: tokens that a query sees, its own included; None: all.
        token_bytes: bytes of K and V of one token in one layer.
    """

    cache_group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    token_bytes: int

    @property
    def group(self) -> int:
        """Query heads of each KV head."""
        return self.num_heads // self.num_kv_heads

    def sharing_cost(self, tiling: AttentionTiling) -> SharingCost:
        """Returns what attending once over a prefix saves and costs (cascade)."""
        return SharingCost(tiling.shared.num_tokens(self.group), self.token_bytes, LAUNCH_BYTES)


@dataclass(frozen=True, slots=True)
class KindWork:
    """Work of a step in the layers of one kind, on the device."""

    arrays: AttentionArrays
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """Attention batch of one step, as `StepBatch`.

    Attributes:
        slots: per cache group, the cache slot of each token's K and V: `[num_tokens]`.
        tables: per cache group, block tables, of which plans name rows: `[num_rows, blocks]`.
        work: per kind of layer.
    """

    token_slots: Int64Array
    positions: Int64Array
    slots: tuple[torch.Tensor, ...]
    tables: tuple[torch.Tensor, ...]
    work: dict[LayerKind, KindWork]


class TritonAttention:
    """Paged attention on a GPU; on a CPU in Triton's interpreter, for tests.

    Attributes:
        paged: K and V of each layer, with the descriptors of its tiles where these are possible.
        max_decode_tokens: most tokens of a decoding sequence in a step: its last one and drafts.
    """

    reads_unwritten = False

    def __init__(
        self,
        cache: KvCache,
        num_heads: Sequence[int],
        dtype: torch.dtype,
        max_context: int,
        *,
        deterministic: bool,
        max_decode_tokens: int = 1,
    ) -> None:
        """Takes the query heads of each layer as `num_heads`, and the `dtype` of queries."""
        self._cache = cache
        self.max_decode_tokens = max_decode_tokens
        self._max_context = max_context + max_decode_tokens  # of a draft after the longest
        self.block_size = cache.layouts[0].block_size
        self.device = cache.pools[0].device
        self.kinds = [
            _kind(cache, place, heads) for place, heads in zip(cache.places, num_heads, strict=True)
        ]
        gpu = Gpu.of(self.device)
        self.tilings = {
            kind: choose_tiling(
                kind.head_dim,
                dtype,
                cache.pools[kind.cache_group].dtype,
                kind.num_kv_heads,
                gpu,
                deterministic,
            )
            for kind in dict.fromkeys(self.kinds)
        }
        layers = [cache.pools[p.group].layers[p.index] for p in cache.places]
        scales = [(s.key, s.value) if s is not None else (None, None) for s in cache.scales]
        self._blocks = [
            CacheBlocks(layer.keys, layer.values, *of_layer)
            for layer, of_layer in zip(layers, scales, strict=True)
        ]
        self.paged = [
            PagedKv(
                layer.keys,
                layer.values,
                key_scales,
                value_scales,
                describe_tiles(layer.keys, layer.values, self.tilings[kind].prefill, gpu),
            )
            for layer, (key_scales, value_scales), kind in zip(
                layers, scales, self.kinds, strict=True
            )
        ]
        self._upload = uploader(self.device)

    def prepare(self, ragged: RaggedBatch) -> TritonBatch:
        """Implements `Attention.prepare`."""
        batch_slots, positions = ragged.places()
        tables = visible_tables(ragged, positions, self.block_size)
        numbers = np.arange(len(ragged.batch_slots))
        ranges = Ranges.of_batch(numbers, ragged.starts, ragged.num_queries)
        if ragged.last_keys is not None:
            ranges = ranges.seeing(ragged.last_keys)
        work = {}
        for kind, plan in self.plans(ranges, tables).items():
            arrays = AttentionArrays.of(plan, self.device)
            workspace = Workspace.allocate(
                plan.splits.num_slots, kind.num_heads, kind.head_dim, self.device
            )
            work[kind] = KindWork(arrays, workspace)
        slots = slots_of(ragged, batch_slots, positions, self.block_size)
        return TritonBatch(
            batch_slots,
            positions,
            tuple(map(self._upload, slots)),
            tuple(map(self._upload, tables)),
            work,
        )

    def plans(self, ranges: Ranges, tables: Sequence[TokenArray]) -> dict[LayerKind, AttentionPlan]:
        """Returns the plan of each kind of layer; `tables` are per cache group."""
        shared: dict[LayerKind, list[SharedPrefix]] = {}
        if ranges.last_keys is None:
            shared = {
                kind: prefixes.find(ranges, tables[kind.cache_group])
                for kind, prefixes in self.shared_prefixes(len(tables[0])).items()
            }
        return {
            kind: plan_attention(
                ranges,
                kind.group,
                tiling,
                kind.window,
                shared.get(kind, ()),
                self.max_decode_tokens,
            )
            for kind, tiling in self.tilings.items()
        }

    def shared_prefixes(self, num_batch_slots: int) -> dict[LayerKind, SharedPrefixes]:
        """Returns what finds the prefixes that a kind of layer attends once, for all kinds without
        a window."""
        return {
            kind: SharedPrefixes(
                num_batch_slots, self.block_size, tiling.splits, kind.sharing_cost(tiling)
            )
            for kind, tiling in self.tilings.items()
            if kind.window is None
        }

    def kind_inputs(self, kind: LayerKind, num_tokens: int) -> KindInputs:
        """Returns the inputs of a kind of layer, for recorded steps of `num_tokens` of decodes."""
        tiling = self.tilings[kind]
        tokens_per_item = tiling.decode.num_tokens(kind.group)
        return KindInputs(
            self.capacity(kind, num_tokens),
            num_tokens * self._max_splits(kind),
            max(tokens_per_item, self.max_decode_tokens),
            tiling.splits,
            tiling.decode.keys,
            tokens_per_item,
            kind.window,
            tiling.shared.num_tokens(kind.group),
        )

    @property
    def num_groups(self) -> int:
        return len(self._cache.pools)

    def capacity(self, kind: LayerKind, num_tokens: int) -> SplitCapacity:
        """Returns the capacity for `num_tokens` of decodes, whatever their contexts: it does not
        depend on the pool, which is made after the memory of recorded steps was measured."""
        num_items = num_tokens * self._max_splits(kind)
        return SplitCapacity(num_items, num_items if kind.window is None else 0, num_tokens)

    def _max_splits(self, kind: LayerKind) -> int:
        """Returns the most splits of what a token sees."""
        splits = self.tilings[kind].splits
        if kind.window is None:
            return splits.max_splits(self._max_context)
        # The windows of a program's tokens begin at several places, the first within a split.
        return splits.max_splits(min(kind.window, self._max_context)) + 2

    def blocks(self, index: int) -> CacheBlocks:
        """Returns the K and V blocks of a layer, for writing."""
        return self._blocks[index]

    def slots(self, index: int, batch: TritonBatch) -> torch.Tensor:
        """Returns the cache slots of a step's tokens in that layer's pool, `[num_tokens]`."""
        return batch.slots[self.kinds[index].cache_group]

    def forward(
        self,
        index: int,
        layer: LayerAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: TritonBatch,
    ) -> torch.Tensor:
        """Implements `Attention.forward`."""
        write_kv(
            key.contiguous(), value.contiguous(), self._blocks[index], self.slots(index, batch)
        )
        return self.attend(index, layer, query.contiguous(), batch)

    def attend(
        self, index: int, layer: LayerAttention, query: torch.Tensor, batch: TritonBatch
    ) -> torch.Tensor:
        """Attends queries whose K and V are written: `[num_tokens, num_heads, dim]`."""
        kind = self.kinds[index]
        work = batch.work[kind]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        paged_attention(
            query,
            out,
            self.paged[index],
            ScoreRule(layer.scale, kind.window, layer.softcap, layer.sinks),
            batch.tables[kind.cache_group],
            work.arrays,
            work.workspace,
            self.tilings[kind],
        )
        return out


def visible_tables(ragged: RaggedBatch, positions: Int64Array, block_size: int) -> list[TokenArray]:
    """Returns the block tables of the step's sequences, per cache group, as wide as the longest."""
    width = int(positions.max(initial=0)) // block_size + 1
    return [
        np.ascontiguousarray(table[ragged.batch_slots, :width]) for table in ragged.block_tables
    ]


def slots_of(
    ragged: RaggedBatch, batch_slots: Int64Array, positions: Int64Array, block_size: int
) -> list[Int64Array]:
    """Returns the cache slot of each token, per cache group."""
    indices, offsets = np.divmod(positions, block_size)
    return [
        table[batch_slots, indices].astype(np.int64) * block_size + offsets
        for table in ragged.block_tables
    ]


def _kind(cache: KvCache, place: LayerPlace, num_heads: int) -> LayerKind:
    pool = cache.pools[place.group]
    layer = pool.layout.layers[place.index]
    return LayerKind(
        cache_group=place.group,
        num_heads=num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.key_head_dim,
        window=pool.layout.window,
        token_bytes=2 * layer.num_kv_heads * layer.key_head_dim * pool.dtype.itemsize,
    )
