"""Pending blocks: full blocks that the step being planned computes. Holds and frees no block.

Every layer writes the K and V of all of a step's tokens before its attention reads any (see
`Attention`), so a sequence may continue in the step from a prefix that another one computes in it.
Two rules make that safe. A sequence that continues from pending blocks computes tokens in the same
step: whatever ends the step ends it for both. And nothing is preempted in a step after pending
blocks were found in it: their writer stays.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from baton.cluster.prefix import BlockHash
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK


class PendingBlocks:
    """Pending blocks of each cache group, by hash. Valid while one step is planned."""

    def __init__(self, num_groups: int) -> None:
        self._by_hash: list[dict[BlockHash, int]] = [{} for _ in range(num_groups)]
        self._block_ids: list[set[int]] = [set() for _ in range(num_groups)]
        self.awaited: set[BlockHash] = set()
        """Blocks that follow pending ones, which later steps compute."""

    def add(
        self, tables: SequenceOf[SequenceOf[int]], hashes: SequenceOf[BlockHash], blocks: range
    ) -> None:
        """Adds these blocks of a sequence's tables, whose chain hashes are `hashes`. The first
        block with a given content stays the one that is found."""
        for table, by_hash, block_ids in zip(tables, self._by_hash, self._block_ids, strict=True):
            for i in blocks:
                if table[i] != NULL_BLOCK and by_hash.setdefault(hashes[i], table[i]) == table[i]:
                    block_ids.add(table[i])

    def lookup(self, group: int, block_hash: BlockHash) -> int | None:
        """Returns the pending block with this content, or None."""
        return self._by_hash[group].get(block_hash)

    def num_before(self, tables: Iterable[SequenceOf[int]]) -> int:
        """Returns the number of leading blocks of these tables before the first pending one."""
        return min(
            next((i for i, block_id in enumerate(table) if block_id in pending), len(table))
            for table, pending in zip(tables, self._block_ids, strict=True)
        )
