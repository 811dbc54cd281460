"""CUDA IPC connector: blocks copied within a GPU, or between GPUs of one host.

The source offers memory handles of its pools. The claimant opens them once and copies on a stream
of its own, concurrently with other work of its GPU; the copied blocks are valid only after the
source has confirmed that the lease still held.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.engine.executor.cache.cuda_ipc import CudaIpc, IpcPlace, MappedMemory
from baton.engine.executor.cache.kv_layout import KvLayout, pool_bytes
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.device import use_device
from baton.errors import UnavailableError
from baton_kvtransfer.cancellation import in_thread
from baton_kvtransfer.connector import Integrity
from baton_kvtransfer.connectors.shm.unix_peer import check_host, host_id
from baton_kvtransfer.stream.block_batch import BlockBatch, check
from baton_kvtransfer.stream.transfer_stream import TransferStream

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


def offer(pools: Sequence[KvPool], cuda: CudaIpc) -> IpcOffer | str:
    """Returns the memory handles of the pools, or the reason for none."""
    if any(pool.device.type != "cuda" for pool in pools):
        return "the pools of the other worker are not on a GPU"
    try:
        regions = tuple(region_of(pool, cuda) for pool in pools)
    except RuntimeError as error:
        return f"the other worker cannot export its memory: {error}"
    return IpcOffer(host_id(), regions)


def region_of(pool: KvPool, cuda: CudaIpc) -> IpcRegion:
    """Returns the place of a pool, which this process or another one has allocated."""
    place = cuda.export(pool.content) if pool.mapped is None else pool.mapped.place
    return IpcRegion(place.handle, place.offset, cuda.device_uuid(pool.device), pool.num_blocks)


def attach(
    offered: IpcOffer,
    pools: Sequence[KvPool],
    cuda: CudaIpc,
    stream: TransferStream,
) -> "IpcReceiver":
    """Opens a source's pools, to be copied on `stream`. Raises `UnavailableError` with the reason
    if it cannot."""
    check_host(offered.host)
    if len(offered.regions) != len(pools):
        raise UnavailableError(f"the other worker has {len(offered.regions)} pools")
    receiver = IpcReceiver(cuda, stream)
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

    def __init__(self, cuda: CudaIpc, stream: TransferStream) -> None:
        self._cuda = cuda
        self._stream = stream
        self._mapped: list[MappedMemory] = []
        self._pools: list[torch.Tensor] = []  # each [num_blocks + 1, block_bytes]
        self._num_copying = 0
        self.is_open = True

    def open(self, region: IpcRegion, layout: KvLayout, device: torch.device) -> None:
        """Adds a pool."""
        place = IpcPlace(region.handle, region.offset)
        num_bytes = pool_bytes(layout, region.num_blocks)
        mapped = MappedMemory(place, num_bytes, device, self._cuda)
        self._mapped.append(mapped)
        self._pools.append(mapped.content.view(-1, layout.block_bytes))

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
            with self._stream.on(pool.device):
                pool.copy_content(run.source_blocks, targets, rows)
        except RuntimeError as error:
            raise UnavailableError(f"the other worker's memory cannot be read: {error}") from error
        if integrity is Integrity.CHECKSUMS:
            check(run, self._stream.read(pool, targets), pool.layout.block_bytes)

    def _close_if_done(self) -> None:
        if self.is_open or self._num_copying:
            return
        self._pools.clear()
        while self._mapped:
            try:
                self._mapped.pop().close()
            except RuntimeError as error:  # such as a lost device, with all its open memory
                logger.warning("another worker's memory could not be closed: %s", error)
