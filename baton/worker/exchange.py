"""KV exchange of a worker: serves its own blocks under leases and fetches those of others. The
same for both roles.
"""

from contextlib import AsyncExitStack
from typing import Protocol

from baton.errors import UnavailableError
from baton.v1.kv_sharing_pb2_grpc import add_KvSharingServicer_to_server
from baton.worker.serving import PoolServer
from baton.worker.sharing import SharingService
from baton.worker.worker import Worker
from kvtransfer.client import KvFetcher
from kvtransfer.lease_table import LeaseTable
from kvtransfer.meter import TransferMeter
from kvtransfer.service import KvTransferService, add_to_server


class BlockPromises(Protocol):
    """Admission accounting of the decode role."""

    @property
    def num_promised_blocks(self) -> int:
        """KV blocks promised to admitted requests whose KV has not arrived."""


class KvExchange:
    """Adds to a worker's servers what serves leases. The ways to its pools, and from there to those
    of others, are open once its model is loaded.

    Attributes:
        leases: of everything that it lets others have.
    """

    def __init__(self, worker: Worker) -> None:
        self.leases = LeaseTable(worker.settings.lease_timeout_s)
        self._worker = worker
        self._pools = PoolServer(worker)
        self._fetcher: KvFetcher | None = None
        worker.on_load(self._open)
        worker.kv_server.add(add_to_server, KvTransferService(self.leases, self._pools.served))
        worker.server.add(add_KvSharingServicer_to_server, SharingService(worker, self.leases))

    @property
    def fetcher(self) -> KvFetcher:
        """Raises `UnavailableError` while the model is being loaded."""
        if self._fetcher is None:
            raise UnavailableError(f"worker {self._worker.id} is not ready yet")
        return self._fetcher

    @property
    def transfers(self) -> TransferMeter:
        """Counts what was fetched from other workers; nothing while the model is being loaded."""
        return TransferMeter() if self._fetcher is None else self._fetcher.meter

    async def _open(self, stack: AsyncExitStack) -> None:
        """Closing the stack closes the ways, and lets go of other workers' memory."""
        worker = self._worker
        await self._pools.open(stack)
        fetcher = KvFetcher(
            worker.engine.pools,
            worker.pairing(),
            worker.id,
            worker.channels.get,
            connector=worker.settings.kv_connector,
            nixl_devices=worker.settings.devices_of_nixl,
            nixl_problem=worker.settings.nixl_problem,
            socket_dir=worker.settings.socket_dir,
        )
        stack.callback(fetcher.close)
        self._fetcher = fetcher
