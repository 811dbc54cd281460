"""Pool server: opens pools of a worker to other workers after its model is loaded."""

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack

from baton.engine.executor.cache.cuda_ipc import CudaDriver
from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import FailedPreconditionError, UnavailableError
from baton.worker.membership import Membership
from baton.worker.pairing import Pairing
from baton.worker.settings import WorkerSettings
from baton_kvtransfer.connectors.cuda_ipc.memory_handles import offer
from baton_kvtransfer.connectors.nixl.agent import is_installed
from baton_kvtransfer.connectors.nixl.source import NixlSource
from baton_kvtransfer.connectors.shm.source import HandleServer
from baton_kvtransfer.connectors.shm.unix_peer import HandleEndpoint
from baton_kvtransfer.offers import PluginOffer
from baton_kvtransfer.plugins import NamedPlugin
from baton_kvtransfer.service import ServedPools


class PoolServer:
    """Pools of one worker, of one content, with the transports that it offers."""

    def __init__(self, settings: WorkerSettings, membership: Membership) -> None:
        self._settings = settings
        self._membership = membership
        self._served: ServedPools | None = None

    async def open(
        self,
        stack: AsyncExitStack,
        pools: Sequence[KvPool],
        pairing: Pairing,
        plugin: NamedPlugin | None,
    ) -> None:
        """Opens the transports, that of `plugin` among them. Closing `stack` closes them."""
        shm: HandleEndpoint | str = "its pools are not in shared memory"
        if all(pool.shared is not None for pool in pools):
            shm = await self._open_shm(pools, stack)
        nixl: NixlSource | str = "nixl is not installed there"
        if self._settings.nixl_problem:
            nixl = self._settings.nixl_problem
        elif is_installed():
            nixl = NixlSource(pools, self._settings.devices_of_nixl)
            stack.callback(nixl.close)
        ipc = await asyncio.to_thread(offer, pools, CudaDriver())
        self._served = ServedPools(pools, pairing, self._membership.epoch, shm, nixl, ipc)
        if plugin is not None:
            stack.callback(plugin.plugin.close)
            self._served = dataclasses.replace(
                self._served,
                plugin=await _offer_of(plugin, pools),
                plugin_connector=plugin.connector,
            )

    async def _open_shm(self, pools: Sequence[KvPool], stack: AsyncExitStack) -> HandleEndpoint:
        folder = self._settings.socket_dir
        try:
            return (await stack.enter_async_context(HandleServer(pools, folder))).endpoint
        except OSError as error:
            if folder is None:
                raise
            raise FailedPreconditionError(
                f"no socket can be made in --socket-dir {folder}: {error.strerror or error}"
            ) from error

    def served(self) -> ServedPools:
        """Returns the pools. Raises `UnavailableError` while the model is being loaded, and
        `FailedPreconditionError` if it has none."""
        if self._served is None:
            name = self._membership.id
            if self._membership.is_ready:
                raise FailedPreconditionError(f"the model of worker {name} has no encoder")
            raise UnavailableError(f"worker {name} is not ready yet")
        return dataclasses.replace(self._served, epoch=self._membership.epoch)


async def _offer_of(plugin: NamedPlugin, pools: Sequence[KvPool]) -> PluginOffer | str:
    """Opens the pools by a plug-in; returns the reason if it cannot."""
    try:
        metadata = await asyncio.to_thread(plugin.plugin.open, pools)
    except UnavailableError as error:
        return str(error)
    return PluginOffer(plugin.connector.name, metadata)
