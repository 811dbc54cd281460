"""CUDA stream of a worker's KV transfers, beside the engine's. On a CPU nothing is ordered.

Transfers wait for no step. The engine announces blocks, to be read or written by others, after all
steps that could read or write them are done (ADR 0033, ADR 0039); so transfers copy while the steps
launched since compute, also where another process launches them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from baton.engine.executor.cache.kv_pool import KvPool


class TransferStream:
    """Stream of transfers in one direction on each device, created on first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Makes this the thread's stream during the `with` block. Work launched in the block has
        ended when it is left."""
        if device.type == "cpu":
            yield
            return
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                stream.synchronize()

    def read(self, pool: KvPool, block_ids: Sequence[int]) -> "list[memoryview[Any]]":
        """Returns the bytes of blocks as `KvPool.read_blocks`, on this stream."""
        with self.on(pool.device):
            return pool.read_blocks(block_ids)
