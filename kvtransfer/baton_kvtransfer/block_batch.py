"""Blocks on their way. Knows no transport."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import DataLossError


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Adjacent blocks of a sequence in one cache group.

    Attributes:
        group: the cache group.
        first_block: the index, within the sequence, of the first one.
        checksums: of each block; empty where the fence alone has to do.
        payload: their bytes, in pieces; empty where memory is read in place.
        source_blocks: where they lie in the source's pool, where it is.
    """

    group: int
    first_block: int
    checksums: tuple[int, ...] = ()
    payload: "tuple[memoryview[Any], ...]" = ()
    source_blocks: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of the payload."""
        return sum(len(piece) for piece in self.payload)

    def count(self, block_bytes: int) -> int:
        """How many blocks it brings. Raises `DataLossError` for no whole number of them."""
        if self.source_blocks:
            return len(self.source_blocks)
        count, odd = divmod(self.num_bytes, block_bytes)
        if odd or not count:
            raise DataLossError(
                f"{self.num_bytes} bytes of group {self.group} arrived, of {block_bytes} a block"
            )
        return count

    def check_block(self, index: int, checksum: int) -> None:
        """Raises `DataLossError` unless this is the checksum of its block at `index`."""
        if index >= len(self.checksums) or checksum != self.checksums[index]:
            raise DataLossError(
                f"the checksum of block {self.first_block + index} of group {self.group} is another"
            )


def checksums_of(pieces: "Sequence[memoryview[Any]]", block_bytes: int) -> tuple[int, ...]:
    """xxh3-64 of each block; each piece holds whole blocks."""
    import xxhash  # where a GPU is tested there is nothing but what computes

    return tuple(
        xxhash.xxh3_64_intdigest(
            piece if len(piece) == block_bytes else piece[start : start + block_bytes]
        )
        for piece in pieces
        for start in range(0, len(piece), block_bytes)
    )


def check(run: BlockBatch, pieces: "Sequence[memoryview[Any]]", block_bytes: int) -> None:
    """Raises `DataLossError` unless the pieces are the blocks of a run."""
    for index, checksum in enumerate(checksums_of(pieces, block_bytes)):
        run.check_block(index, checksum)
