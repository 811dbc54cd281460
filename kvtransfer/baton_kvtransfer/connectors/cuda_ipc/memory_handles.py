"""The connector `cuda-ipc`: blocks copied within a GPU, or from one to another, on one host.

A source says by which handle the memory of its pools can be opened. The claimant opens it once and
copies on a stream of its own, beside whatever else its GPU does; what was read is worth something
only once the source has confirmed that the lease still held.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.engine.cache.kv_pool import KvLayout, KvPool, pool_bytes
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import DataLossError, UnavailableError
from baton_kvtransfer.block_batch import BlockBatch, check
from baton_kvtransfer.cancellation import ended
from baton_kvtransfer.connector import Connector, Integrity
from baton_kvtransfer.connectors.shm.unix_peer import host_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IpcRegion:
    """Memory region of a pool.

    Attributes:
        handle: of the device's allocation, for other processes.
        offset: where in that allocation block 0 begins, in bytes.
        device_uuid: 16 bytes.
        num_blocks: not counting block 0.
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
    """Memory of GPUs between processes. Every call may raise `RuntimeError`."""

    def device_uuid(self, device: torch.device) -> bytes:
        """Which GPU it is, on whatever host and by whatever number."""

    def visible(self) -> dict[bytes, torch.device]:
        """The GPUs of this process."""

    def reaches(self, device: torch.device, other: torch.device) -> bool:
        """Whether one can read the other's memory."""

    def export(self, memory: torch.Tensor) -> tuple[bytes, int]:
        """The handle of the allocation that it lies in, and where."""

    def open(self, handle: bytes, device: torch.device) -> int:
        """The address here of another process's allocation, until `close`."""

    def view(self, address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """The bytes at an address."""

    def close(self, address: int) -> None: ...

    def copy(
        self, pool: KvPool, origin: torch.Tensor, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Copies rows of `origin` into blocks, beside everything else. Returns when it is done."""


def offer(pools: Sequence[KvPool], cuda: CudaMemory) -> IpcOffer | str:
    """How the pools can be opened; or why they cannot."""
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
    """Opens a source's pools. Raises `UnavailableError`, which says why that cannot be done."""
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
            receiver.open(region, pool.layout, device)
    except RuntimeError as error:
        receiver.close()
        raise UnavailableError(f"the other worker's memory cannot be opened: {error}") from error
    except BaseException:
        receiver.close()
        raise
    return receiver


class IpcReceiver:
    """One source's pools, opened, until `close`."""

    connector = Connector.CUDA_IPC

    def __init__(self, cuda: CudaMemory) -> None:
        self._cuda = cuda
        self._addresses: dict[bytes, int] = {}
        self._pools: list[torch.Tensor] = []  # each [num_blocks + 1, block_bytes]
        self._num_copying = 0
        self.is_open = True

    def open(self, region: IpcRegion, layout: KvLayout, device: torch.device) -> None:
        """One more pool. An allocation is opened once, however many lie in it."""
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
        if len(run.source_blocks) != len(targets):
            raise DataLossError(f"{len(run.source_blocks)} blocks came for {len(targets)}")
        if min(run.source_blocks) <= NULL_BLOCK or max(run.source_blocks) >= len(rows):
            raise DataLossError(f"blocks of group {run.group} lie outside of the source's pool")
        self._num_copying += 1
        copying = asyncio.get_running_loop().run_in_executor(
            None, self._copy, run, rows, pool, targets, integrity
        )
        try:
            await asyncio.shield(copying)
        finally:
            # The targets are somebody else's as soon as this has ended, whatever ends it.
            await ended(copying)
            self._num_copying -= 1
            self._close_if_done()

    def close(self) -> None:
        """Once no copy is under way. Idempotent."""
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
        """In a thread."""
        try:
            self._cuda.copy(pool, rows, run.source_blocks, targets)
        except RuntimeError as error:
            raise UnavailableError(f"the other worker's memory cannot be read: {error}") from error
        if integrity is Integrity.CHECKSUMS:
            check(run, pool.read_blocks(targets), pool.layout.block_bytes)

    def _close_if_done(self) -> None:
        if self.is_open or self._num_copying:
            return
        self._pools.clear()
        while self._addresses:
            try:
                self._cuda.close(self._addresses.popitem()[1])
            except RuntimeError as error:  # such as a device that is lost, with all that was open
                logger.warning("another worker's memory could not be let go of: %s", error)
