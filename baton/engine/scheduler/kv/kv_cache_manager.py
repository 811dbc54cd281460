"""KV cache manager: allocates and frees the blocks of sequences. Knows no order or priority.

Blocks cover a sequence's tokens, left to right:

    | computed | new local hit | external hit | new | lookahead |

Blocks of the first two regions are in the prefix cache; an external one joins it when its
sequence's KV is committed after the handoff's fence; a new one when its last token is computed.
Lookahead blocks take drafts, which count as computed only once verified, and are never committed
before.

Layers that see the same tokens form a cache group with a pool of its own. A group with a window
holds only the blocks that its next query can see; the rest of its table is `NULL_BLOCK`.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.memory_operations import MemoryOperations
from baton.engine.scheduler.kv.pinned_blocks import PinnedBlocks
from baton.engine.scheduler.kv.prefix_cache import PrefixCache, PrefixHit
from baton.engine.scheduler.kv.reservations import Reservations
from baton.engine.scheduler.kv.swap import Swap
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK, BatchSlots, Int64Array
from baton.engine.scheduler.sequences.sequence import Sequence


class KvCacheManager:
    """Block tables of all sequences, one per cache group.

    Attributes:
        prefixes: the prefix cache.
        reservations: free blocks, and their reservations by sequence.
        swap: KV in host memory.
        pinned_blocks: cached blocks that are pinned for other workers.
        operations: block operations of the step being planned.
    """

    def __init__(
        self,
        groups: SequenceOf[CacheGroup],
        batch_slots: BatchSlots[Sequence],
        block_size: int,
        *,
        max_chunk: int,
        prefix_caching: bool = True,
        free_block_margin: float = 0.0,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.operations = MemoryOperations()
        self.prefixes = PrefixCache(self.groups, block_size, is_enabled=prefix_caching)
        self.reservations = Reservations(self.groups, block_size, max_chunk, free_block_margin)
        self.swap = Swap(
            self.groups, batch_slots, self.prefixes, self.reservations, self.operations
        )
        self.pinned_blocks = PinnedBlocks(self.groups, self.prefixes, self.reservations)
        self._batch_slots = batch_slots
        self._windowed = [(i, g) for i, g in enumerate(groups) if g.window is not None]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def begin_step(self) -> None:
        """Clears the operations of the last step, which were carried out, and frees the host blocks
        that they read."""
        self.operations.forget()
        self.swap.begin_step()

    # Allocation.

    def admit(
        self,
        sequence: Sequence,
        hit: PrefixHit,
        num_tokens: int,
        *,
        first_query: int | None = None,
        reserve_to: int = 0,
        keeps_margin: bool = False,
    ) -> bool:
        """Gives a sequence without blocks its hits and new blocks to cover `num_tokens` tokens.

        Args:
            first_query: the first token that will be computed here. None: the first after the hit.
            reserve_to: blocks to compute the sequence up to this token are reserved for it.
            keeps_margin: the blocks that are held free for running sequences must stay free.

        Returns False, and changes nothing, if a pool has too few free blocks.
        """
        assert not sequence.block_ids, "admit() of a sequence that has blocks"
        query = hit.num_tokens if first_query is None else first_query
        num_blocks = self.num_blocks_for(num_tokens)
        begins = [group.first_block(query, self.block_size) for group in self.groups]
        for i, group in enumerate(self.groups):
            held = hit.block_ids[i][begins[i] :]
            revived = sum(map(group.pool.is_free, held)) + hit.copies_last
            needed = num_blocks - begins[i] - len(held) + revived
            if reserve_to:
                peak = self.reservations.peak_blocks(group, reserve_to)
                needed = max(needed, peak - len(held) + revived)
            if needed > self.reservations.num_free_blocks(i, keeps_margin=keeps_margin):
                return False
        for i, begin in enumerate(begins):
            table = self._first_table(i, hit, begin, num_blocks)
            sequence.block_ids.append(table)
            self._batch_slots.set_blocks(i, sequence.batch_slot, 0, table)
        sequence.num_trimmed = begins
        sequence.num_committed_blocks = hit.num_committed
        sequence.num_computed_tokens = hit.num_tokens
        self._batch_slots.num_covered[sequence.batch_slot] = num_blocks * self.block_size
        if reserve_to:
            self.reservations.reserve(sequence, reserve_to)
        return True

    def _first_table(self, index: int, hit: PrefixHit, begin: int, num_blocks: int) -> list[int]:
        """Holds the hit's blocks from block `begin` on, and allocates new ones after it."""
        pool, held = self.groups[index].pool, hit.block_ids[index][begin:]
        sources = [held.pop()] if hit.copies_last else []
        pool.hold(held)
        new = pool.allocate(num_blocks - begin - len(held))
        for source in sources:  # copy on write of the hit's last block
            self.operations.copy(index, source, new[0])
        return [NULL_BLOCK] * begin + held + new

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Shares the parent's computed blocks with a child that has a slot and no blocks."""
        num_blocks = self.num_blocks_for(parent.num_computed_tokens)
        for i, group in enumerate(self.groups):
            table = parent.block_ids[i][:num_blocks]
            group.pool.hold(b for b in table if b != NULL_BLOCK)
            child.block_ids.append(table)
            self._batch_slots.set_blocks(i, child.batch_slot, 0, table)
        child.num_trimmed = list(parent.num_trimmed)
        child.block_hashes = parent.block_hashes[:]
        child.num_committed_blocks = parent.num_committed_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        self._batch_slots.num_covered[child.batch_slot] = num_blocks * self.block_size
        parent.shares_tail = child.shares_tail = True

    # Growth.

    def grow(self, sequence: Sequence, num_tokens: int, *, keeps_margin: bool = False) -> bool:
        """Extends the tables to cover `num_tokens` and copies a shared last block (copy on write).

        Returns False if a pool has too few free blocks, with `keeps_margin` without those that are
        held free for running sequences; blocks outside a window are freed anyway.
        """
        for i, group in self._windowed:
            self._trim(sequence, i, group, sequence.num_computed_tokens)
        num_blocks = self.num_blocks_for(num_tokens)
        have = len(sequence.block_ids[0])
        missing = max(0, num_blocks - have)
        shared = self._shared_tails(sequence) if sequence.shares_tail else ()
        own = sequence.num_reserved
        for i in range(len(self.groups)):
            available = self.reservations.num_free_blocks(i, keeps_margin=keeps_margin)
            if missing + (i in shared) > max(0, available + (own[i] if own else 0)):
                return False
        for i in shared:
            self._own_tail(sequence, i)
        sequence.shares_tail = False
        if missing:
            for i, group in enumerate(self.groups):
                new = group.pool.allocate(missing)
                sequence.block_ids[i] += new
                self._batch_slots.set_blocks(i, sequence.batch_slot, have, new)
            self._batch_slots.num_covered[sequence.batch_slot] = num_blocks * self.block_size
            self.clear_tail(sequence, num_tokens)
        if own:
            self.reservations.reserve(sequence, sequence.num_tokens)
        return True

    def grow_decodes(self, batch_slots: Int64Array) -> bool:
        """Allocates a block per group for each of these plain decodes, whose blocks are full.

        Returns False, and changes nothing, if a pool has too few free blocks.
        """
        count, columns = len(batch_slots), self._batch_slots
        for i in range(len(self.groups)):
            if count > self.reservations.num_free_blocks(i):
                return False
        new = [group.pool.allocate(count) for group in self.groups]
        covered, cleared = columns.num_covered[batch_slots], self.operations.cleared
        for n, (batch_slot, position) in enumerate(
            zip(batch_slots.tolist(), covered.tolist(), strict=True)
        ):
            sequence, place = columns.owners[batch_slot], position // self.block_size
            assert sequence is not None, "a decode without a sequence"
            for (
                i,
                group,
            ) in self._windowed:  # not by `position`: a block is cached before it is freed
                self._trim(sequence, i, group, sequence.num_computed_tokens)
            for i, (table, block_ids) in enumerate(zip(columns.block_tables, new, strict=True)):
                block_id = block_ids[n]
                table[batch_slot, place] = block_id
                sequence.block_ids[i].append(block_id)
                cleared[i, block_id] = None
        columns.num_covered[batch_slots] = covered + self.block_size
        columns.table_versions[batch_slots] += 1
        return True

    def clear_tail(self, sequence: Sequence, num_tokens: int) -> None:
        """Zeroes the last block if `num_tokens` fill it only in part: attention reads it as a
        whole, and a NaN of old content would spread even through a mask."""
        if num_tokens % self.block_size:
            for i, block_ids in enumerate(sequence.block_ids):
                self.operations.clear(i, block_ids[(num_tokens - 1) // self.block_size])

    def _shared_tails(self, sequence: Sequence) -> list[int]:
        """Returns the groups in which the block of the next token is shared or cached."""
        index = sequence.num_computed_tokens // self.block_size
        if index >= len(sequence.block_ids[0]):
            return []
        return [
            i
            for i, group in enumerate(self.groups)
            if not group.pool.is_writable(sequence.block_ids[i][index])
        ]

    def _own_tail(self, sequence: Sequence, group_index: int) -> None:
        """Copies on write."""
        pool, table = self.groups[group_index].pool, sequence.block_ids[group_index]
        index = sequence.num_computed_tokens // self.block_size
        (target,) = pool.allocate(1)
        self.operations.copy(group_index, table[index], target)
        pool.release([table[index]])
        table[index] = target
        self._batch_slots.set_blocks(group_index, sequence.batch_slot, index, [target])

    # Release.

    def _trim(self, sequence: Sequence, index: int, group: CacheGroup, query: int) -> None:
        """Releases the blocks of a windowed group that no query from position `query` on sees."""
        first, begin = group.first_block(query, self.block_size), sequence.num_trimmed[index]
        if first > begin:
            table = sequence.block_ids[index]
            group.pool.release(table[begin:first])
            table[begin:first] = trimmed = [NULL_BLOCK] * (first - begin)
            self._batch_slots.set_blocks(index, sequence.batch_slot, begin, trimmed)
            sequence.num_trimmed[index] = first

    def free(self, sequence: Sequence) -> None:
        """Releases all blocks, the tail to be evicted first."""
        self._release_blocks(sequence)
        sequence.num_committed_blocks = 0
        sequence.num_computed_tokens = 0

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Moves the KV of sequences that share blocks to host memory."""
        self.swap.copy_out(sequences)
        for sequence in sequences:
            self._release_blocks(sequence)

    def swap_in(
        self, sequences: list[Sequence], *, num_left: int = 0, keeps_margin: bool = False
    ) -> bool:
        """Brings swapped sequences back to the device; they have slots.

        Returns False, and changes nothing, if a pool has too few free blocks; see `Swap.copy_in`.
        """
        if not self.swap.copy_in(sequences, num_left=num_left, keeps_margin=keeps_margin):
            return False
        for sequence in sequences:
            num_covered = len(sequence.block_ids[0]) * self.block_size
            self._batch_slots.num_covered[sequence.batch_slot] = num_covered
        return True

    def _release_blocks(self, sequence: Sequence) -> None:
        for i, block_ids in enumerate(sequence.block_ids):
            self.groups[i].pool.release(reversed(block_ids[sequence.num_trimmed[i] :]))
        sequence.block_ids = []
        sequence.num_trimmed = []
        sequence.shares_tail = False
        self.reservations.release(sequence)

    # Checks.

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that pools, tables, batch slots and reservations agree."""
        sequences = list(sequences)
        for i, group in enumerate(self.groups):
            tables = [s.block_ids[i] for s in sequences if s.block_ids]
            group.pool.check_integrity([*tables, *self.pinned_blocks.tables(i)])
        self.reservations.check_integrity(sequences)
        self.swap.check_integrity(sequences)
        for sequence in sequences:
            self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        lengths = {len(ids) for ids in sequence.block_ids}
        assert len(lengths) <= 1, "tables of unequal length"
        if sequence.block_ids:
            covered = lengths.pop() * self.block_size
            assert sequence.num_computed_tokens <= covered, "computed beyond its blocks"
            if sequence.batch_slots is not None:
                assert covered == self._batch_slots.num_covered[sequence.batch_slot]
        if sequence.batch_slots is not None:
            for i, ids in enumerate(sequence.block_ids):
                row = self._batch_slots.block_tables[i][sequence.batch_slot]
                assert row[: len(ids)].tolist() == ids, "the slot's table is another"
                assert not row[len(ids) :].any(), "the slot's table goes on"
