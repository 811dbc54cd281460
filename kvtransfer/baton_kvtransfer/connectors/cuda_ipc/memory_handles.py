"""CUDA IPC connector: blocks copied within a GPU, or between GPUs of one host.

The source offers memory handles of its pools. The claimant opens them once and copies on a stream
of its own, concurrently with other work of its GPU; the copied blocks are valid only after the
source has confirmed that the lease still held.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.engine.cache.kv_layout import KvLayout, pool_bytes
from baton.engine.cache.kv_pool import KvPool
from baton.engine.device import use_device
from baton.errors import UnavailableError
from baton_kvtransfer.block_batch import BlockBatch, check
from baton_kvtransfer.cancellation import in_thread
from baton_kvtransfer.connector import Integrity
from baton_kvtransfer.connectors.shm.unix_peer import host_id
from baton_kvtransfer.transfer_stream import TransferStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IpcRegion:
    """Memory region of a pool.

    Attributes:
        handle: IPC handle of the device's allocation.
        offset: offset of block 0 in that allocation, in bytes.
        device_uuid: UUID of the GPU, 16 bytes.
        num_blocks: number of blocks, not counting block 0.
    """

    handle: bytes
    offset: int
    device_uuid: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class IpcOffer:
    """Memory handles by which a process of the same host reads pools on a GPU."""

    host: str
    regions: tuple[IpcRegion, ...]


class CudaMemory(Protocol):
    """CUDA IPC interface: GPU memory shared by processes. Every call may raise `RuntimeError`."""

    def device_uuid(self, device: torch.device) -> bytes:
        """Returns the UUID of the GPU, which is independent of host and device number."""

    def visible(self) -> dict[bytes, torch.device]:
        """Returns the GPUs that this process sees, by UUID."""

    def reaches(self, device: torch.device, other: torch.device) -> bool:
        """Returns whether `device` can read the memory of `other`."""

    def export(self, memory: torch.Tensor) -> tuple[bytes, int]:
        """Returns the IPC handle of the allocation that has `memory`, and its offset in bytes."""

    def open(self, handle: bytes, device: torch.device) -> int:
        """Maps another process's allocation into the context of `device`, this process's GPU, which
        then reads it over the link between the GPUs. Returns its address here, which is the same
        for all that have it open; each has to `close` it."""

    def view(self, address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Returns a view of the bytes at an address that is mapped for `device`."""

    def close(self, address: int) -> None: ...

    def copy(
        self, pool: KvPool, origin: torch.Tensor, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copies rows of `origin` into blocks on a stream of its own; returns when it is done."""


def offer(pools: Sequence[KvPool], cuda: CudaMemory) -> IpcOffer | str:
    """Returns the memory handles of the pools, or the reason for none."""
    if any(pool.device.type != "cuda" for pool in pools):
        return "the pools of the other worker are not on a GPU"
    try:
        regions = tuple(
            IpcRegion(*cuda.export(pool.content), cuda.device_uuid(pool.device), pool.num_blocks)
            for pool in pools
        )
    except RuntimeError as error:
        return f"the other worker cannot export its memory: {error}"
    return IpcOffer(host_id(), regions)


def attach(offered: IpcOffer, pools: Sequence[KvPool], cuda: CudaMemory) -> "IpcReceiver":
    """Opens a source's pools. Raises `UnavailableError` with the reason if it cannot."""
    if offered.host != host_id():
        raise UnavailableError("the other worker is on another host")
    if len(offered.regions) != len(pools):
        raise UnavailableError(f"the other worker has {len(offered.regions)} pools")
    receiver = IpcReceiver(cuda)
    try:
        visible = cuda.visible()
        for region, pool in zip(offered.regions, pools, strict=True):
            device = visible.get(region.device_uuid)
            if device is None or not cuda.reaches(pool.device, device):
                raise UnavailableError("the GPU of the other worker is not visible to this one")
            receiver.open(region, pool.layout, pool.device)
    except RuntimeError as error:
        receiver.close()
        raise UnavailableError(f"the other worker's memory cannot be opened: {error}") from error
    except BaseException:
        receiver.close()
        raise
    return receiver


class IpcReceiver:
    """Receiver that has one source's pools open, until `close`."""

    def __init__(self, cuda: CudaMemory) -> None:
        self._cuda = cuda
        self._stream = TransferStream()
        self._addresses: dict[bytes, int] = {}
        self._pools: list[torch.Tensor] = []  # each [num_blocks + 1, block_bytes]
        self._num_copying = 0
        self.is_open = True

    def open(self, region: IpcRegion, layout: KvLayout, device: torch.device) -> None:
        """Adds a pool. Opens an allocation once, even if several pools are in it."""
        if region.handle not in self._addresses:
            self._addresses[region.handle] = self._cuda.open(region.handle, device)
        address = self._addresses[region.handle] + region.offset
        content = self._cuda.view(address, pool_bytes(layout, region.num_blocks), device)
        self._pools.append(content.view(-1, layout.block_bytes))

    async def receive(
        self, run: BlockBatch, pool: KvPool, targets: Sequence[int], integrity: Integrity
    ) -> None:
        if not self.is_open:
            raise UnavailableError("the worker whose memory was being read is gone")
        rows = self._pools[run.group]
        run.sources(len(targets), len(rows) - 1)
        self._num_copying += 1
        try:
            await in_thread(self._copy, run, rows, pool, targets, integrity)
        finally:
            self._num_copying -= 1
            self._close_if_done()

    def close(self) -> None:
        """Closes the pools after copies in flight have ended. Idempotent."""
        self.is_open = False
        self._close_if_done()

    def _copy(
        self,
        run: BlockBatch,
        rows: torch.Tensor,
        pool: KvPool,
        targets: Sequence[int],
        integrity: Integrity,
    ) -> None:
        """Copies and checks a batch, in a thread."""
        use_device(pool.device)
        try:
            self._cuda.copy(pool, rows, run.source_blocks, targets)
        except RuntimeError as error:
            raise UnavailableError(f"the other worker's memory cannot be read: {error}") from error
        if integrity is Integrity.CHECKSUMS:
            check(run, self._stream.read(pool, targets), pool.layout.block_bytes)

    def _close_if_done(self) -> None:
        if self.is_open or self._num_copying:
            return
        self._pools.clear()
        while self._addresses:
            try:
                self._cuda.close(self._addresses.popitem()[1])
            except RuntimeError as error:  # such as a lost device, with all its open memory
                logger.warning("another worker's memory could not be closed: %s", error)
