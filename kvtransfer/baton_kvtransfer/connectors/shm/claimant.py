"""Shared-memory connector of the claimant: copies blocks from the source's pools.

The source's memory is mapped read-only and each byte is copied once, into the claimant's own pool.
The copied blocks are valid only if the source afterwards confirms that it still held the lease.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from baton.engine.executor.cache.block_copy import Rows, as_rows
from baton.engine.executor.cache.kv_layout import KvLayout, pool_bytes
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.cache.shared_memory import map_readonly
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.errors import UnavailableError
from baton_kvtransfer.cancellation import ended
from baton_kvtransfer.connector import Integrity, Offer
from baton_kvtransfer.connectors.host import check_host
from baton_kvtransfer.connectors.shm.unix_peer import (
    GREETING,
    address_of,
    belongs_to,
)
from baton_kvtransfer.stream.block_batch import BlockBatch

CONNECT_TIMEOUT = 1.0
"""Seconds in which a source has to answer each call of `attach`."""
# Piece that is copied and then hashed while source and target are in a core's L2 cache.
PIECE_BYTES = 2**17

# Function that copies some of a batch's blocks, in a thread.
Copy = Callable[[slice], None]


@dataclass(frozen=True, slots=True)
class CopyThreads:
    """Threads that share the blocks of a batch: one core cannot use the full memory bandwidth, a
    few can.

    Attributes:
        max_threads: of one batch.
        min_bytes: that each thread copies, if there are several.
    """

    max_threads: int = min(4, os.cpu_count() or 1)
    min_bytes: int = 2**22

    def parts(self, num_blocks: int, block_bytes: int) -> list[slice]:
        """Returns the blocks that each thread copies."""
        worth = num_blocks * block_bytes // self.min_bytes
        num_threads = max(1, min(self.max_threads, worth, num_blocks))
        bounds = [num_blocks * i // num_threads for i in range(num_threads + 1)]
        return [slice(*part) for part in pairwise(bounds)]


class SharedReceiver:
    """Receiver that maps one source's pools, until `close` or until the source is gone."""

    def __init__(
        self, connection: socket.socket, pools: Sequence[Rows], threads: CopyThreads
    ) -> None:
        self._connection = connection
        self._pools: tuple[Rows, ...] = tuple(pools)
        self._threads = threads
        self.is_open = True

    async def receive(
        self, run: BlockBatch, pool: KvPool, targets: Sequence[int], integrity: Integrity
    ) -> None:
        if not self.is_open:
            raise UnavailableError("the worker whose memory was being read is gone")
        rows = self._pools[run.group]
        sources = run.sources(len(targets), len(rows) - 1)
        if integrity is Integrity.CHECKSUMS:
            copy = _checked_copying(run, rows, sources, pool, targets)
        else:
            copy = _copying(rows, sources, pool, targets)
        start = asyncio.get_running_loop().run_in_executor
        copying = asyncio.gather(
            *(start(None, copy, part) for part in self._threads.parts(len(targets), rows.itemsize)),
            return_exceptions=True,  # so that it ends after all threads have
        )
        try:
            for error in await asyncio.shield(copying):
                if error is not None:
                    raise error
        finally:
            # Other sequences may get the targets as soon as this ends, even by cancellation.
            await ended(copying)

    def watch(self) -> None:
        """Closes this when the source closes its connection."""
        asyncio.get_running_loop().add_reader(self._connection, self.close)

    def close(self) -> None:
        """Unmaps the pools after copies in flight have ended. Idempotent."""
        if self.is_open:
            self.is_open = False
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection.close()
            self._pools = ()


def attach(
    offer: Offer,
    layouts: Sequence[KvLayout],
    socket_dir: str | None = None,
    *,
    timeout: float = CONNECT_TIMEOUT,
    threads: CopyThreads | None = None,
    user: int | None = None,
) -> SharedReceiver:
    """Maps a source's pools, which have these `layouts`. Blocks for at most `timeout` seconds per
    call.

    `socket_dir`: folder of the sockets of this host's workers; None for abstract sockets. `user`:
    id of the user whose processes may be the source; None for this process's.

    Raises `UnavailableError` with the reason if the pools cannot be mapped.
    """
    check_host(offer.host)
    if len(offer.num_blocks) != len(layouts):
        raise UnavailableError(f"the other worker has {len(offer.num_blocks)} pools")
    try:
        with ExitStack() as on_failure:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            on_failure.callback(connection.close)
            connection.settimeout(timeout)
            connection.connect(address_of(offer.address, socket_dir))
            if not belongs_to(connection, user):
                raise UnavailableError("the other worker belongs to another user")
            pools = _receive_pools(connection, offer, layouts)
            connection.setblocking(False)
            on_failure.pop_all()
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise UnavailableError(
            "the other worker's memory cannot be read: its socket is not in this network namespace "
            f"or --socket-dir ({error})"
        ) from None  # unlike other errors of the system, this one does not pass
    except (OSError, ValueError) as error:
        raise UnavailableError(f"the other worker's memory cannot be read: {error}") from error
    return SharedReceiver(connection, pools, threads or CopyThreads())


def _receive_pools(
    connection: socket.socket, offer: Offer, layouts: Sequence[KvLayout]
) -> list[Rows]:
    greeting, fds, flags, _ = socket.recv_fds(
        connection, len(GREETING), len(layouts), socket.MSG_CMSG_CLOEXEC
    )
    try:
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "this process has no descriptor left for the pools")
        if greeting != GREETING or len(fds) != len(layouts):
            raise ValueError(f"it passed {len(fds)} descriptors for {len(layouts)} pools")
        return [
            as_rows(map_readonly(fd, pool_bytes(layout, count)), layout.block_bytes)
            for fd, layout, count in zip(fds, layouts, offer.num_blocks, strict=True)
        ]
    finally:
        for fd in fds:
            os.close(fd)


def _copying(rows: Rows, sources: Int64Array, pool: KvPool, targets: Sequence[int]) -> Copy:
    return lambda part: pool.copy_rows(rows, sources[part], targets[part])


def _checked_copying(
    run: BlockBatch, rows: Rows, sources: Int64Array, pool: KvPool, targets: Sequence[int]
) -> Copy:
    """Returns a function that verifies the checksums of the copies, not of the source's blocks."""
    contents = rows.view(np.uint8).reshape(len(rows), -1)
    blocks: Any = pool.content.numpy()
    pairs = list(enumerate(zip(sources.tolist(), targets, strict=True)))

    def copy(part: slice) -> None:
        for i, (there, here) in pairs[part]:
            run.check_block(i, _copy_digested(contents[there], blocks[here]))

    return copy


def _copy_digested(source: Rows, target: Any) -> int:
    """Copies a block's bytes. Returns the checksum of the copy."""
    import xxhash  # imported late: the environment of the GPU tests lacks it

    if len(source) <= PIECE_BYTES:
        target[:] = source
        return xxhash.xxh3_64_intdigest(target)
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        piece[:] = source[start : start + PIECE_BYTES]
        digest.update(piece)
    return digest.intdigest()
