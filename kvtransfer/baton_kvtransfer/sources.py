"""Transport selection for each source: described once, the fastest that both sides support."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from baton.errors import FailedPreconditionError, UnavailableError
from baton.v1.kv_transfer_pb2 import DescribeResponse
from baton_kvtransfer.connector import Connector, Offer, Receiver
from baton_kvtransfer.gpu_notice import GpuNotice
from baton_kvtransfer.offers import offer_by

IDLE_SECONDS = 600.0

_NO_OTHER = "no other is allowed here"

logger = logging.getLogger(__name__)


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


Describe = Callable[[str, Sequence[str]], Awaitable[DescribeResponse]]
_Source = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Known:
    """Source with the task that chooses, or has chosen, its transport.

    `last_used`: seconds of the event loop's clock.
    """

    choice: "asyncio.Task[Transport]"
    last_used: float


class Sources:
    """Transports from one worker's sources, cached by endpoint and epoch while they are used."""

    def __init__(
        self,
        connectors: Sequence[Connector],
        choice: str,
        describe: Describe,
        notice: GpuNotice,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """`connectors`: in order of preference, the fallback last. `choice`: name of the only one
        that is allowed, or "auto". `describe` asks the source at an endpoint for its offers, and
        names the connectors that the source opens only on request. `notice` is given for the
        fallback. `idle_seconds`: time after which a source is forgotten that no transfer has used:
        it may have left the cluster."""
        allowed = [each for each in connectors if choice in ("auto", each.name)]
        self._fallback = allowed.pop() if allowed[-1] is connectors[-1] else None
        self._preferred = allowed
        self._describe = describe
        self._notice = notice
        self._idle_seconds = idle_seconds
        self._known: dict[_Source, _Known] = {}  # in the order of last use
        if not self._preferred:
            notice.give(_NO_OTHER)

    @property
    def num_known(self) -> int:
        """Number of sources whose transport is open, or being chosen."""
        transports = map(self._chosen_for, self._known)
        return sum(transport is None or transport.is_open for transport in transports)

    async def transport(self, endpoint: str, epoch: int) -> Transport:
        """Returns the transport of the source at `endpoint`, in its incarnation `epoch`.

        Raises the errors of `describe`, and `FailedPreconditionError` if the source has another
        epoch, or if the only transport that is allowed is not available.
        """
        if self._fallback and not self._preferred:
            receiver = await self._fallback.attach(Offer())
            return Transport(receiver, self._fallback, _NO_OTHER)
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
        problems: dict[str, str] = {}
        retry_seconds = math.inf
        for connector in self._preferred:
            try:
                receiver = await self._attach(connector, endpoint, described)
            except UnavailableError as error:
                problems[connector.name] = str(error)
                if isinstance(error.__cause__, OSError):
                    retry_seconds = min(retry_seconds, connector.retry_seconds)
            else:
                reasons = "; ".join([connector.reason, *map(_why_not, problems.items())])
                return self._chosen(source, receiver, connector, reasons, retry_seconds)
        if self._fallback is None:
            ((name, problem),) = problems.items()
            raise FailedPreconditionError(f"blocks may only come by {name}, and cannot: {problem}")
        reason = "; ".join(map(_why_not, problems.items()))
        self._notice.give(reason)
        receiver = await self._fallback.attach(Offer())
        return self._chosen(source, receiver, self._fallback, reason, retry_seconds)

    async def _attach(
        self, connector: Connector, endpoint: str, described: DescribeResponse
    ) -> Receiver:
        """Attaches to a source. Raises `UnavailableError`, with the reason, if it cannot."""
        if connector.problem:
            raise UnavailableError(connector.problem)
        if connector.is_on_request:
            described = await self._describe(endpoint, (connector.name,))
        return await connector.attach(offer_by(connector, described.offers))

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
            if now - known.last_used < self._idle_seconds:
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

    def _forget(self, source: _Source) -> Transport | None:
        """Removes a source, whose transport is to be chosen again. Returns it if there is one."""
        transport = self._chosen_for(source)
        self._known.pop(source).choice.cancel()
        return transport


def _why_not(problem: tuple[str, str]) -> str:
    return f"not by {problem[0]}: {problem[1]}"
