"""NIXL connector: one-sided reads between registered pools, over RDMA, NVLink or TCP."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import UnavailableError
from baton.installation import install_command
from baton_kvtransfer.connector import Connector, Offer
from baton_kvtransfer.connectors.nixl.agent import Agent, agent_thread, is_installed
from baton_kvtransfer.connectors.nixl.claimant import NixlReader, NixlReceiver
from baton_kvtransfer.connectors.nixl.transport import check_transport

if TYPE_CHECKING:
    from baton.worker.settings import WorkerSettings


class NixlConnector(Connector):
    """Connector with an agent for each direction, started on first use: it has threads, sockets
    and registered memory, which workers of one host do not need. An attempt to connect keeps
    transfers waiting where ports are closed.

    Attributes:
        reader: reads other workers' pools.
    """

    name = "nixl"
    reason = "both have nixl"
    is_on_request = True
    retry_seconds = 600.0

    def __init__(
        self,
        pools: Sequence[KvPool],
        devices: str | None = None,
        problem: str = "",
    ) -> None:
        """`devices`: network devices as UCX names them; None for all. `problem`: reason not to use
        NIXL; empty if it may be used."""
        super().__init__(pools)
        self._devices = devices
        self._problem = problem
        self._thread = agent_thread("nixl-source", pools)
        self._agent: asyncio.Future[Agent] | None = None
        self.reader = NixlReader(pools, devices)
        # Links between GPUs have checks of their own; ours would copy each block through the host.
        self.has_checksums = all(pool.device.type == "cpu" for pool in pools)

    @classmethod
    def for_worker(cls, pools: Sequence[KvPool], settings: "WorkerSettings") -> Self:
        return cls(pools, settings.devices_of_nixl, settings.nixl_problem)

    @classmethod
    async def preflight(cls, settings: "WorkerSettings") -> None:
        await check_transport(settings)

    @property
    def is_offered(self) -> bool:
        """Whether the agent that others read from has been started, or is being started."""
        return self._agent is not None

    @property
    def problem(self) -> str:
        if self._problem or is_installed():
            return self._problem
        return f"nixl is not installed here; {install_command('nixl')}"

    async def offer(self) -> Offer:
        if self.problem:
            raise UnavailableError(self._problem or "nixl is not installed there")
        if self._agent is None:
            loop = asyncio.get_running_loop()
            self._agent = loop.run_in_executor(self._thread, self._start)
        return (await asyncio.shield(self._agent)).offer

    async def attach(self, offer: Offer) -> NixlReceiver:
        return await self.reader.attach(offer)

    async def close(self) -> None:
        """Ends every read, and closes the pools to claimants. Idempotent."""
        self.reader.close()
        agent, self._agent = self._agent, None
        if agent is not None and agent.done() and agent.exception() is None:
            self._thread.submit(agent.result().close)
        self._thread.shutdown()

    def _start(self) -> Agent:
        return Agent(self.pools, self._devices, is_read=True)
