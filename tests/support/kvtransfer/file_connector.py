"""Connector that Baton does not have: blocks move by files. All of it is this class."""

import os
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import UnavailableError
from baton_kvtransfer.connector import Connector, Integrity, Offer
from baton_kvtransfer.stream.block_batch import BlockBatch, checksums_of


class FileConnector(Connector):
    """Source that writes blocks to a file for each pool when it sends them, at their offsets."""

    name = "files"
    detects_loss = True

    def __init__(self, pools: Sequence[KvPool]) -> None:
        super().__init__(pools)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: list[int] = []

    async def offer(self) -> Offer:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-")
        self._files = [
            os.open(Path(self._folder.name, str(group)), os.O_CREAT | os.O_RDWR)
            for group, _ in enumerate(self.pools)
        ]
        return Offer(address=self._folder.name)

    async def attach(self, offer: Offer) -> "FileReceiver":
        files = [Path(offer.address, str(group)) for group, _ in enumerate(self.pools)]
        try:
            return FileReceiver([os.open(file, os.O_RDONLY) for file in files])
        except OSError as error:
            raise UnavailableError(f"the folder cannot be read: {error}") from error

    async def send(
        self,
        group: int,
        first_block: int,
        block_ids: Sequence[int],
        pool: KvPool,
        integrity: Integrity,
    ) -> AsyncGenerator[BlockBatch, None]:
        size = pool.layout.block_bytes
        for index, block in enumerate(block_ids):
            content = pool.read_block(block)
            os.pwrite(self._files[group], content, block * size)
            yield BlockBatch(
                group, first_block + index, checksums_of([content], size), source_blocks=(block,)
            )

    async def close(self) -> None:
        while self._files:
            os.close(self._files.pop())
        if self._folder is not None:
            self._folder.cleanup()


class FileReceiver:
    """Receiver that reads the source's files."""

    def __init__(self, files: list[int]) -> None:
        self._files = files

    @property
    def is_open(self) -> bool:
        return bool(self._files)

    async def receive(
        self, run: BlockBatch, pool: KvPool, targets: Sequence[int], integrity: Integrity
    ) -> None:
        size = pool.layout.block_bytes
        for index, source in enumerate(run.sources(len(targets), 2**31).tolist()):
            content = os.pread(self._files[run.group], size, source * size)
            if integrity is Integrity.CHECKSUMS:
                run.check_block(index, *checksums_of([memoryview(content)], size))
            pool.write_block(targets[index], content)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())
