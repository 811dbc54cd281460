"""Block batches of places: ids of blocks that the claimant reads in the source's memory."""

from collections.abc import AsyncGenerator, Sequence

from baton.engine.executor.cache.kv_pool import KvPool
from baton_kvtransfer.stream.block_batch import BlockBatch, checksums_of
from baton_kvtransfer.stream.send_ahead import batches_ahead
from baton_kvtransfer.stream.transfer_stream import TransferStream

# Maximum bytes of one batch: a message costs as much as copying some hundred KiB.
RUN_BYTES = 256 * 2**20


async def places(
    group: int, first_block: int, block_ids: Sequence[int], pool: KvPool
) -> AsyncGenerator[BlockBatch, None]:
    """Yields batches without checksums."""
    most = max(1, RUN_BYTES // pool.layout.block_bytes)
    for start in range(0, len(block_ids), most):
        part = tuple(block_ids[start : start + most])
        yield BlockBatch(group, first_block + start, source_blocks=part)


def checked_places(
    stream: TransferStream, group: int, first_block: int, block_ids: Sequence[int], pool: KvPool
) -> AsyncGenerator[BlockBatch, None]:
    """Yields batches with checksums, computed in a thread, where blocks of a GPU are read on
    `stream`. Has to be closed: no thread reads a block after that."""
    block_bytes = pool.layout.block_bytes

    def digest(first_block: int, block_ids: Sequence[int]) -> list[BlockBatch]:
        checksums = checksums_of(stream.read(pool, block_ids), block_bytes)
        return [BlockBatch(group, first_block, checksums, source_blocks=tuple(block_ids))]

    return batches_ahead(digest, first_block, block_ids, block_bytes)
