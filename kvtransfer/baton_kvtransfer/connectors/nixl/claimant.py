"""NIXL connector of the claimant: one-sided reads of the source's registered pools.

The source takes no part in a read, so the blocks are valid only after it has confirmed that the
lease still held. A read whose source does not answer cannot be cancelled: NIXL and UCX write its
bytes when the source resumes. So it ends with its agent, and the next handoff starts a new one.

If reads progress only when polled, an abandoned agent lingers before it is closed: over TCP the
source answers each read, and UCX aborts a process that finds the connection closed when it answers.

Over TCP, NIXL connects while it keeps the agent's thread waiting: until the kernel gives up, after
minutes, if a network policy has closed the source's ports. No transfer waits for that.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.device import use_device
from baton.errors import UnavailableError
from baton_kvtransfer.cancellation import ended, in_thread
from baton_kvtransfer.connector import Integrity, Offer
from baton_kvtransfer.connectors.nixl.agent import Agent, Peer, agent_thread
from baton_kvtransfer.stream.block_batch import BlockBatch, check
from baton_kvtransfer.stream.transfer_stream import TransferStream

# Seconds for a connection to a source.
_CONNECT_SECONDS = 5.0
# Seconds for a cancelled read to end by itself.
_GRACE_S = 0.3
# Seconds for a stalled source to resume, answer its reads and notice that its peer has left.
_LINGER_SECONDS = 60.0
_MAX_LINGERING = 4

_Result = TypeVar("_Result")


class NixlReader:
    """Reader that copies other workers' blocks into its pools. Its agent starts on first use.

    Attributes:
        agent: agent of new receivers; None: it has not started, or its reads were ended.
    """

    def __init__(
        self,
        pools: Sequence[KvPool],
        devices: str | None = None,
        *,
        linger_seconds: float = _LINGER_SECONDS,
        max_lingering: int = _MAX_LINGERING,
        make_agent: Callable[..., Agent] = Agent,
    ) -> None:
        """`devices`: network devices as UCX names them; None for all. `linger_seconds`: time after
        which an abandoned agent is closed, and `max_lingering` number above which the oldest is.
        `make_agent`: makes agents as `Agent` does."""
        self._make_agent = make_agent
        self._linger_seconds = linger_seconds
        self._max_lingering = max_lingering
        self._stream = TransferStream()
        self._pools = pools
        self._devices = devices
        self._thread = agent_thread("nixl-reader", pools)
        self.agent: Agent | None = None
        self._lingering: list[Agent] = []
        self._timers: dict[Agent, asyncio.TimerHandle] = {}  # each closes a lingering agent
        self._connecting: set[asyncio.Future[tuple[Agent, Peer]]] = set()
        self._is_closed = False

    @property
    def num_connecting(self) -> int:
        """Number of connections that have not ended, whether or not a transfer waits for them."""
        return len(self._connecting)

    @property
    def num_lingering(self) -> int:
        """Number of abandoned agents that are not closed yet."""
        return len(self._lingering)

    async def attach(self, offer: Offer, timeout: float = _CONNECT_SECONDS) -> "NixlReceiver":
        """Returns a receiver for a source's pools, connected within `timeout` seconds. Raises
        `UnavailableError` with the reason."""
        if self.agent is None:
            await self._call(self._started)
        connecting = asyncio.ensure_future(self._call(self._connect, offer))
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connecting.discard)
        try:
            agent, peer = await asyncio.wait_for(asyncio.shield(connecting), timeout)
        except BaseException as error:
            connecting.add_done_callback(self._forget_late)
            if isinstance(error, TimeoutError):
                raise UnavailableError(
                    f"nixl did not connect within {timeout:g} s; the other worker's ports may be "
                    "closed to this one"
                ) from error
            raise
        return NixlReceiver(self, agent, peer, offer.num_blocks, self._stream)

    def close(self) -> None:
        """Ends every read and releases the pools. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            for timer in self._timers.values():
                timer.cancel()
            self._thread.submit(self._end_all)
            self._thread.shutdown()

    async def read(
        self,
        agent: Agent,
        peer: Peer,
        group: int,
        sources: "npt.NDArray[np.int64]",
        targets: Sequence[int],
    ) -> None:
        """Reads blocks and waits for the end. Must not be cancelled; `abandon` ends it."""
        read = await self._call(agent.read, peer, group, sources, targets)
        try:
            while not await self._call(agent.is_done, read):
                pass
        finally:
            await self._call(agent.release, read)

    async def abandon(self, agent: Agent) -> None:
        """Ends all reads of an agent, from all its peers: they fail."""
        await self._call(self._end_reads, agent)
        if agent not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[agent] = loop.call_later(self._linger_seconds, self._end_later, agent)

    def forget(self, agent: Agent, peer: Peer) -> None:
        """Removes a peer from which no read is in flight, in the agent's thread."""
        if not self._is_closed:
            self._thread.submit(agent.disconnect, peer)

    def _forget_late(self, connecting: "asyncio.Future[tuple[Agent, Peer]]") -> None:
        """Forgets the peer of a connection that is not waited for any more."""
        if not connecting.cancelled() and connecting.exception() is None:
            self.forget(*connecting.result())

    def _end_later(self, agent: Agent) -> None:
        del self._timers[agent]
        if not self._is_closed:
            self._thread.submit(self._end, agent)

    async def _call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls a function in the agent's thread. Raises `UnavailableError` after `close`."""
        if self._is_closed:
            raise UnavailableError("this worker is closing")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    # Runs in the agent's thread.

    def _started(self) -> Agent:
        if self.agent is None:
            self.agent = self._make_agent(self._pools, self._devices, is_read=False)
        return self.agent

    def _connect(self, offer: Offer) -> tuple[Agent, Peer]:
        agent = self._started()
        return agent, agent.connect(offer)

    def _end_reads(self, agent: Agent) -> None:
        if agent is self.agent:
            self.agent = None
        if agent.is_open:
            agent.end_reads()
            self._lingering.append(agent)
        while len(self._lingering) > self._max_lingering:
            self._end(self._lingering[0])

    def _end(self, agent: Agent) -> None:
        if agent in self._lingering:
            self._lingering.remove(agent)
        agent.close()

    def _end_all(self) -> None:
        for agent in (*self._lingering, *filter(None, [self.agent])):
            self._end(agent)
        self.agent = None


class NixlReceiver:
    """Receiver for one source's pools, which the agent is connected to until `close`.

    Attributes:
        agent: agent whose reads these are.
    """

    def __init__(
        self,
        reader: NixlReader,
        agent: Agent,
        peer: Peer,
        num_blocks: Sequence[int],
        stream: TransferStream,
    ) -> None:
        self._reader = reader
        self.agent = agent
        self._peer = peer
        self._num_blocks = num_blocks
        self._stream = stream
        self._is_closed = False
        self._num_reading = 0

    @property
    def is_open(self) -> bool:
        return not self._is_closed and self.agent.is_open

    async def receive(
        self, run: BlockBatch, pool: KvPool, targets: Sequence[int], integrity: Integrity
    ) -> None:
        if not self.is_open:
            raise UnavailableError("the worker whose memory was being read is gone")
        sources = run.sources(len(targets), self._num_blocks[run.group])
        self._num_reading += 1
        try:
            await self._read(run.group, sources, targets)
            if integrity is Integrity.CHECKSUMS:
                await in_thread(self._check, run, pool, targets)
        except UnavailableError:
            self._is_closed = True  # the next fetch asks the source again
            raise
        finally:
            self._num_reading -= 1
            self._forget_if_done()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._forget_if_done()

    async def _read(
        self, group: int, sources: "npt.NDArray[np.int64]", targets: Sequence[int]
    ) -> None:
        reading = asyncio.ensure_future(
            self._reader.read(self.agent, self._peer, group, sources, targets)
        )
        try:
            await asyncio.shield(reading)
        finally:
            # Other sequences may get the targets as soon as this ends, even by cancellation.
            if not await ended(reading, _GRACE_S):
                await ended(asyncio.ensure_future(self._reader.abandon(self.agent)))
                await ended(reading)

    def _forget_if_done(self) -> None:
        if self._is_closed and not self._num_reading:
            self._reader.forget(self.agent, self._peer)

    def _check(self, run: BlockBatch, pool: KvPool, targets: Sequence[int]) -> None:
        """Verifies the checksums of the copied blocks, in a thread."""
        use_device(pool.device)
        check(run, self._stream.read(pool, targets), pool.layout.block_bytes)
