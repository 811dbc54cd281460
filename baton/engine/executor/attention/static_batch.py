"""Static attention batch of decode steps, at fixed addresses for CUDA graph replay. A decode has
one token, or several with its drafts.

A step fills a pinned array, `DecodeInputs`, which one transfer copies to the same places on the
device.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
import torch

from baton.engine.executor.attention.device_tables import DeviceTables
from baton.engine.executor.attention.interface import RaggedBatch
from baton.engine.executor.attention.triton_attention import (
    KindWork,
    LayerKind,
    TritonAttention,
    TritonBatch,
)
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton_kernels.attention.decode_inputs import DecodeInputs, KindInputs
from baton_kernels.attention.paged_attention import AttentionArrays
from baton_kernels.attention.paged_decode import Workspace
from baton_kernels.attention.plan import TILE_FIELDS, Ranges, SharedPrefix
from baton_kernels.attention.plan_arrays import SplitArrays
from baton_kernels.cpu.decode_inputs import decode_inputs

_NO_SLOTS: Int64Array = np.zeros(0, np.int64)

MakeInputs = Callable[[int, int, int, Sequence[KindInputs]], DecodeInputs]


class StepForm(Enum):
    """Form of a recorded step. `SHARING`: its decodes share prefixes, which one more kernel attends
    once (cascade)."""

    PLAIN = auto()
    SHARING = auto()


@dataclass(frozen=True, slots=True)
class _Work:
    """Work of one kind of layer: views of its packed plan."""

    splits: SplitArrays
    workspace: Workspace


class StaticTritonBatch:
    """Static batch of up to `max_rows` tokens of decodes; initially all rows are padding.

    A padded row's slot is in block 0, where nothing is written, and no plan contains it.

    Attributes:
        positions: `[max_rows]`, of the tokens; 0 in padded rows.
        forms: forms of steps that the model's layers may have.
    """

    def __init__(
        self,
        attention: TritonAttention,
        max_rows: int,
        max_blocks: int,
        make_inputs: MakeInputs = decode_inputs,
    ) -> None:
        """Allocates the batch; batch slots are below `max_rows`, and the longest sequence has
        `max_blocks` blocks."""
        self._attention = attention
        self._shared_prefixes = attention.shared_prefixes(max_rows)
        self.forms = tuple(StepForm) if self._shared_prefixes else (StepForm.PLAIN,)
        device, num_groups = attention.device, attention.num_groups
        self._tables = DeviceTables(num_groups, max_rows, max_blocks, device)
        kinds = {kind: attention.kind_inputs(kind, max_rows) for kind in attention.tilings}
        self._layout = make_inputs(
            num_groups, max_rows, attention.block_size, tuple(kinds.values())
        )
        staged = np.zeros(self._layout.size, np.int32)
        no_tables = [np.zeros((1, 1), np.int32)] * num_groups
        nothing = Ranges.of_batch(_NO_SLOTS, _NO_SLOTS, _NO_SLOTS)
        self._layout.write(staged, nothing, no_tables, max_rows)
        self._inputs = torch.from_numpy(staged).to(device, copy=True)
        workspaces = _workspaces(kinds, device)
        self._work = {
            kind: _Work(
                SplitArrays.view(self._inputs[place], inputs.capacity),
                workspaces[kind.num_heads, kind.head_dim],
            )
            for place, (kind, inputs) in zip(self._layout.places, kinds.items(), strict=True)
        }
        num_rows, num_words = self._layout.header
        header = self._inputs[: 2 * num_rows * num_words].view(torch.int64)
        self.positions, *self._slots = header.view(num_rows, num_words)[:, :max_rows]

    def fill(self, ragged: RaggedBatch, num_rows: int) -> StepForm | None:
        """Copies a step's decodes; rows from their tokens to `num_rows` become padding.

        Returns None, and must not be replayed, if a sequence has more drafts than are attended as
        decodes.
        """
        tables = ragged.block_tables
        ranges = ragged.ranges
        shared = [self._shared(kind, ranges, ragged) for kind in self._work]
        # Torch reuses pinned memory only after the device has read it.
        pinned = torch.empty_like(self._inputs, device="cpu", pin_memory=self._inputs.is_cuda)
        end = self._layout.write(pinned.numpy(), ranges, tables, num_rows, shared)
        if end is None:
            return None
        self._tables.update(ragged)
        self._inputs[:end].copy_(pinned[:end], non_blocking=True)
        return StepForm.SHARING if any(shared) else StepForm.PLAIN

    def _shared(self, kind: LayerKind, ranges: Ranges, ragged: RaggedBatch) -> list[SharedPrefix]:
        """Returns the prefixes that a kind of layer attends once."""
        prefixes = self._shared_prefixes.get(kind)
        if prefixes is None:
            return []
        group, rewrites = kind.cache_group, ragged.table_rewrites
        return prefixes.find(
            ranges, ragged.block_tables[group], None if rewrites is None else rewrites[group]
        )

    def rows(self, num_rows: int, form: Hashable) -> TritonBatch:
        """Returns the first `num_rows` rows as the model's attention batch."""
        return TritonBatch(
            _NO_SLOTS,
            _NO_SLOTS,
            tuple(slots[:num_rows] for slots in self._slots),
            self._tables.tensors,
            {kind: self._work_of(kind, num_rows, form) for kind in self._work},
        )

    def _work_of(self, kind: LayerKind, num_rows: int, form: Hashable) -> KindWork:
        work, capacity = self._work[kind], self._attention.capacity(kind, num_rows)
        if form is StepForm.PLAIN:
            capacity = replace(capacity, shared_items=0)
        splits = replace(work.splits, capacity=capacity)
        tiles = self._inputs.new_empty(0, TILE_FIELDS)
        return KindWork(AttentionArrays(splits, tiles), work.workspace)


def _workspaces(
    kinds: dict[LayerKind, KindInputs], device: torch.device
) -> dict[tuple[int, int], Workspace]:
    """Returns a workspace for each number and size of heads: layers run one after the other."""
    sizes: dict[tuple[int, int], int] = {}
    for kind, inputs in kinds.items():
        heads = kind.num_heads, kind.head_dim
        sizes[heads] = max(sizes.get(heads, 0), inputs.max_partials)
    return {heads: Workspace.allocate(size, *heads, device) for heads, size in sizes.items()}
