"""Building of a source's block batches in a thread, ahead of what is sent."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial

from baton_kvtransfer.block_batch import BlockBatch
from baton_kvtransfer.cancellation import one_ahead

# Source and claimant work in parallel only over several parts. The first is small for low latency,
# each later one as large as all before it: the claimant takes one in about the time that the source
# needs for the next.
_FIRST_PART_BYTES = 2 * 2**20
_LARGE_PART_BYTES = 32 * 2**20

# Function that builds batches of some blocks, given the index of the first of them.
Build = Callable[[int, Sequence[int]], list[BlockBatch]]


async def batches_ahead(
    build: Build, first_block: int, block_ids: Sequence[int], block_bytes: int
) -> AsyncGenerator[BlockBatch, None]:
    """Yields batches of all blocks, built in a thread in parts of up to 32 MiB, one ahead. At most
    two exist at a time. Has to be closed: no thread reads a block after that."""
    calls = (
        partial(build, first_block + part.start, block_ids[part.start : part.stop])
        for part in _parts(len(block_ids), block_bytes)
    )
    async with aclosing(one_ahead(calls)) as parts:
        async for batches in parts:
            for batch in batches:
                yield batch


def _parts(num_blocks: int, block_bytes: int) -> Iterator[range]:
    start = 0
    while start < num_blocks:
        limit = min(max(_FIRST_PART_BYTES, start * block_bytes), _LARGE_PART_BYTES)
        stop = min(start + max(1, limit // block_bytes), num_blocks)
        yield range(start, stop)
        start = stop
