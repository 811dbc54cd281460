"""Exchanges of a worker: each serves blocks of one content under leases, and fetches others'.

KV is exchanged by every worker; encoder outputs only if the model has an encoder.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from prometheus_client.core import Metric

from baton.engine.client import EngineClient
from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import FailedPreconditionError, UnavailableError
from baton.serving.grpc.channels import SILENCE_SECONDS
from baton.v1.kv_sharing_pb2_grpc import add_KvSharingServicer_to_server
from baton.version import version
from baton.worker.pairing import Pairing
from baton.worker.worker import Worker
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.exchange.metrics import exchange_metrics
from baton_kvtransfer.exchange.sharing import SharingService
from baton_kvtransfer.lease.table import DEFAULT_OPEN_TIMEOUT, LeaseTable
from baton_kvtransfer.meter import TransferMeter
from baton_kvtransfer.offers import Offers
from baton_kvtransfer.registry import FALLBACK, connectors_for, preflight
from baton_kvtransfer.service import KvTransferService, ServedPools, add_to_server
from baton_kvtransfer.transfer_service import ENCODER, KV, TransferService


class Exchange:
    """Leases on a worker's blocks of one content, and fetches of other workers' blocks.

    Adds its service and metrics to the worker. Transports to and from its pools open once the model
    is loaded, unless it has no pools.

    Attributes:
        leases: on blocks of this worker, for others.
    """

    def __init__(
        self,
        worker: Worker,
        service: TransferService,
        pools_of: Callable[[EngineClient], Sequence[KvPool]],
        open_timeout: float = DEFAULT_OPEN_TIMEOUT,
    ) -> None:
        """`pools_of` returns the pools of a loaded model; empty if it has none of this content.
        `open_timeout`: as of `LeaseTable`."""
        self.leases = LeaseTable(worker.settings.lease_timeout_s, open_timeout=open_timeout)
        self._worker = worker
        self._service = service
        self._pools_of = pools_of
        self._served: ServedPools | None = None
        self._fetcher: KvFetcher | None = None
        worker.model.on_load.append(self._open)
        worker.load_reports.append(self._load)
        worker.server.exposition.add(self)
        served = KvTransferService(self.leases, self.served, service)
        worker.server.kv.add(add_to_server, served)

    @property
    def fetcher(self) -> KvFetcher:
        """Fetcher of this worker. Raises `UnavailableError` while the model is being loaded."""
        if self._fetcher is None:
            raise UnavailableError(f"worker {self._worker.membership.id} is not ready yet")
        return self._fetcher

    def served(self) -> ServedPools:
        """Returns the pools of this worker. Raises `UnavailableError` while the model is being
        loaded, and `FailedPreconditionError` if it has none."""
        membership = self._worker.membership
        if self._served is None:
            if membership.is_ready:
                raise FailedPreconditionError(f"the model of worker {membership.id} has no encoder")
            raise UnavailableError(f"worker {membership.id} is not ready yet")
        return replace(self._served, epoch=membership.epoch)

    @property
    def pairing(self) -> Pairing:
        """Properties that another worker must share to exchange these blocks. The model must be
        loaded."""
        engine = self._worker.model.engine
        layouts = tuple(pool.layout for pool in self._pools_of(engine))
        return Pairing(version(), engine.facts.info.fingerprint, layouts)

    @property
    def transfers(self) -> TransferMeter:
        """Counters of fetches from other workers; all zero while the model is being loaded."""
        return TransferMeter(FALLBACK.name) if self._fetcher is None else self._fetcher.meter

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics, as a collector of `baton.serving.telemetry.exposition`."""
        role = self._worker.membership.role
        yield from exchange_metrics(self._service, role, self.leases, self.transfers)

    def _load(self) -> Mapping[str, int]:
        transfers = self.transfers
        return {
            "num_leases": len(self.leases),
            "num_transferred_bytes": transfers.num_bytes.total(),
            "num_transfers": transfers.num_done,
            "num_failed_transfers": transfers.num_failures.total(),
        }

    async def _open(self, stack: AsyncExitStack) -> None:
        """Opens the transports. Closing `stack` closes them and unmaps other workers' memory."""
        settings, pools = self._worker.settings, self._pools_of(self._worker.model.engine)
        if not pools:
            return
        connectors = connectors_for(pools, settings)
        for connector in connectors:
            stack.push_async_callback(connector.close)
        offers = Offers(connectors)
        await offers.open()
        membership = self._worker.membership
        self._served = ServedPools(pools, self.pairing, membership.epoch, offers)
        self._fetcher = KvFetcher(
            pools,
            self.pairing,
            membership.id,
            self._worker.channels,
            connectors,
            service=self._service,
            connector=settings.kv_connector,
        )
        stack.callback(self._fetcher.close)


class KvExchange(Exchange):
    """Exchange of KV blocks, with leases on cached prefixes."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, KV, lambda engine: engine.pools)
        worker.model.on_start.append(partial(preflight, worker.settings))
        sharing = SharingService(worker.model, self.leases)
        worker.server.main.add(add_KvSharingServicer_to_server, sharing)


class EncoderExchange(Exchange):
    """Exchange of encoder outputs. A model without an encoder has none."""

    def __init__(self, worker: Worker) -> None:
        # The router calls the source as it calls the claimant. A call that has not reached the
        # source within the silence bound has failed for the router, and opens no lease.
        super().__init__(worker, ENCODER, encoder_pools, open_timeout=SILENCE_SECONDS)


def encoder_pools(engine: EngineClient) -> Sequence[KvPool]:
    """Returns the encoder pool alone; empty if the model has no encoder."""
    return () if engine.encoder_pool is None else (engine.encoder_pool,)
