"""Shared-memory connector of the source: passes its pools to workers of the same host."""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.cache.shared_memory import SharedMemory
from baton_kvtransfer.connector import Integrity
from baton_kvtransfer.connectors.shm.unix_peer import (
    GREETING,
    PREFIX,
    HandleEndpoint,
    belongs_to,
    host_id,
    listen,
    remove,
)
from baton_kvtransfer.stream.block_batch import BlockBatch, checksums_of
from baton_kvtransfer.stream.send_ahead import batches_ahead
from baton_kvtransfer.stream.transfer_stream import TransferStream

# Maximum bytes of one batch: a message costs as much as copying some hundred KiB.
RUN_BYTES = 256 * 2**20

logger = logging.getLogger(__name__)


class HandleServer:
    """Server that passes the file descriptors of shared pools to processes of the same user.

    Use as `async with`. A reader keeps what it has mapped; its connection stays open so that each
    end notices when the other is gone.

    Attributes:
        endpoint: where claimants connect.
    """

    def __init__(
        self, pools: Sequence[KvPool], socket_dir: str | None = None, *, user: int | None = None
    ) -> None:
        """`socket_dir`: folder of the socket; None for an abstract one. `user`: id of the user
        whose processes may read the pools; None for this process's. Raises `ValueError` if a pool
        is not in shared memory; entering raises `OSError` if the socket cannot be made."""
        if any(pool.shared is None for pool in pools):
            raise ValueError("the pools of this worker are not in shared memory")
        self._memories: list[SharedMemory] = [p.shared for p in pools if p.shared is not None]
        for memory in self._memories:
            memory.seal()
        num_blocks = tuple(pool.num_blocks for pool in pools)
        self.endpoint = HandleEndpoint(f"{PREFIX}{secrets.token_hex(16)}", host_id(), num_blocks)
        self._folder = socket_dir
        self._user = user
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._readers: set[socket.socket] = set()
        self._accepting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "HandleServer":
        self._socket.setblocking(False)
        try:
            await asyncio.to_thread(listen, self._socket, self.endpoint.address, self._folder)
        except OSError:
            self._socket.close()
            raise
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        self._socket.close()
        remove(self.endpoint.address, self._folder)
        self.disconnect()

    @property
    def num_readers(self) -> int:
        """Number of connected readers."""
        return len(self._readers)

    def disconnect(self) -> None:
        """Closes the connections of all readers, which then unmap the pools."""
        for reader in tuple(self._readers):
            self._drop_reader(reader)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                reader, _ = await loop.sock_accept(self._socket)
            except OSError:  # such as too many open files: a later call may succeed
                logger.exception("a reader of the KV pools could not be accepted")
                await asyncio.sleep(0.1)
                continue
            try:
                self._admit(reader)
            except OSError as error:
                logger.warning("a reader of the KV pools disconnected at once: %s", error)
                reader.close()

    def _admit(self, reader: socket.socket) -> None:
        if not belongs_to(reader, self._user):
            logger.warning("a process of another user was refused the KV pools")
            reader.close()
            return
        reader.setblocking(False)
        socket.send_fds(reader, [GREETING], [memory.fd for memory in self._memories])
        self._readers.add(reader)
        asyncio.get_running_loop().add_reader(reader, partial(self._drop_reader, reader))

    def _drop_reader(self, reader: socket.socket) -> None:
        """Closes a reader's connection. Readers send nothing, so readable means disconnected."""
        asyncio.get_running_loop().remove_reader(reader)
        self._readers.discard(reader)
        reader.close()


class PlaceSender:
    """Sender of block ids for reads in place, with checksums if requested, computed in a thread."""

    def __init__(self, integrity: Integrity, stream: TransferStream) -> None:
        self._checked = integrity is Integrity.CHECKSUMS
        self._stream = stream

    async def send(
        self, group: int, first_block: int, block_ids: Sequence[int], pool: KvPool
    ) -> AsyncGenerator[BlockBatch, None]:
        block_bytes = pool.layout.block_bytes
        if self._checked:
            digest = partial(self._digest, pool, group)
            async with aclosing(
                batches_ahead(digest, first_block, block_ids, block_bytes)
            ) as batches:
                async for batch in batches:
                    yield batch
            return
        most = max(1, RUN_BYTES // block_bytes)
        for start in range(0, len(block_ids), most):
            places = tuple(block_ids[start : start + most])
            yield BlockBatch(group, first_block + start, source_blocks=places)

    def _digest(
        self, pool: KvPool, group: int, first_block: int, block_ids: Sequence[int]
    ) -> list[BlockBatch]:
        """Returns one batch of the blocks with their checksums."""
        pieces = self._stream.read(pool, block_ids)
        checksums = checksums_of(pieces, pool.layout.block_bytes)
        return [BlockBatch(group, first_block, checksums, source_blocks=tuple(block_ids))]
