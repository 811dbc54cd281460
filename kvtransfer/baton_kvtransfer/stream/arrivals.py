"""Arrivals of one transfer: batches that have arrived, and are written while others arrive."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import NoReturn

from baton_kvtransfer.stream.block_batch import BlockBatch, joined

# Batches that wait for the write before them. Further ones wait in the connection, whose flow
# control slows the source down.
_MOST_WAITING = 32

Write = Callable[[BlockBatch, Sequence[int]], Awaitable[None]]


class Arrivals:
    """Queue of batches and their target blocks. Those that arrive during a write are written
    together after it, so that fewer and larger writes follow a faster source."""

    def __init__(self, write: Write) -> None:
        """`write` writes a batch to its targets; nothing writes to them after it has ended."""
        self._write = write
        self._waiting: asyncio.Queue[tuple[BlockBatch, Sequence[int]]] = asyncio.Queue(
            _MOST_WAITING
        )

    async def put(self, batch: BlockBatch, targets: Sequence[int]) -> None:
        """Queues the batch that follows those before it."""
        await self._waiting.put((batch, targets))

    async def flush(self) -> None:
        """Waits until all batches are written."""
        await self._waiting.join()

    async def write_all(self) -> NoReturn:
        """Writes batches as they arrive, until it is cancelled. Raises the error of a write."""
        while True:
            arrived = [await self._waiting.get()]
            while not self._waiting.empty():
                arrived.append(self._waiting.get_nowait())
            for _, adjacent in groupby(arrived, lambda placed: placed[0].group):
                batches, targets = zip(*adjacent, strict=True)
                await self._write(joined(batches), [block for part in targets for block in part])
            for _ in arrived:
                self._waiting.task_done()
