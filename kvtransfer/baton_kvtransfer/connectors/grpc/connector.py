"""gRPC connector: blocks as the payload of the Fetch stream.

Blocks in host memory are gathered, checked and scattered on the event loop, message by message: one
of 1 MiB takes 0.1 ms, less than a handover to a thread and back, and stays in the CPU's cache. For
a GPU threads do it, in large parts, by way of pinned host memory and on a stream of their own. That
memory belongs to the batches that are made of it, so it is not used again before the last of them
is sent.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import DataLossError
from baton_kvtransfer.cancellation import in_thread
from baton_kvtransfer.connector import Connector, Integrity, Offer
from baton_kvtransfer.stream.block_batch import BlockBatch, check, checksums_of
from baton_kvtransfer.stream.send_ahead import Build, PartSizes, batches_ahead
from baton_kvtransfer.stream.transfer_stream import TransferStream

# Larger messages are slower: the allocator maps fresh memory for each of their buffers.
MESSAGE_BYTES = 2**20


class GrpcConnector(Connector):
    """Connector whose batches have the blocks' bytes and checksums. Every worker has it."""

    name = "grpc"
    reads_in_place = False
    detects_loss = True

    def __init__(
        self,
        pools: Sequence[KvPool] = (),
        *,
        message_bytes: int = MESSAGE_BYTES,
        sizes: PartSizes | None = None,
    ) -> None:
        """`message_bytes`: limit of one message, of one block at least. `sizes`: of the parts that
        threads gather."""
        super().__init__(pools)
        self._message_bytes = message_bytes
        self._sizes = sizes
        self._receiver = PayloadReceiver(TransferStream())

    async def offer(self) -> Offer:
        return Offer()

    async def attach(self, _offer: Offer) -> "PayloadReceiver":
        return self._receiver

    def send(
        self,
        group: int,
        first_block: int,
        block_ids: Sequence[int],
        pool: KvPool,
        integrity: Integrity,  # noqa: ARG002 - it always has checksums
    ) -> AsyncGenerator[BlockBatch, None]:
        gather = partial(self._gather, pool, group)
        block_bytes = pool.layout.block_bytes
        if not pool.waits_for_device:
            num_at_once = self._blocks_a_message(block_bytes)
            return _gathered_here(gather, first_block, block_ids, num_at_once)
        return batches_ahead(gather, first_block, block_ids, block_bytes, self._sizes)

    def _gather(
        self, pool: KvPool, group: int, first_block: int, block_ids: Sequence[int]
    ) -> list[BlockBatch]:
        """Reads blocks; on a GPU in a thread. Returns a batch for each message."""
        block_bytes = pool.layout.block_bytes
        pieces = self.sending.read(pool, block_ids)
        batches = []
        for payload in _messages(pieces, self._blocks_a_message(block_bytes) * block_bytes):
            batches.append(
                BlockBatch(group, first_block, checksums_of(payload, block_bytes), payload)
            )
            first_block += len(batches[-1].checksums)
        return batches

    def _blocks_a_message(self, block_bytes: int) -> int:
        return max(1, self._message_bytes // block_bytes)


class PayloadReceiver:
    """Receiver that verifies the checksums of the bytes and writes them."""

    is_open = True

    def __init__(self, stream: TransferStream) -> None:
        self._stream = stream

    def close(self) -> None:
        """Does nothing: there is no resource to release."""

    async def receive(
        self, run: BlockBatch, pool: KvPool, targets: Sequence[int], _integrity: Integrity
    ) -> None:
        if run.num_bytes != len(targets) * pool.layout.block_bytes:
            raise DataLossError(f"{run.num_bytes} bytes arrived for {len(targets)} blocks")
        scatter = partial(self._scatter, run, pool, targets)
        if pool.waits_for_device:
            await in_thread(scatter)
        else:
            scatter()

    def _scatter(self, run: BlockBatch, pool: KvPool, targets: Sequence[int]) -> None:
        """Checks and writes blocks; on a GPU in a thread."""
        check(run, run.payload, pool.layout.block_bytes)
        with self._stream.on(pool.device):
            pool.write_blocks(targets, run.payload)


async def _gathered_here(
    gather: Build, first_block: int, block_ids: Sequence[int], num_at_once: int
) -> AsyncGenerator[BlockBatch, None]:
    """Yields batches of all blocks, `num_at_once` in each, gathered when they are asked for."""
    for start in range(0, len(block_ids), num_at_once):
        for batch in gather(first_block + start, block_ids[start : start + num_at_once]):
            yield batch


def _messages(
    pieces: "Sequence[memoryview[Any]]", most: int
) -> "Iterator[tuple[memoryview[Any], ...]]":
    """Yields the pieces of each message of up to `most` bytes, which are whole blocks. A piece, of
    whole blocks, may be cut between two."""
    message: list[memoryview[Any]] = []
    room = most
    for piece in pieces:
        while piece:
            message.append(piece[:room])
            piece = piece[len(message[-1]) :]
            room -= len(message[-1])
            if not room:
                yield tuple(message)
                message, room = [], most
    if message:
        yield tuple(message)
