"""Block batches in transfer, with their checksums. Independent of the transport."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK, Int64Array
from baton.errors import DataLossError


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Adjacent blocks of a sequence in one cache group.

    Attributes:
        group: index of the cache group.
        first_block: index of the first block within the sequence.
        checksums: xxh3-64 of each block; empty if the fence is the only integrity check.
        payload: bytes of the blocks, in pieces; empty if the claimant reads the source's memory.
        source_blocks: block ids in the source's pool, if the claimant reads its memory.
    """

    group: int
    first_block: int
    checksums: tuple[int, ...] = ()
    payload: "tuple[memoryview[Any], ...]" = ()
    source_blocks: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the payload in bytes."""
        return sum(len(piece) for piece in self.payload)

    def count(self, block_bytes: int) -> int:
        """Returns the number of blocks. Raises `DataLossError` for a payload of partial blocks."""
        if self.source_blocks:
            return len(self.source_blocks)
        count, odd = divmod(self.num_bytes, block_bytes)
        if odd or not count:
            raise DataLossError(
                f"{self.num_bytes} bytes of group {self.group} arrived, of {block_bytes} a block"
            )
        return count

    def sources(self, num_targets: int, num_blocks: int) -> Int64Array:
        """Returns the ids of the blocks that the claimant reads.

        Raises `DataLossError` unless there is one for each target, and each is one of the source
        pool's blocks 1 to `num_blocks`.
        """
        if len(self.source_blocks) != num_targets:
            raise DataLossError(f"{len(self.source_blocks)} blocks came for {num_targets}")
        sources = np.asarray(self.source_blocks, np.int64)
        if sources.min() <= NULL_BLOCK or sources.max() > num_blocks:
            raise DataLossError(f"blocks of group {self.group} lie outside of the source's pool")
        return sources

    def check_block(self, index: int, checksum: int) -> None:
        """Raises `DataLossError` unless the batch's block at `index` has this checksum."""
        if index >= len(self.checksums) or checksum != self.checksums[index]:
            raise DataLossError(
                f"the checksum of block {self.first_block + index} of group {self.group} is another"
            )


def joined(batches: Sequence[BlockBatch]) -> BlockBatch:
    """Returns adjacent batches of one cache group, in order, as one."""
    return BlockBatch(
        batches[0].group,
        batches[0].first_block,
        tuple(checksum for batch in batches for checksum in batch.checksums),
        tuple(piece for batch in batches for piece in batch.payload),
        tuple(block for batch in batches for block in batch.source_blocks),
    )


def checksums_of(pieces: "Sequence[memoryview[Any]]", block_bytes: int) -> tuple[int, ...]:
    """Returns the xxh3-64 of each block; each piece holds whole blocks."""
    import xxhash  # imported late: the environment of the GPU tests lacks it

    return tuple(
        xxhash.xxh3_64_intdigest(
            piece if len(piece) == block_bytes else piece[start : start + block_bytes]
        )
        for piece in pieces
        for start in range(0, len(piece), block_bytes)
    )


def check(run: BlockBatch, pieces: "Sequence[memoryview[Any]]", block_bytes: int) -> None:
    """Raises `DataLossError` unless the blocks in `pieces` have the checksums of the batch."""
    for index, checksum in enumerate(checksums_of(pieces, block_bytes)):
        run.check_block(index, checksum)
