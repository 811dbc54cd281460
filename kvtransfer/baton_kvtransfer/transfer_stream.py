"""CUDA stream of a worker's KV transfers, beside the engine's. On a CPU nothing is ordered."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from baton.engine.cache.kv_pool import KvPool
from baton.engine.device import use_device

StepEvent = torch.cuda.Event | None


def launched_steps(device: torch.device) -> StepEvent:
    """Returns the event after which all steps that the engine has launched by now are done: none of
    them uses a block that is read or overwritten after it. None on a CPU."""
    if device.type == "cpu":
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record(torch.cuda.default_stream(device))
    return event


@contextmanager
def current_context(device: torch.device) -> Iterator[None]:
    """Enters the context of a GPU for the `with` block."""
    with torch.cuda.device(device):
        use_device(device)
        yield


class TransferStream:
    """Stream of transfers in one direction on each device, created on first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def after(self, steps: StepEvent, device: torch.device) -> Iterator[None]:
        """Makes this the thread's stream during the `with` block, whose work begins after `steps`
        and has ended when the block is left."""
        if steps is None:
            yield
            return
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_event(steps)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                stream.synchronize()

    def read(self, pool: KvPool, block_ids: Sequence[int]) -> "list[memoryview[Any]]":
        """Returns the bytes of blocks as `KvPool.read_blocks`. Waits for the steps launched by now,
        and for none that the engine launches later."""
        with self.after(launched_steps(pool.device), pool.device):
            return pool.read_blocks(block_ids)
