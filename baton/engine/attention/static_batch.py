"""Static attention batch of decode steps, at fixed addresses for CUDA graph replay."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.attention.interface import RaggedBatch
from baton.engine.attention.triton_attention import (
    KindWork,
    LayerKind,
    TritonAttention,
    TritonBatch,
    slots_of,
    visible_tables,
)
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton_kernels.attention_plan import TILE_FIELDS, Ranges, SplitPlan, plan_splits
from baton_kernels.attention_plan_arrays import SplitArrays, SplitCapacity, pack
from baton_kernels.paged_attention import AttentionArrays
from baton_kernels.paged_decode import Workspace

_NO_SLOTS: Int64Array = np.zeros(0, np.int64)
_NOTHING = plan_splits(Ranges.of_batch(_NO_SLOTS, _NO_SLOTS, _NO_SLOTS), 1, 1, 1)


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of one kind of layer in steps of one size: its packed plan on the device."""

    packed: torch.Tensor
    capacity: SplitCapacity
    workspace: Workspace


class StaticTritonBatch:
    """Static batch of decodes of up to `max_rows` sequences; initially all rows are padding.

    A padded row's slot is in block 0, where nothing is written, and no plan contains it.
    """

    def __init__(self, attention: TritonAttention, max_rows: int, max_blocks: int) -> None:
        """Allocates the batch; the longest sequence has `max_blocks` blocks."""
        self._attention = attention
        device, groups = attention.device, range(attention.num_groups)
        self._slots = [torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in groups]
        self._tables = [
            torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device) for _ in groups
        ]
        self._workspaces = {
            kind: Workspace.allocate(
                attention.capacity(kind, max_rows).items, kind.num_heads, kind.head_dim, device
            )
            for kind in attention.tilings
        }
        self._work: dict[int, dict[LayerKind, _Work]] = {}

    def fill(self, ragged: RaggedBatch, num_rows: int) -> bool:
        """Copies a step's decodes; rows from their number to `num_rows` become padding.

        Returns False, and must not be replayed, if the plan exceeds its capacity: contexts that
        share most of their blocks may add up to more than the pool.
        """
        attention, num_decodes = self._attention, len(ragged.batch_slots)
        batch_slots, positions = ragged.places()
        tables = visible_tables(ragged, positions, attention.block_size)
        plans = attention.plans(ragged, tables)
        work = self._of_size(num_rows)
        if any(not _fits(plan.splits, work[kind].capacity) for kind, plan in plans.items()):
            return False
        for kind, plan in plans.items():
            self._copy(work[kind].packed, pack(plan.splits, work[kind].capacity))
        slots = slots_of(ragged, batch_slots, positions, attention.block_size)
        for target, places in zip(self._slots, slots, strict=True):
            self._copy(target[:num_rows], np.pad(places, (0, num_rows - num_decodes)))
        for table, rows in zip(self._tables, tables, strict=True):
            self._copy(table[:num_decodes, : rows.shape[1]], rows)
        return True

    def rows(self, num_rows: int) -> TritonBatch:
        """Returns the first `num_rows` rows as the model's attention batch."""
        return TritonBatch(
            _NO_SLOTS,
            _NO_SLOTS,
            tuple(slots[:num_rows] for slots in self._slots),
            tuple(table[:num_rows] for table in self._tables),
            {
                kind: KindWork(
                    AttentionArrays(
                        SplitArrays.view(work.packed, work.capacity),
                        work.packed.new_empty(0, TILE_FIELDS),
                    ),
                    work.workspace,
                )
                for kind, work in self._of_size(num_rows).items()
            },
        )

    def _of_size(self, num_rows: int) -> dict[LayerKind, _Work]:
        if num_rows not in self._work:
            self._work[num_rows] = {
                kind: self._new_work(kind, num_rows) for kind in self._attention.tilings
            }
        return self._work[num_rows]

    def _new_work(self, kind: LayerKind, num_rows: int) -> _Work:
        capacity = self._attention.capacity(kind, num_rows)
        packed = torch.from_numpy(pack(_NOTHING, capacity)).to(self._attention.device)
        return _Work(packed, capacity, self._workspaces[kind])

    def _copy(self, target: torch.Tensor, source: "npt.NDArray[np.generic]") -> None:
        tensor = torch.from_numpy(source)
        if target.is_cuda:
            tensor = tensor.pin_memory()
        target.copy_(tensor, non_blocking=True)


def _fits(plan: SplitPlan, capacity: SplitCapacity) -> bool:
    needed = SplitCapacity.of(plan)
    has_room = needed.items <= capacity.items and needed.shared_items <= capacity.shared_items
    return has_room and plan.num_slots <= capacity.items
