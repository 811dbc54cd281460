"""Static attention batch of decode steps, at fixed addresses for CUDA graph replay. A decode has
one token, or several with its drafts.

A step fills a pinned array, which one transfer copies to the same places on the device:

    positions | cache slots, per cache group | packed plans, per kind of layer
"""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.engine.attention.device_tables import DeviceTables
from baton.engine.attention.interface import RaggedBatch
from baton.engine.attention.triton_attention import (
    KindWork,
    LayerKind,
    TritonAttention,
    TritonBatch,
)
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton_kernels.attention_plan import TILE_FIELDS, Int32Array, Ranges, plan_splits
from baton_kernels.attention_plan_arrays import SplitArrays, SplitCapacity, pack_into
from baton_kernels.paged_attention import AttentionArrays, AttentionPlan
from baton_kernels.paged_decode import Workspace

_NO_SLOTS: Int64Array = np.zeros(0, np.int64)
_NOTHING = plan_splits(Ranges.of_batch(_NO_SLOTS, _NO_SLOTS, _NO_SLOTS), 1, 1, 1)
# The inputs are int32 numbers, and begin at multiples of 16 bytes: kernels are compiled for that.
_ALIGNED = 4


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of one kind of layer: the place of its packed plan in the inputs, and views of it."""

    place: slice
    capacity: SplitCapacity
    splits: SplitArrays
    workspace: Workspace


class StaticTritonBatch:
    """Static batch of up to `max_rows` tokens of decodes; initially all rows are padding.

    A padded row's slot is in block 0, where nothing is written, and no plan contains it.

    Attributes:
        positions: `[max_rows]`, of the tokens; 0 in padded rows.
    """

    def __init__(self, attention: TritonAttention, max_rows: int, max_blocks: int) -> None:
        """Allocates the batch; batch slots are below `max_rows`, and the longest sequence has
        `max_blocks` blocks."""
        self._attention = attention
        device, num_groups = attention.device, attention.num_groups
        self._tables = DeviceTables(num_groups, max_rows, max_blocks, device)
        num_words = -(-2 * max_rows // _ALIGNED) * _ALIGNED
        self._header = (1 + num_groups, num_words)
        capacities = {kind: attention.capacity(kind, max_rows) for kind in attention.tilings}
        sizes = [math.prod(self._header), *(sum(c.sizes) for c in capacities.values())]
        places = [slice(*pair) for pair in itertools.pairwise(itertools.accumulate(sizes))]
        staged = np.zeros(sum(sizes), np.int32)
        for place, capacity in zip(places, capacities.values(), strict=True):
            pack_into(staged[place], _NOTHING, capacity)
        self._inputs = torch.from_numpy(staged).to(device, copy=True)
        self._work = {
            kind: _Work(
                place,
                capacity,
                SplitArrays.view(self._inputs[place], capacity),
                Workspace.allocate(
                    attention.num_partials(kind, max_rows), kind.num_heads, kind.head_dim, device
                ),
            )
            for place, (kind, capacity) in zip(places, capacities.items(), strict=True)
        }
        header = self._inputs[: sizes[0]].view(self._header).view(torch.int64)
        self.positions, *self._slots = header[:, :max_rows]

    def fill(self, ragged: RaggedBatch, num_rows: int) -> bool:
        """Copies a step's decodes; rows from their tokens to `num_rows` become padding.

        Returns False, and must not be replayed, if the plan exceeds its capacity: contexts that
        share most of their blocks may add up to more than the pool, and a sequence may have more
        drafts than are attended as decodes.
        """
        ranges = Ranges.of_batch(ragged.batch_slots, ragged.starts, ragged.num_queries)
        plans = self._attention.plans(ranges, ragged.block_tables)
        if not all(_fits(plan, self._work[kind]) for kind, plan in plans.items()):
            return False
        self._tables.update(ragged)
        # Torch reuses pinned memory only after the device has read it.
        pinned = torch.empty_like(self._inputs, device="cpu", pin_memory=self._inputs.is_cuda)
        staged = pinned.numpy()
        self._write_header(staged, ragged, num_rows)
        end = 0
        for kind, plan in plans.items():
            work = self._work[kind]
            num_used = pack_into(staged[work.place], plan.splits, work.capacity)
            end = work.place.start + num_used
        self._inputs[:end].copy_(pinned[:end], non_blocking=True)
        return True

    def _write_header(self, staged: Int32Array, ragged: RaggedBatch, num_rows: int) -> None:
        batch_slots, token_positions = ragged.places()
        num_tokens, block_size = len(batch_slots), self._attention.block_size
        header = staged[: math.prod(self._header)].reshape(self._header).view(np.int64)
        header[:, num_tokens:num_rows] = 0
        positions, *slots = header[:, :num_tokens]
        positions[:] = token_positions
        indices = token_positions // block_size
        offsets = token_positions - indices * block_size
        for places, table in zip(slots, ragged.block_tables, strict=True):
            places[:] = table[batch_slots, indices]
            places *= block_size
            places += offsets

    def rows(self, num_rows: int) -> TritonBatch:
        """Returns the first `num_rows` rows as the model's attention batch."""
        return TritonBatch(
            _NO_SLOTS,
            _NO_SLOTS,
            tuple(slots[:num_rows] for slots in self._slots),
            self._tables.tensors,
            {kind: self._work_of(kind, num_rows) for kind in self._work},
        )

    def _work_of(self, kind: LayerKind, num_rows: int) -> KindWork:
        work, capacity = self._work[kind], self._attention.capacity(kind, num_rows)
        splits = replace(work.splits, capacity=capacity)
        tiles = self._inputs.new_empty(0, TILE_FIELDS)
        return KindWork(AttentionArrays(splits, tiles), work.workspace)


def _fits(plan: AttentionPlan, work: _Work) -> bool:
    has_room = plan.splits.num_slots <= len(work.workspace.acc)
    return SplitCapacity.of(plan.splits).fits(work.capacity) and has_room and not len(plan.tiles)
