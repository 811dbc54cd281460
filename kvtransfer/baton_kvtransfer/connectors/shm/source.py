"""Shared-memory connector of the source: passes its pools to workers of the same host."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Sequence
from functools import partial

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.cache.shared_memory import SharedMemory
from baton_kvtransfer.connector import Offer
from baton_kvtransfer.connectors.host import host_id
from baton_kvtransfer.connectors.shm.unix_peer import (
    GREETING,
    PREFIX,
    belongs_to,
    listen,
    remove,
)

logger = logging.getLogger(__name__)


class HandleServer:
    """Server that passes the file descriptors of shared pools to processes of the same user.

    Use as `async with`. A reader keeps what it has mapped; its connection stays open so that each
    end notices when the other is gone.

    Attributes:
        offer: address of its socket, with 128 random bits, and what claimants check.
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
        address = f"{PREFIX}{secrets.token_hex(16)}"
        self.offer = Offer(address, host_id(), num_blocks=num_blocks)
        self._folder = socket_dir
        self._user = user
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._readers: set[socket.socket] = set()
        self._accepting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "HandleServer":
        self._socket.setblocking(False)
        try:
            await asyncio.to_thread(listen, self._socket, self.offer.address, self._folder)
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
        remove(self.offer.address, self._folder)
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
