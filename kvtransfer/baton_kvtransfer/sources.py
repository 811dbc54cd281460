"""Transport selection for each source: described once, the fastest that both sides support.

Independent of messages: `describe` returns the source's offers as plain data.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from baton.engine.executor.cache.cuda_ipc import CudaDriver, CudaIpc
from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import FailedPreconditionError, UnavailableError
from baton.installation import install_command
from baton_kvtransfer.connector import CUDA_IPC, GRPC, NIXL, SHM, Connector, Receiver
from baton_kvtransfer.connectors.cuda_ipc import memory_handles
from baton_kvtransfer.connectors.grpc.payload import PayloadReceiver
from baton_kvtransfer.connectors.nixl.agent import is_installed
from baton_kvtransfer.connectors.nixl.claimant import NixlReader
from baton_kvtransfer.connectors.shm import claimant as shm_claimant
from baton_kvtransfer.gpu_notice import GpuNotice
from baton_kvtransfer.offers import Description
from baton_kvtransfer.plugins import NamedPlugin
from baton_kvtransfer.stream.transfer_stream import TransferStream
from baton_kvtransfer.transfer_service import KV

# Connectors that read the source's memory; the fallback is `GRPC`.
FASTEST_FIRST = (CUDA_IPC, SHM, NIXL)

_ONLY_GRPC = "no other is allowed here"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportTimes:
    """Times of the choice of transports, in seconds.

    Attributes:
        connect: in which a source of this host has to answer each call.
        retry: after which a faster connector is tried again that failed for a reason which may
            pass.
        retry_nixl: the same of NIXL, whose attempts keep transfers waiting where its ports are
            closed.
        idle: after which a source is forgotten that no transfer has used: it may have left the
            cluster.
    """

    connect: float = shm_claimant.CONNECT_TIMEOUT
    retry: float = 10.0
    retry_nixl: float = 600.0
    idle: float = 600.0

    def retry_of(self, connector: Connector) -> float:
        """Returns `retry` or `retry_nixl`."""
        return self.retry_nixl if connector is NIXL else self.retry


class Transport:
    """Transport of the blocks of one source, which transfers share.

    Attributes:
        receiver: of all transfers; each uses it in `transfer`.
        connector: of the receiver.
        reason: why this transport was chosen.
        expires: seconds of the event loop's clock at which it is chosen again.
    """

    def __init__(
        self, receiver: Receiver, connector: Connector, reason: str, expires: float = math.inf
    ) -> None:
        self.receiver = receiver
        self.connector = connector
        self.reason = reason
        self.expires = expires
        self._num_transfers = 0
        self._is_dropped = False

    @property
    def is_open(self) -> bool:
        return self.receiver.is_open and not self._is_dropped

    @property
    def is_in_use(self) -> bool:
        return self._num_transfers > 0

    @contextmanager
    def transfer(self) -> Iterator[Receiver]:
        """Keeps the source's memory open for one transfer, the `with` block."""
        self._num_transfers += 1
        try:
            yield self.receiver
        finally:
            self._num_transfers -= 1
            if self._is_dropped and not self._num_transfers:
                self.receiver.close()

    def drop(self) -> None:
        """Closes the receiver after the last transfer has ended. Idempotent."""
        self._is_dropped = True
        if not self._num_transfers:
            self.receiver.close()

    def close(self) -> None:
        """Closes the receiver, although transfers may use it: they fail. Idempotent."""
        self._is_dropped = True
        self.receiver.close()


Describe = Callable[[str, Sequence[Connector]], Awaitable[Description]]
_Source = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Known:
    """Source with the task that chooses, or has chosen, its transport.

    `last_used`: seconds of the event loop's clock.
    """

    choice: "asyncio.Task[Transport]"
    last_used: float


class Sources:
    """Transports from one worker's sources, cached by endpoint and epoch while they are used.

    Attributes:
        nixl: reader of sources that have NIXL.
    """

    def __init__(
        self,
        pools: Sequence[KvPool],
        choice: str,
        describe: Describe,
        nixl: NixlReader,
        cuda: CudaIpc | None = None,
        *,
        noun: str = KV.noun,
        plugin: NamedPlugin | None = None,
        nixl_problem: str = "",
        socket_dir: str | None = None,
        times: TransportTimes | None = None,
    ) -> None:
        """`describe` asks the source at an endpoint for its offers, and names the connectors that
        the source opens only on request. `nixl` is closed with this, and not used if `nixl_problem`
        has a reason. `noun`: content of the pools. `plugin`: the connector `choice`, if a package
        adds it. `socket_dir`: as in `claimant.attach`."""
        self._pools = pools
        self._on_cpu = all(pool.device.type == "cpu" for pool in pools)
        self._choice = choice
        self._describe = describe
        self.nixl = nixl
        self._plugin = plugin
        self._nixl_problem = nixl_problem
        self._cuda = cuda or CudaDriver()
        self._socket_dir = socket_dir
        self._times = times or TransportTimes()
        self._stream = TransferStream()
        self._known: dict[_Source, _Known] = {}  # in the order of last use
        self._gpu_notice = GpuNotice(pools, noun)
        if choice == GRPC.name:
            self._gpu_notice.give(_ONLY_GRPC)

    @property
    def num_known(self) -> int:
        """Number of sources whose transport is chosen, or being chosen."""
        return len(self._known)

    async def transport(self, endpoint: str, epoch: int) -> Transport:
        """Returns the transport of the source at `endpoint`, in its incarnation `epoch`.

        Raises the errors of `describe`, and `FailedPreconditionError` if the source has another
        epoch, or if the only transport that is allowed is not available.
        """
        if self._choice == GRPC.name:
            return Transport(PayloadReceiver(self._stream), GRPC, _ONLY_GRPC)
        source = endpoint, epoch
        now = asyncio.get_running_loop().time()
        self._drop_unusable(source, now)
        self._drop_idle(now)
        known = self._known.pop(source, None)
        choice = self._begin(source) if known is None else known.choice
        self._known[source] = _Known(choice, now)
        return await asyncio.shield(choice)

    def lost(self, endpoint: str, epoch: int) -> None:
        """Drops the transport of a source to which a connection broke; transfers that read its
        memory continue."""
        known = self._known.get((endpoint, epoch))
        if known is not None and known.choice.done():
            self._drop((endpoint, epoch))

    def close(self) -> None:
        """Closes all transports. Idempotent."""
        for source in tuple(self._known):
            transport = self._forget(source)
            if transport is not None:
                transport.close()
        self.nixl.close()

    def _begin(self, source: _Source) -> "asyncio.Task[Transport]":
        choice = asyncio.create_task(self._choose(source))
        choice.add_done_callback(partial(self._forget_failed, source))
        return choice

    async def _choose(self, source: _Source) -> Transport:
        endpoint, epoch = source
        described = await self._describe(endpoint, ())
        if described.epoch != epoch:
            raise FailedPreconditionError(
                f"the epoch of the worker at {endpoint} is {described.epoch}, the handle's is "
                f"{epoch}: it has restarted or changed its role since"
            )
        self._forget_others(source)
        tried = self._allowed()
        problems: dict[Connector, str] = {}
        retry_seconds = math.inf
        for connector in tried:
            try:
                receiver, reason = await self._attach(connector, source, described)
            except UnavailableError as error:
                problems[connector] = str(error)
                if isinstance(error.__cause__, OSError):
                    retry_seconds = min(retry_seconds, self._times.retry_of(connector))
            else:
                reasons = "; ".join([reason, *map(_why_not, problems.items())])
                return self._chosen(source, receiver, connector, reasons, retry_seconds)
        if self._choice != "auto":
            raise FailedPreconditionError(
                f"blocks may only come by {self._choice}, and cannot: {problems[tried[0]]}"
            )
        reason = "; ".join(map(_why_not, problems.items()))
        self._gpu_notice.give(reason)
        receiver = PayloadReceiver(self._stream)
        return self._chosen(source, receiver, GRPC, reason, retry_seconds)

    def _allowed(self) -> Sequence[Connector]:
        """Returns the connectors to try, in order."""
        own = () if self._plugin is None else (self._plugin.connector,)
        named = [each for each in (*FASTEST_FIRST, *own) if each.name == self._choice]
        return named or FASTEST_FIRST

    async def _attach(
        self, connector: Connector, source: _Source, described: Description
    ) -> tuple[Receiver, str]:
        """Opens one transport; returns it with the reason for it. Raises `UnavailableError`, with
        the reason, if it is not available."""
        if self._plugin is not None and connector is self._plugin.connector:
            offer = _offered(described.plugin)
            if offer.plugin != connector.name:
                raise UnavailableError(f"the other worker has {offer.plugin}")
            reader = await self._plugin.plugin.attach(offer.metadata, self._pools)
            return reader, "both were given it"
        if connector is CUDA_IPC:
            if self._on_cpu:
                raise UnavailableError("the pools of this worker are in host memory")
            ipc = _offered(described.ipc)
            attach_ipc = partial(memory_handles.attach, ipc, self._pools, self._cuda, self._stream)
            mapped = await _opened(attach_ipc)
            return mapped, "both see one GPU's memory"
        if connector is SHM:
            if not self._on_cpu:
                raise UnavailableError("the pools of this worker are not in host memory")
            shm, layouts = _offered(described.shm), [pool.layout for pool in self._pools]
            attach_shm = partial(
                shm_claimant.attach, shm, layouts, self._socket_dir, timeout=self._times.connect
            )
            receiver = await _opened(attach_shm)
            receiver.watch(partial(self._gone, source, receiver))
            return receiver, "both are on one host and of one user"
        if self._nixl_problem:
            raise UnavailableError(self._nixl_problem)
        if not is_installed():
            raise UnavailableError(f"nixl is not installed here; {install_command('nixl')}")
        described = await self._describe(source[0], (NIXL,))
        return await self.nixl.attach(_offered(described.nixl)), "both have nixl"

    def _chosen(
        self,
        source: _Source,
        receiver: Receiver,
        connector: Connector,
        reason: str,
        retry_seconds: float,
    ) -> Transport:
        """Returns the transport, to be chosen again after `retry_seconds`."""
        logger.info("fetching from %s by %s: %s", source[0], connector.name, reason)
        expires = asyncio.get_running_loop().time() + retry_seconds
        return Transport(receiver, connector, reason, expires)

    def _forget_failed(self, source: _Source, choice: "asyncio.Task[Transport]") -> None:
        """Removes a choice that failed, so that the next fetch asks the source again."""
        failed = choice.cancelled() or choice.exception() is not None
        known = self._known.get(source)
        if failed and known is not None and known.choice is choice:
            self._forget(source)

    def _forget_others(self, source: _Source) -> None:
        """Drops other epochs of the same endpoint, which has one incarnation at a time."""
        for other, known in tuple(self._known.items()):
            if other != source and other[0] == source[0] and known.choice.done():
                self._drop(other)

    def _drop_unusable(self, source: _Source, now: float) -> None:
        """Drops a transport that is closed, or due to be chosen again."""
        transport = self._chosen_for(source)
        if transport is not None and (not transport.is_open or now >= transport.expires):
            self._drop(source)

    def _drop_idle(self, now: float) -> None:
        """Drops the transports that were not used for long."""
        for source, known in tuple(self._known.items()):
            if now - known.last_used < self._times.idle:
                return
            transport = self._chosen_for(source)
            if transport is not None and not transport.is_in_use:
                self._drop(source)

    def _chosen_for(self, source: _Source) -> Transport | None:
        """Returns the transport of a source; None if it is not chosen yet, or could not be."""
        known = self._known.get(source)
        if known is None or not known.choice.done() or known.choice.cancelled():
            return None
        return None if known.choice.exception() is not None else known.choice.result()

    def _drop(self, source: _Source) -> None:
        transport = self._forget(source)
        if transport is not None:
            transport.drop()

    def _gone(self, source: _Source, receiver: Receiver) -> None:
        """Closes the receiver of a source that closed its memory, and drops its transport, unless
        the source has another one by now."""
        receiver.close()
        transport = self._chosen_for(source)
        if transport is not None and not transport.is_open:
            self._drop(source)

    def _forget(self, source: _Source) -> Transport | None:
        """Removes a source, whose transport is to be chosen again. Returns it if there is one."""
        transport = self._chosen_for(source)
        self._known.pop(source).choice.cancel()
        return transport


_Opened = TypeVar("_Opened", bound=Receiver)


async def _opened(attach: Callable[[], _Opened]) -> _Opened:
    """Calls `attach` in a thread and returns its receiver; closes it if this is cancelled."""
    opening = asyncio.get_running_loop().run_in_executor(None, attach)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(opening: "asyncio.Future[_Opened]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _why_not(problem: tuple[Connector, str]) -> str:
    return f"not by {problem[0].name}: {problem[1]}"


_Offer = TypeVar("_Offer")


def _offered(offer: _Offer | str) -> _Offer:
    if isinstance(offer, str):
        raise UnavailableError(offer)
    return offer
