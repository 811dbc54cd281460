"""Block reservations: free blocks, less those that are promised. Knows numbers of blocks, not
which.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.sequences.sequence import Sequence


class Reservations:
    """Free blocks that are kept for sequences let in on the promise that they can be computed to
    their end."""

    def __init__(self, groups: SequenceOf[CacheGroup], block_size: int, max_chunk: int) -> None:
        """Args: max_chunk: tokens of a sequence that one step computes at most."""
        self._groups = groups
        self._block_size = block_size
        self._max_chunk = max_chunk
        self._num_reserved = [0] * len(groups)

    def num_free_blocks(self, group: int) -> int:
        """Free blocks that are kept for nobody."""
        return self._groups[group].pool.num_free_blocks - self._num_reserved[group]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def peak_blocks(self, group: CacheGroup, num_tokens: int) -> int:
        """The most blocks a sequence holds at once while it is computed up to `num_tokens`."""
        total = self.num_blocks_for(num_tokens)
        if group.window is None:
            return total
        return min(total, self.num_blocks_for(group.window - 1 + self._max_chunk) + 1)

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Keeps free what the sequence may still need to be computed up to `num_tokens`, as far as
        it is free."""
        reserved = sequence.num_reserved or [0] * len(self._groups)
        for i, group in enumerate(self._groups):
            held = len(sequence.block_ids[i]) - sequence.num_trimmed[i]
            missing = self.num_blocks_for(num_tokens) - len(sequence.block_ids[i])
            wanted = min(max(0, self.peak_blocks(group, num_tokens) - held), max(0, missing))
            # What others hold of the blocks its window has passed is not free to be kept for it.
            wanted = min(wanted, reserved[i] + self.num_free_blocks(i))
            self._num_reserved[i] += wanted - reserved[i]
            reserved[i] = wanted
        sequence.num_reserved = reserved

    def release(self, sequence: Sequence) -> None:
        """Lets others have what was kept for it, if anything."""
        if sequence.num_reserved is not None:
            for i, count in enumerate(sequence.num_reserved):
                self._num_reserved[i] -= count
            sequence.num_reserved = None

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that what is kept is what the sequences were promised, and free."""
        promised = [s.num_reserved for s in sequences if s.num_reserved is not None]
        for i, group in enumerate(self._groups):
            assert sum(counts[i] for counts in promised) == self._num_reserved[i], (
                "reservations do not add up"
            )
            assert self._num_reserved[i] <= group.pool.num_free_blocks, (
                "more is reserved than is free"
            )
