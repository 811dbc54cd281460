"""CUDA IPC connector: blocks copied within a GPU, or between GPUs of one host.

The source offers memory handles of its pools. The claimant opens them once and copies on a stream
of its own, concurrently with other work of its GPU; the copied blocks are valid only after the
source has confirmed that the lease still held.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import torch

from baton.engine.executor.cache.cuda_ipc import CudaDriver, CudaIpc, IpcPlace, MappedMemory
from baton.engine.executor.cache.kv_layout import pool_bytes
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.device import use_device
from baton.errors import UnavailableError
from baton_kvtransfer.cancellation import in_thread, opened
from baton_kvtransfer.connector import Connector, Integrity, Offer, Region
from baton_kvtransfer.connectors.host import check_host, host_id
from baton_kvtransfer.stream.block_batch import BlockBatch, check
from baton_kvtransfer.stream.transfer_stream import TransferStream

logger = logging.getLogger(__name__)


class CudaIpcConnector(Connector):
    """Connector of pools on a GPU that both workers see."""

    name = "cuda-ipc"
    reason = "both see one GPU's memory"
    has_checksums = False
    detects_loss = True

    def __init__(
        self,
        pools: Sequence[KvPool],
        cuda: CudaIpc | None = None,
        stream: TransferStream | None = None,
    ) -> None:
        """`stream`: of the copies; None for one of its own."""
        super().__init__(pools)
        self._cuda = cuda or CudaDriver()
        self._stream = stream or TransferStream()

    @property
    def problem(self) -> str:
        if all(pool.device.type == "cpu" for pool in self.pools):
            return "the pools of this worker are in host memory"
        return ""

    async def offer(self) -> Offer:
        if any(pool.device.type != "cuda" for pool in self.pools):
            raise UnavailableError("the pools of the other worker are not on a GPU")
        try:
            regions = await asyncio.to_thread(lambda: tuple(map(self.region_of, self.pools)))
        except RuntimeError as error:
            raise UnavailableError(f"the other worker cannot export its memory: {error}") from error
        num_blocks = tuple(pool.num_blocks for pool in self.pools)
        return Offer(host=host_id(), num_blocks=num_blocks, regions=regions)

    def region_of(self, pool: KvPool) -> Region:
        """Returns the place of a pool, which this process or another one has allocated."""
        place = self._cuda.export(pool.content) if pool.mapped is None else pool.mapped.place
        uuid = self._cuda.device_uuid(pool.device)
        return Region(handle=place.handle, offset=place.offset, device_uuid=uuid)

    async def attach(self, offer: Offer) -> "IpcReceiver":
        return await opened(partial(self._open, offer))

    def _open(self, offer: Offer) -> "IpcReceiver":
        """Opens a source's pools, in a thread."""
        check_host(offer.host)
        regions = list(zip(offer.regions, offer.num_blocks, strict=False))
        if len(regions) != len(self.pools):
            raise UnavailableError(f"the other worker has {len(regions)} pools")
        receiver = IpcReceiver(self._cuda, self._stream)
        try:
            visible = self._cuda.visible()
            for (region, num_blocks), pool in zip(regions, self.pools, strict=True):
                device = visible.get(region.device_uuid)
                if device is None or not self._cuda.reaches(pool.device, device):
                    raise UnavailableError("the GPU of the other worker is not visible to this one")
                receiver.open(region, num_blocks, pool)
        except RuntimeError as error:
            receiver.close()
            raise UnavailableError(
                f"the other worker's memory cannot be opened: {error}"
            ) from error
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

    def open(self, region: Region, num_blocks: int, pool: KvPool) -> None:
        """Adds a pool of the source, to be copied into `pool`."""
        place = IpcPlace(region.handle, region.offset)
        num_bytes = pool_bytes(pool.layout, num_blocks)
        mapped = MappedMemory(place, num_bytes, pool.device, self._cuda)
        self._mapped.append(mapped)
        self._pools.append(mapped.content.view(-1, pool.layout.block_bytes))

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
