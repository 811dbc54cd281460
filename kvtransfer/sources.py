"""How blocks come from each source: asked once, by the fastest way that both sides have.

Knows no message: it is given what a source says of itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from baton.engine.kv_pool import KvLayout, KvPool
from baton.errors import FailedPreconditionError, UnavailableError
from kvtransfer.connector import Receiver
from kvtransfer.payload import PayloadReceiver
from kvtransfer.shm_claimant import SharedReceiver, attach
from kvtransfer.unix_peer import Door

Choice = Literal["auto", "grpc", "shm"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Description:
    """What a source says of itself.

    Attributes:
        epoch: the life of it that says so.
        door: how its memory can be read; None for not at all.
        problem: why not.
    """

    epoch: int
    door: Door | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """How the blocks of one source come, and why so."""

    receiver: Receiver
    reason: str


Describe = Callable[[str], Awaitable[Description]]
_Source = tuple[str, int]


class Sources:
    """The ways of one worker to others, until `close`."""

    def __init__(self, pools: Sequence[KvPool], choice: Choice, describe: Describe) -> None:
        """`describe` asks the source at an endpoint."""
        self._layouts: tuple[KvLayout, ...] = tuple(pool.layout for pool in pools)
        self._own_problem = _problem_with(pools)
        self._choice = choice
        self._describe = describe
        self._ways: dict[_Source, asyncio.Task[Way]] = {}

    async def way(self, endpoint: str, epoch: int) -> Way:
        """The way to a source in one of its lives.

        Raises what `describe` does, and `FailedPreconditionError` if the only way that is allowed
        does not exist.
        """
        if self._choice == "grpc":
            return Way(PayloadReceiver(), "no other is allowed here")
        source = endpoint, epoch
        if source not in self._ways:
            self._forget_others(source)
            self._ways[source] = asyncio.create_task(self._choose(source))
            self._ways[source].add_done_callback(partial(self._forget_failed, source))
        return await asyncio.shield(self._ways[source])

    def close(self) -> None:
        """Lets go of all of them. Idempotent."""
        for source in tuple(self._ways):
            self._drop(source)

    async def _choose(self, source: _Source) -> Way:
        endpoint, epoch = source
        described = await self._describe(endpoint)
        problem = self._own_problem or described.problem
        if not problem and described.epoch != epoch:
            problem = "the other worker has restarted"  # as the fetch will be told
        if not problem and described.door is not None:
            try:
                receiver = await asyncio.to_thread(attach, described.door, self._layouts)
            except UnavailableError as error:
                problem = str(error)
            else:
                receiver.watch(partial(self._drop, source))
                return self._chosen(source, receiver, "both are on one host and of one user")
        if self._choice == "shm":
            raise FailedPreconditionError(f"blocks may only come by shm, and cannot: {problem}")
        return self._chosen(source, PayloadReceiver(), f"not by shm: {problem}")

    def _chosen(self, source: _Source, receiver: Receiver, reason: str) -> Way:
        logger.info("blocks of %s come by %s: %s", source[0], receiver.connector.value, reason)
        return Way(receiver, reason)

    def _forget_failed(self, source: _Source, choosing: "asyncio.Task[Way]") -> None:
        """The next one asks again, whether or not somebody is still there to be told."""
        failed = choosing.cancelled() or choosing.exception() is not None
        if failed and self._ways.get(source) is choosing:
            del self._ways[source]

    def _forget_others(self, source: _Source) -> None:
        """An endpoint has one life at a time."""
        for other in tuple(self._ways):
            if other[0] == source[0] and self._ways[other].done():
                self._drop(other)

    def _drop(self, source: _Source) -> None:
        choosing = self._ways.pop(source)
        if not choosing.done():
            choosing.cancel()
        elif not choosing.cancelled() and choosing.exception() is None:
            receiver = choosing.result().receiver
            if isinstance(receiver, SharedReceiver):
                receiver.close()


def _problem_with(pools: Sequence[KvPool]) -> str:
    """Why this worker cannot read memory in place."""
    if any(pool.device.type != "cpu" for pool in pools):
        return "the pools of this worker are not in host memory"
    return ""
