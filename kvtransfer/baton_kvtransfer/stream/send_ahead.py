"""Building of a source's block batches in a thread, ahead of what is sent."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from baton_kvtransfer.cancellation import one_ahead
from baton_kvtransfer.stream.block_batch import BlockBatch

# Function that builds batches of some blocks, given the index of the first of them.
Build = Callable[[int, Sequence[int]], list[BlockBatch]]


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Sizes of the parts over which source and claimant work in parallel.

    The first is small for low latency, each later one as large as all before it: the claimant takes
    one in about the time that the source needs for the next.

    Attributes:
        first_bytes: limit of the first part.
        max_bytes: limit of each later one.
    """

    first_bytes: int = 2 * 2**20
    max_bytes: int = 32 * 2**20

    def parts(self, num_blocks: int, block_bytes: int) -> Iterator[range]:
        """Yields the blocks of each part, at least one."""
        start = 0
        while start < num_blocks:
            limit = min(max(self.first_bytes, start * block_bytes), self.max_bytes)
            stop = min(start + max(1, limit // block_bytes), num_blocks)
            yield range(start, stop)
            start = stop


async def batches_ahead(
    build: Build,
    first_block: int,
    block_ids: Sequence[int],
    block_bytes: int,
    sizes: PartSizes | None = None,
) -> AsyncGenerator[BlockBatch, None]:
    """Yields batches of all blocks, built in a thread in parts of `sizes`, one ahead. At most two
    exist at a time. Has to be closed: no thread reads a block after that."""
    parts_of = (sizes or PartSizes()).parts
    calls = (
        partial(build, first_block + part.start, block_ids[part.start : part.stop])
        for part in parts_of(len(block_ids), block_bytes)
    )
    async with aclosing(one_ahead(calls)) as parts:
        async for batches in parts:
            for batch in batches:
                yield batch
