"""Shared-memory connector: workers of one host and user map each other's pools."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Self

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import FailedPreconditionError, UnavailableError
from baton_kvtransfer.cancellation import opened
from baton_kvtransfer.connector import Connector, Offer
from baton_kvtransfer.connectors.shm.claimant import CONNECT_TIMEOUT, SharedReceiver, attach
from baton_kvtransfer.connectors.shm.source import HandleServer

if TYPE_CHECKING:
    from baton.worker.settings import WorkerSettings


class ShmConnector(Connector):
    """Connector of pools in shared memory.

    Attributes:
        server: passes the pools to claimants; None before the offer.
    """

    name = "shm"
    reason = "both are on one host and of one user"
    has_checksums = False
    detects_loss = True

    def __init__(
        self,
        pools: Sequence[KvPool],
        socket_dir: str | None = None,
        *,
        connect_timeout: float = CONNECT_TIMEOUT,
    ) -> None:
        """`socket_dir`: folder of the Unix sockets of this host's workers; None for abstract
        sockets. `connect_timeout`: seconds in which a source has to answer each call."""
        super().__init__(pools)
        self._socket_dir = socket_dir
        self._connect_timeout = connect_timeout
        self._stack = AsyncExitStack()
        self.server: HandleServer | None = None

    @classmethod
    def for_worker(cls, pools: Sequence[KvPool], settings: "WorkerSettings") -> Self:
        return cls(pools, settings.socket_dir)

    @property
    def problem(self) -> str:
        if any(pool.device.type != "cpu" for pool in self.pools):
            return "the pools of this worker are not in host memory"
        return ""

    async def offer(self) -> Offer:
        if any(pool.shared is None for pool in self.pools):
            raise UnavailableError("its pools are not in shared memory")
        self.server = HandleServer(self.pools, self._socket_dir)
        try:
            return (await self._stack.enter_async_context(self.server)).offer
        except OSError as error:
            if self._socket_dir is None:
                raise
            raise FailedPreconditionError(
                f"no socket can be made in --socket-dir {self._socket_dir}: "
                f"{error.strerror or error}"
            ) from error

    async def attach(self, offer: Offer) -> SharedReceiver:
        layouts = [pool.layout for pool in self.pools]
        receiver = await opened(
            partial(attach, offer, layouts, self._socket_dir, timeout=self._connect_timeout)
        )
        receiver.watch()
        return receiver

    async def close(self) -> None:
        await self._stack.aclose()
