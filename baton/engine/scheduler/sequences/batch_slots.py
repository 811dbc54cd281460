"""Batch slots: the state of the running sequences as arrays, one row per sequence.

A running sequence has a batch slot, which is a row of every array here. The scheduler writes the
arrays and the model runner reads them, so advancing a thousand decodes by one token takes a handful
of array operations and no copy between the two. Nothing writes between `schedule` and `apply`.
A slot that is released while planned steps are not applied yet is free once they are: until then
it is a row of theirs, whose result is dropped.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]
Owner = TypeVar("Owner")

NULL_BLOCK = 0
"""Null block: fills unused block table entries. Its content is always zero and it is never
allocated: a pool's own blocks are numbered from 1."""


class BatchSlots(Generic[Owner]):
    """Batch state of `num_batch_slots` sequences.

    Attributes:
        token_ids: `[num_batch_slots, capacity]`; the first `num_tokens` of a row are its sequence's
            tokens, drafts may follow them.
        num_tokens, num_computed: tokens, and tokens with KV, of each sequence, `[num_batch_slots]`.
        num_covered: tokens that the sequence's allocated blocks can hold.
        length_limit: maximum number of tokens, prompt and output.
        sequence_index: index of the sequence in its request.
        rank: scheduling rank under the policy; smaller is scheduled first.
        is_decoding: the sequence is a plain decode: one token behind, the only holder of its last
            block, and advanced by array operations alone.
        block_tables: per cache group, `[num_batch_slots, blocks]`; `NULL_BLOCK` in unused entries.
        table_versions: the number of changes of each slot's block tables, `[num_batch_slots]`.
        table_rewrites: per cache group, the number of changes of each slot's block table that do
            more than append blocks, `[num_batch_slots]`.
        owners: the sequence that has each slot; None if it is free.
    """

    def __init__(
        self, num_batch_slots: int, capacity: int, block_size: int, num_groups: int
    ) -> None:
        self.token_ids: TokenArray = np.zeros((num_batch_slots, capacity), np.int32)
        self.num_tokens: Int64Array = np.zeros(num_batch_slots, np.int64)
        self.num_computed: Int64Array = np.zeros(num_batch_slots, np.int64)
        self.num_covered: Int64Array = np.zeros(num_batch_slots, np.int64)
        self.length_limit: Int64Array = np.zeros(num_batch_slots, np.int64)
        self.sequence_index: Int64Array = np.zeros(num_batch_slots, np.int64)
        self.rank: npt.NDArray[np.float64] = np.zeros(num_batch_slots, np.float64)
        self.is_decoding: npt.NDArray[np.bool_] = np.zeros(num_batch_slots, np.bool_)
        num_blocks = -(-capacity // block_size)
        self.block_tables: tuple[TokenArray, ...] = tuple(
            np.zeros((num_batch_slots, num_blocks), np.int32) for _ in range(num_groups)
        )
        self.table_versions: Int64Array = np.zeros(num_batch_slots, np.int64)
        self.table_rewrites: tuple[Int64Array, ...] = tuple(
            np.zeros(num_batch_slots, np.int64) for _ in range(num_groups)
        )
        self.owners: list[Owner | None] = [None] * num_batch_slots
        self._free = list(reversed(range(num_batch_slots)))
        self._num_planned = self._num_applied = 0
        self._released: deque[tuple[int, int]] = deque()  # steps planned by then, and the slot

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_released(self) -> int:
        """Slots that are free once the steps planned before their release are applied."""
        return len(self._released)

    @property
    def num_unapplied(self) -> int:
        """Steps that are planned and not yet applied."""
        return self._num_planned - self._num_applied

    def acquire(self) -> int:
        """Takes a free slot. The caller has checked `num_free` and fills the row."""
        return self._free.pop()

    def set_blocks(
        self, group: int, batch_slot: int, first: int, block_ids: SequenceOf[int]
    ) -> None:
        """Writes entries of a slot's block table, from `first` on."""
        entries = self.block_tables[group][batch_slot, first : first + len(block_ids)]
        self.table_rewrites[group][batch_slot] += bool(entries.any())
        entries[:] = block_ids
        self.table_versions[batch_slot] += 1

    def release(self, batch_slot: int, num_blocks: int) -> None:
        """Releases a slot; clears the first `num_blocks` entries of its block tables."""
        for table, rewrites in zip(self.block_tables, self.table_rewrites, strict=True):
            table[batch_slot, :num_blocks] = NULL_BLOCK
            rewrites[batch_slot] += 1
        self.table_versions[batch_slot] += 1
        self.num_covered[batch_slot] = 0
        self.is_decoding[batch_slot] = False
        self.owners[batch_slot] = None
        self._released.append((self._num_planned, batch_slot))
        self._free_released()

    # Steps that may read a slot's row.

    def note_planned(self) -> None:
        """Notes a step whose plan may name any slot that is taken."""
        self._num_planned += 1

    def note_applied(self) -> None:
        """Notes that the oldest planned step is done."""
        self._num_applied = min(self._num_applied + 1, self._num_planned)
        self._free_released()

    def note_all_applied(self) -> None:
        """Notes that no planned step will run any more."""
        self._num_applied = self._num_planned
        self._free_released()

    def _free_released(self) -> None:
        while self._released and self._released[0][0] <= self._num_applied:
            self._free.append(self._released.popleft()[1])
