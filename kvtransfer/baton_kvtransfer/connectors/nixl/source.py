"""The connector `nixl`, at the source: its pools, registered for others to read."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.engine.cache.kv_pool import KvPool
from baton.errors import UnavailableError
from baton_kvtransfer.connectors.nixl.agent import Agent, NixlOffer


class NixlSource:
    """An agent that is there once somebody has asked for it, until `close`: it has threads, sockets
    and registered memory, and workers of one host have no use for them."""

    def __init__(self, pools: Sequence[KvPool], devices: str | None = None) -> None:
        """Args: devices: of the network, as UCX names them; None for all."""
        self._pools = pools
        self._devices = devices
        self._thread = ThreadPoolExecutor(1, "nixl-source")
        self._agent: asyncio.Future[Agent] | None = None

    async def offer(self) -> NixlOffer | str:
        """What another worker needs to read the pools; or why it cannot."""
        if self._agent is None:
            loop = asyncio.get_running_loop()
            self._agent = loop.run_in_executor(self._thread, self._start)
        try:
            agent = await asyncio.shield(self._agent)
        except UnavailableError as error:
            return str(error)
        return NixlOffer(agent.metadata, agent.regions)

    def close(self) -> None:
        """Nobody reads the pools from now on. Idempotent."""
        agent, self._agent = self._agent, None
        if agent is not None and agent.done() and agent.exception() is None:
            self._thread.submit(agent.result().close)
        self._thread.shutdown()

    def _start(self) -> Agent:
        return Agent(self._pools, self._devices, is_read=True)
