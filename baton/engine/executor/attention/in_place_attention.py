"""Paged attention on a CPU that reads blocks where they lie, by kernels in C.

Decodes that share a long prefix attend over it once, and tokens that see later ones attend, as in
`torch_attention`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.executor.attention.interface import LayerAttention, RaggedBatch
from baton.engine.executor.attention.torch_attention import TorchAttention, TorchBatch
from baton.engine.executor.cache.kv_pool import KvCache
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton_kernels.cpu.library import KERNELS, Library, NoLibraryError, load
from baton_kernels.cpu.paged_attention import FUNCTIONS, PagedLayer, Work

# Rows (a query head of a token each) of a work item. More read K and V less often; fewer leave more
# items for other threads, and no output changes.
MAX_ROWS = 192


class InPlaceBatch:
    """Attention batch of one step, as `StepBatch`."""

    def __init__(self, ragged: RaggedBatch, block_size: int) -> None:
        self.token_slots, self.positions = ragged.places()
        self._starts, self._num_queries = ragged.starts, ragged.num_queries
        self._are_decodes = ragged.num_decodes == len(ragged.starts)
        width = int(self.positions.max(initial=0)) // block_size + 1
        # Copies, since the scheduler changes the block tables after a launch.
        self._tables = [
            np.ascontiguousarray(table[ragged.batch_slots, :width], np.int32)
            for table in ragged.block_tables
        ]
        self._items: dict[int, Int64Array] = {}
        self._works: dict[tuple[int, int], Work] = {}

    def work(self, group: int, rows_per_query: int) -> Work:
        """Returns the work of a layer of a cache group, with so many query heads per KV head."""
        if (group, rows_per_query) not in self._works:
            items = self._items_of(rows_per_query)
            self._works[group, rows_per_query] = Work(self._tables[group], items)
        return self._works[group, rows_per_query]

    def assign(self, batch: "InPlaceBatch") -> None:
        """Has calls that were recorded with this batch compute another one, of as many tokens."""
        for (group, rows_per_query), work in self._works.items():
            work.assign(batch._tables[group], batch._items_of(rows_per_query))

    def _items_of(self, rows_per_query: int) -> Int64Array:
        if rows_per_query not in self._items:
            max_queries = max(1, MAX_ROWS // rows_per_query)
            self._items[rows_per_query] = (
                _items_of_decodes(self._starts)
                if self._are_decodes
                else _items(self._starts, self._num_queries, max_queries)
            )
        return self._items[rows_per_query]


class InPlaceAttention:
    """Paged attention on a CPU. Raises `NoLibraryError` if the kernels are not available."""

    reads_unwritten = True  # over copies of blocks

    def __init__(self, cache: KvCache) -> None:
        self._groups = [place.group for place in cache.places]
        self._layers = [
            PagedLayer(layer.keys, layer.values, cache.layouts[place.group].window)
            for place in cache.places
            for layer in (cache.pools[place.group].layers[place.index],)
        ]
        self._block_size = cache.layouts[0].block_size
        self._copying = TorchAttention(cache)

    def prepare(self, ragged: RaggedBatch) -> InPlaceBatch | TorchBatch:
        """Implements `Attention.prepare`."""
        if ragged.last_keys is not None or self._copying.shares_prefixes(ragged):
            return self._copying.prepare(ragged)
        return InPlaceBatch(ragged, self._block_size)

    def forward(
        self,
        index: int,
        layer: LayerAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: InPlaceBatch | TorchBatch,
    ) -> torch.Tensor:
        """Implements `Attention.forward`."""
        if isinstance(batch, TorchBatch):
            return self._copying.forward(index, layer, query, key, value, batch)
        paged = self._layers[index]
        work = batch.work(self._groups[index], query.shape[1] // paged.num_kv_heads)
        return paged.write_and_attend(query, key, value, work, layer.scale)


def why_not_in_place(
    cache: KvCache, layers: Sequence[LayerAttention], library: Library = KERNELS
) -> str | None:
    """Returns why `InPlaceAttention`, whose kernels are in `library`, cannot serve a model's layers
    over a cache; None: it can."""
    pool = cache.pools[0]
    if pool.dtype not in FUNCTIONS:
        return f"the KV cache is {pool.layout.dtype}"
    if any(layer.softcap is not None for layer in layers):
        return "scores have a soft cap"
    if any(layer.sinks is not None for layer in layers):
        return "the model has attention sinks"
    try:
        load(library)
    except NoLibraryError as error:
        return str(error)
    return None


def _items(starts: Int64Array, num_queries: Int64Array, max_queries: int) -> Int64Array:
    """Splits ranges into work items, as in `Work`, those that take longest first."""
    counts = -(-num_queries // max_queries)
    ranges = np.repeat(np.arange(len(counts)), counts)
    firsts = (np.arange(len(ranges)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_queries
    tokens = np.repeat(np.cumsum(num_queries) - num_queries, counts) + firsts
    lengths = np.minimum(np.repeat(num_queries, counts) - firsts, max_queries)
    positions = np.repeat(starts, counts) + firsts
    items = np.stack([ranges, tokens, positions, lengths], axis=1)
    order = np.argsort(-lengths * (positions + lengths), kind="stable")
    return np.ascontiguousarray(items[order])


def _items_of_decodes(starts: Int64Array) -> Int64Array:
    """Returns what `_items` does for one token of each sequence, in fewer operations."""
    order = np.argsort(-starts, kind="stable")
    items = np.ones((len(starts), 4), np.int64)
    items[:, 0] = items[:, 1] = order
    items[:, 2] = starts[order]
    return items
