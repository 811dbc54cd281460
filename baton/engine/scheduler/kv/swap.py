"""Swap of sequences' blocks to host memory and back. The preemptor decides which, and when.

Sequences that share blocks swap together, so that each block moves once. Swap-in reads host blocks
and swap-out writes them: blocks read in a step are free from the next step on, so the two never
conflict.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.memory_operations import BlockMove, MemoryOperations
from baton.engine.scheduler.kv.prefix_cache import PrefixCache
from baton.engine.scheduler.kv.reservations import Reservations
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK, BatchSlots
from baton.engine.scheduler.sequences.sequence import Sequence


class Swap:
    """Host blocks of all cache groups, and the moves between them and the device's blocks.

    Attributes:
        num_blocks_out, num_blocks_in: blocks copied to host memory and back since the start.
    """

    def __init__(
        self,
        groups: SequenceOf[CacheGroup],
        batch_slots: BatchSlots[Sequence],
        prefixes: PrefixCache,
        reservations: Reservations,
        operations: MemoryOperations,
    ) -> None:
        self._groups = groups
        self._batch_slots = batch_slots
        self._prefixes = prefixes
        self._reservations = reservations
        self._operations = operations
        self.num_blocks_out = 0
        self.num_blocks_in = 0
        self._releases: list[tuple[int, list[int]]] = []

    # Swap-out.

    def has_room_for(self, sequences: list[Sequence]) -> bool:
        """Returns True if the host pools have enough free blocks for all of them together."""
        return all(
            group.host is not None
            and len(self._computed_blocks(sequences, i)) <= group.host.num_free_blocks
            for i, group in enumerate(self._groups)
        )

    def num_blocks(self, sequences: list[Sequence]) -> int:
        """Returns the blocks that swapping these sequences would move, over all groups."""
        return sum(len(self._computed_blocks(sequences, i)) for i in range(len(self._groups)))

    def copy_out(self, sequences: list[Sequence]) -> None:
        """Plans to copy their KV to host memory. The caller frees their blocks after."""
        for i in range(len(self._groups)):
            self._copy_group_out(sequences, i)

    def _copy_group_out(self, sequences: list[Sequence], index: int) -> None:
        host = self._groups[index].host
        assert host is not None, "swapping without host blocks"
        blocks = self._computed_blocks(sequences, index)
        places = dict(zip(blocks, host.allocate(len(blocks)), strict=True))
        taken: set[int] = set()
        for sequence in sequences:
            table = sequence.block_ids[index][: self._num_computed_blocks(sequence)]
            host.hold(places[b] for b in table if b in taken)
            taken.update(b for b in table if b != NULL_BLOCK)
            sequence.host_block_ids.append([places.get(b, NULL_BLOCK) for b in table])
        self.num_blocks_out += len(places)
        for block_id, place in places.items():
            # The target of a copy planned for this step is read at the copy's source.
            source = self._operations.copies.get((index, block_id), block_id)
            self._operations.swap_out.append(BlockMove(index, source, place))

    def _computed_blocks(self, sequences: list[Sequence], index: int) -> list[int]:
        """Returns the blocks with computed tokens, each once, without those outside a window."""
        tables = [
            s.block_ids[index][: self._num_computed_blocks(s)] for s in sequences if s.block_ids
        ]
        return list(dict.fromkeys(b for table in tables for b in table if b != NULL_BLOCK))

    def _num_computed_blocks(self, sequence: Sequence) -> int:
        return self._reservations.num_blocks_for(sequence.num_computed_tokens)

    # Swap-in.

    def copy_in(
        self, sequences: list[Sequence], *, num_left: int = 0, keeps_margin: bool = False
    ) -> bool:
        """Allocates blocks for swapped sequences, which have slots; cached blocks are not copied.

        Returns False, and changes nothing, unless every pool has enough free blocks for them and
        `num_left` more, with `keeps_margin` without those held free for running sequences.
        """
        sources = [self._sources(sequences, i) for i in range(len(self._groups))]
        for i, (found, missing) in enumerate(sources):
            revived = sum(map(self._groups[i].pool.is_free, found.values()))
            needed, reservations = revived + len(missing), self._reservations
            if needed + num_left > reservations.num_free_blocks(i):
                return False
            if needed > reservations.num_free_blocks(i, keeps_margin=keeps_margin):
                return False
        for i, (found, missing) in enumerate(sources):
            self._copy_group_in(sequences, i, found, missing)
        for sequence in sequences:
            sequence.host_block_ids = []
            sequence.shares_tail = True  # a sibling may have it too, or the prefix cache
        return True

    def _sources(self, sequences: list[Sequence], index: int) -> tuple[dict[int, int], list[int]]:
        """Returns the device blocks that still cache host blocks, and the host blocks to copy."""
        pool = self._groups[index].pool
        found: dict[int, int] = {}
        missing: dict[int, None] = {}
        for sequence in sequences:
            for i, place in enumerate(sequence.host_block_ids[index]):
                if place == NULL_BLOCK or place in found or place in missing:
                    continue
                is_full = i < sequence.num_committed_blocks and self._prefixes.is_enabled
                block_id = pool.lookup(sequence.block_hashes[i]) if is_full else None
                if block_id is None:
                    missing[place] = None
                else:
                    found[place] = block_id
        return found, list(missing)

    def _copy_group_in(
        self, sequences: list[Sequence], index: int, found: dict[int, int], missing: list[int]
    ) -> None:
        pool = self._groups[index].pool
        pool.hold(found.values())
        allocated = dict(zip(missing, pool.allocate(len(missing)), strict=True))
        self.num_blocks_in += len(allocated)
        for place, block_id in allocated.items():
            self._operations.swap_in.append(BlockMove(index, place, block_id))
        blocks = {**found, **allocated, NULL_BLOCK: NULL_BLOCK}
        taken: set[int] = {NULL_BLOCK}
        for sequence in sequences:
            places = sequence.host_block_ids[index]
            pool.hold(blocks[p] for p in places if p in taken and p != NULL_BLOCK)
            taken.update(places)
            table = [blocks[p] for p in places]
            sequence.block_ids.append(table)
            sequence.num_trimmed.append(table.count(NULL_BLOCK))
            self._batch_slots.set_blocks(index, sequence.batch_slot, 0, table)
            self._releases.append((index, [p for p in places if p != NULL_BLOCK]))

    # Cleanup.

    def drop(self, sequence: Sequence) -> None:
        """Frees the host blocks of a swapped sequence, from the next step on."""
        for i, table in enumerate(sequence.host_block_ids):
            self._releases.append((i, [b for b in table if b != NULL_BLOCK]))
        sequence.host_block_ids = []

    def begin_step(self) -> None:
        """Frees the host blocks that the last step has read."""
        for i, block_ids in self._releases:
            host = self._groups[i].host
            assert host is not None, "host blocks without a pool"
            host.release(block_ids)
        self._releases.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that the host pools agree with the tables of swapped sequences."""
        swapped = [s for s in sequences if s.host_block_ids]
        for i, group in enumerate(self._groups):
            if group.host is not None:
                pending = [ids for at, ids in self._releases if at == i]
                group.host.check_integrity([*(s.host_block_ids[i] for s in swapped), *pending])
