"""Paged attention by a library's kernels, over the pools and block tables of Baton.

K and V are written, and recorded decode steps attended, by `triton_attention`; all other steps are
attended by the library. Knows nothing of the libraries (`flashinfer`, `flash_attention`) but how
they plan a step and attend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from baton.engine.executor.attention.interface import LayerAttention, RaggedBatch
from baton.engine.executor.attention.triton_attention import (
    LayerKind,
    TritonAttention,
    TritonBatch,
    slots_of,
    visible_tables,
)
from baton.engine.executor.cache.kv_pool import LayerCache
from baton.engine.executor.device_stream import uploader
from baton.engine.scheduler.sequences.batch_slots import Int64Array, TokenArray
from baton_kernels.rows.cache_write import CacheBlocks, write_kv


@dataclass(frozen=True, slots=True)
class LayerScores:
    """Heads and score rule of layers that share one plan. `softcap`: as of `LayerAttention`."""

    kind: LayerKind
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class CachedSequences:
    """Sequences of a step, whose K and V are in the cache up to their last query.

    Attributes:
        num_queries: `[num_ranges]`, queries of each, the last tokens of the sequence.
        lengths: `[num_ranges]`, tokens of each, those of the step included.
        table: `[num_ranges, blocks]`, its blocks; padded.
        block_size: tokens of a block.
    """

    num_queries: Int64Array
    lengths: Int64Array
    table: TokenArray
    block_size: int

    @property
    def query_offsets(self) -> TokenArray:
        """Returns where the queries of each begin in the flat batch, `[num_ranges + 1]`."""
        return offsets(self.num_queries)


class AttentionLibrary(Protocol):
    """Paged attention kernels of a library."""

    def plan(self, scores: LayerScores, sequences: CachedSequences) -> Any:
        """Returns the plan of a step for `attend`, valid until the next plan of these scores."""
        ...

    def attend(self, plan: Any, query: torch.Tensor, layer: LayerCache) -> torch.Tensor:
        """Attends `query`, `[num_tokens, num_heads, dim]`, causally; returns the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryBatch:
    """Attention batch of one step, as `StepBatch`, valid until the next one is prepared.

    Attributes:
        slots: per cache group, the cache slot of each token's K and V: `[num_tokens]`.
        plans: the library's plans.
    """

    token_slots: Int64Array
    positions: Int64Array
    slots: tuple[torch.Tensor, ...]
    plans: dict[LayerScores, Any]


class LibraryAttention:
    """Paged attention by a library in steps that are not recorded, by Triton in those that are.

    `recorded`: the attention of recorded steps.
    """

    reads_unwritten = True  # a library may load whole blocks

    def __init__(
        self,
        recorded: TritonAttention,
        layers: Sequence[LayerAttention],
        caches: Sequence[LayerCache],
        library: AttentionLibrary,
    ) -> None:
        """Takes the score rule and the cache of each layer of the model."""
        self.recorded = recorded
        self.block_size, self.device = recorded.block_size, recorded.device
        self._caches = caches
        self._scores = [
            LayerScores(kind, layer.scale, layer.softcap)
            for kind, layer in zip(recorded.kinds, layers, strict=True)
        ]
        self._library = library
        self._upload = uploader(self.device)

    @property
    def num_groups(self) -> int:
        return self.recorded.num_groups

    def prepare(self, ragged: RaggedBatch) -> LibraryBatch | TritonBatch:
        """Implements `Attention.prepare`. A library attends causally alone."""
        if ragged.last_keys is not None:
            return self.recorded.prepare(ragged)
        batch_slots, positions = ragged.places()
        tables = visible_tables(ragged, positions, self.block_size)
        lengths = ragged.starts + ragged.num_queries
        plans = {}
        for scores in dict.fromkeys(self._scores):
            table = tables[scores.kind.cache_group]
            sequences = CachedSequences(ragged.num_queries, lengths, table, self.block_size)
            plans[scores] = self._library.plan(scores, sequences)
        slots = slots_of(ragged, batch_slots, positions, self.block_size)
        return LibraryBatch(batch_slots, positions, tuple(map(self._upload, slots)), plans)

    def blocks(self, index: int) -> CacheBlocks:
        """Returns the K and V blocks of a layer, for writing."""
        return self.recorded.blocks(index)

    def slots(self, index: int, batch: LibraryBatch | TritonBatch) -> torch.Tensor:
        """Returns the cache slots of a step's tokens in that layer's pool, `[num_tokens]`."""
        return batch.slots[self._scores[index].kind.cache_group]

    def forward(
        self,
        index: int,
        layer: LayerAttention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: LibraryBatch | TritonBatch,
    ) -> torch.Tensor:
        """Implements `Attention.forward`."""
        slots = self.slots(index, batch)
        write_kv(key.contiguous(), value.contiguous(), self.blocks(index), slots)
        return self.attend(index, layer, query.contiguous(), batch)

    def attend(
        self,
        index: int,
        layer: LayerAttention,
        query: torch.Tensor,
        batch: LibraryBatch | TritonBatch,
    ) -> torch.Tensor:
        """Attends queries whose K and V are written: `[num_tokens, num_heads, dim]`."""
        if isinstance(batch, TritonBatch):
            return self.recorded.attend(index, layer, query, batch)
        plan = batch.plans[self._scores[index]]
        return self._library.attend(plan, query, self._caches[index])


def offsets(counts: Int64Array) -> TokenArray:
    """Returns where runs of these lengths begin and the last one ends, `[num_runs + 1]`."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
