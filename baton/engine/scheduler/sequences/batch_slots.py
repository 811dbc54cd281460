"""The running sequences as columns: what a step needs of all of them at once.

A sequence that runs has a slot, which is a row of every column here. The scheduler writes the
columns and the runner reads them, so that advancing a thousand decodes by one token is a handful of
array operations and nothing is copied from one half of the engine to the other. Between `schedule`
and `apply` nobody writes.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from baton.engine.scheduler.sequences.sequence import Sequence

Int64Array = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]

NULL_BLOCK = 0
"""Stands in a table where there is no block. Its content is always zero and it is never handed
out: a pool's own blocks are numbered from 1."""


class BatchSlots:
    """`num_batch_slots` rows.

    Attributes:
        token_ids: `[num_batch_slots, capacity]`; the first `num_tokens` of a row are its sequence's
            tokens, drafts may follow them.
        num_tokens, num_computed: of each sequence, `[num_batch_slots]`.
        num_covered: tokens that its blocks have room for.
        length_limit: the number of tokens it ends with at the latest.
        sequence_index: its place among the sequences of its request.
        rank: its place in the policy's order; smaller goes first.
        is_decoding: it is one token behind, its last block is its own and nothing about it is
            special, so that it advances by array operations alone.
        block_tables: per cache group, `[num_batch_slots, blocks]`; `NULL_BLOCK` where it has none.
        owners: the sequence on each slot.
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
        self.owners: list[Sequence | None] = [None] * num_batch_slots
        self._free = list(reversed(range(num_batch_slots)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int:
        """A free slot. The caller has checked `num_free` and fills the row."""
        return self._free.pop()

    def release(self, batch_slot: int, num_blocks: int) -> None:
        """Frees a slot whose tables have up to `num_blocks` entries."""
        for table in self.block_tables:
            table[batch_slot, :num_blocks] = NULL_BLOCK
        self.num_covered[batch_slot] = 0
        self.is_decoding[batch_slot] = False
        self.owners[batch_slot] = None
        self._free.append(batch_slot)
