"""NIXL connector of the source: registers its pools for one-sided reads."""

import asyncio
from collections.abc import Sequence

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import UnavailableError
from baton_kvtransfer.connectors.nixl.agent import Agent, NixlOffer, agent_thread


class NixlSource:
    """NIXL agent of a source, started on the first request, until `close`: it has threads, sockets
    and registered memory, which workers of one host do not need."""

    def __init__(self, pools: Sequence[KvPool], devices: str | None = None) -> None:
        """`devices`: network devices as UCX names them; None for all."""
        self._pools = pools
        self._devices = devices
        self._thread = agent_thread("nixl-source", pools)
        self._agent: asyncio.Future[Agent] | None = None

    @property
    def is_started(self) -> bool:
        """Whether the agent has been started, or is being started."""
        return self._agent is not None

    async def offer(self) -> NixlOffer | str:
        """Returns the metadata by which another worker reads the pools, or the reason for none."""
        if self._agent is None:
            loop = asyncio.get_running_loop()
            self._agent = loop.run_in_executor(self._thread, self._start)
        try:
            agent = await asyncio.shield(self._agent)
        except UnavailableError as error:
            return str(error)
        return NixlOffer(agent.metadata, agent.regions)

    def close(self) -> None:
        """Closes the agent, so that no worker reads the pools any more. Idempotent."""
        agent, self._agent = self._agent, None
        if agent is not None and agent.done() and agent.exception() is None:
            self._thread.submit(agent.result().close)
        self._thread.shutdown()

    def _start(self) -> Agent:
        return Agent(self._pools, self._devices, is_read=True)
