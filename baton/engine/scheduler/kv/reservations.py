"""Block reservations: free blocks, less those promised or held free. Knows no block ids."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.sequences.sequence import Sequence


class Reservations:
    """Free blocks reserved for sequences that are sure to be computed to their end."""

    def __init__(
        self,
        groups: SequenceOf[CacheGroup],
        block_size: int,
        max_chunk: int,
        free_block_margin: float = 0.0,
    ) -> None:
        """Reserves nothing yet. One step computes at most `max_chunk` tokens of a sequence;
        `free_block_margin` is the share of each pool that is held free for running sequences."""
        self._groups = groups
        self._block_size = block_size
        self._max_chunk = max_chunk
        self._num_reserved = [0] * len(groups)
        self._margins = [int(free_block_margin * group.pool.num_blocks) for group in groups]

    def num_free_blocks(self, group: int, *, keeps_margin: bool = False) -> int:
        """Returns the free blocks that are not reserved; with `keeps_margin` less those that are
        held free for running sequences, which may be a negative number."""
        margin = self._margins[group] if keeps_margin else 0
        return self._groups[group].pool.num_free_blocks - self._num_reserved[group] - margin

    @property
    def num_reserved_blocks(self) -> int:
        """Reserved blocks of all groups."""
        return sum(self._num_reserved)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def peak_blocks(self, group: CacheGroup, num_tokens: int) -> int:
        """Returns the most blocks a sequence holds at once while it is computed to `num_tokens`."""
        total = self.num_blocks_for(num_tokens)
        if group.window is None:
            return total
        return min(total, self.num_blocks_for(group.window - 1 + self._max_chunk) + 1)

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Reserves the free blocks that the sequence still needs to be computed up to `num_tokens`,
        as far as there are any."""
        reserved = sequence.num_reserved or [0] * len(self._groups)
        for i, group in enumerate(self._groups):
            held = len(sequence.block_ids[i]) - sequence.num_trimmed[i]
            missing = self.num_blocks_for(num_tokens) - len(sequence.block_ids[i])
            wanted = min(max(0, self.peak_blocks(group, num_tokens) - held), max(0, missing))
            # Blocks outside its window that other sequences hold are not free to be reserved.
            wanted = min(wanted, reserved[i] + self.num_free_blocks(i))
            self._num_reserved[i] += wanted - reserved[i]
            reserved[i] = wanted
        sequence.num_reserved = reserved

    def release(self, sequence: Sequence) -> None:
        """Releases the sequence's reservation, if any."""
        if sequence.num_reserved is not None:
            for i, count in enumerate(sequence.num_reserved):
                self._num_reserved[i] -= count
            sequence.num_reserved = None

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that reservations equal the sequences' and that the blocks are free."""
        promised = [s.num_reserved for s in sequences if s.num_reserved is not None]
        for i, group in enumerate(self._groups):
            assert sum(counts[i] for counts in promised) == self._num_reserved[i], (
                "reservations do not add up"
            )
            assert self._num_reserved[i] <= group.pool.num_free_blocks, (
                "more is reserved than is free"
            )
