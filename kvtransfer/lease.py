"""The prefill side's promise to a claimant that it will find blocks. Knows no transport.

A lease is opened by the one that computes the blocks, who also closes it and frees the blocks; it
is claimed once, by the worker it was made for. It ends confirmed, or broken with a reason. All of
it happens on one event loop, so that between two awaits a lease that is not over stays so.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum, auto
from itertools import count

from baton.errors import (
    AlreadyExistsError,
    BatonError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from kvtransfer.extent import Extent
from kvtransfer.handle import FirstToken


class LeaseState(Enum):
    """`COMPUTING`: blocks are still being filled. `READY`: all are. The others are endings."""

    COMPUTING = auto()
    READY = auto()
    CONFIRMED = auto()
    BROKEN = auto()


class Lease:
    """The blocks of one prefill and how far they are filled.

    Attributes:
        extent: the tokens, and so the blocks, of the whole sequence.
        generation: unique to this lease in this process; what a confirmation must show.
        block_ids: per cache group, in the order of the sequence, at least the filled ones;
            `NULL_BLOCK` where a window has passed.
        num_filled: the leading blocks that may be read, where there are any.
        first_token: set when the lease is ready.
    """

    def __init__(self, lease_id: bytes, claimant: str, extent: Extent, generation: int) -> None:
        self.lease_id = lease_id
        self.claimant = claimant
        self.extent = extent
        self.generation = generation
        self.state = LeaseState.COMPUTING
        self.is_claimed = False
        self.block_ids: tuple[tuple[int, ...], ...] = ()
        self.num_filled = 0
        self.first_token: FirstToken | None = None
        self._reason: BatonError | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_over(self) -> bool:
        return self.state in (LeaseState.CONFIRMED, LeaseState.BROKEN)

    def advance(self, block_ids: tuple[tuple[int, ...], ...], num_filled: int) -> None:
        """The first `num_filled` blocks may be read; the tables cover at least those."""
        if not self.is_over and num_filled >= self.num_filled:
            self.block_ids, self.num_filled = block_ids, num_filled
            self._wake()

    def complete(self, first_token: FirstToken) -> None:
        """All blocks may be read, as last given, and this is what to continue with."""
        if not self.is_over:
            self.num_filled = self.extent.num_blocks
            self.first_token = first_token
            self.state = LeaseState.READY
            self._wake()

    def retract(self) -> None:
        """None of its blocks may be read any more; they will be computed again. Nobody has claimed
        it, so nobody has read any."""
        assert not self.is_claimed, "a lease retracted under its claimant"
        if not self.is_over:
            self.state = LeaseState.COMPUTING
            self.block_ids, self.num_filled, self.first_token = (), 0, None

    def take(self) -> None:
        """Its claimant is here."""
        self.is_claimed = True
        self._wake()

    def confirm(self, generation: int) -> None:
        """The claimant holds all blocks."""
        if generation != self.generation:
            raise FailedPreconditionError(
                f"the lease's generation is {self.generation}, the confirmation's is {generation}"
            )
        if self.state is not LeaseState.READY:
            raise NotFoundError("the lease is over, or not ready to be confirmed")
        self.state = LeaseState.CONFIRMED
        self._wake()

    def end(self, reason: BatonError) -> None:
        """Ends the lease unless it is over; whoever waits on it gets `reason`."""
        if not self.is_over:
            self.state = LeaseState.BROKEN
            self._reason = reason
            self._wake()

    async def filled_beyond(self, num_blocks: int) -> None:
        """Waits until more blocks may be read, or all. Raises the reason if the lease breaks."""
        while self.state is LeaseState.COMPUTING and self.num_filled <= num_blocks:
            await self._change()
        self._raise_if_broken()

    async def claimed(self) -> None:
        """Waits until its claimant is here. Raises the reason if the lease breaks before."""
        while not self.is_claimed and not self.is_over:
            await self._change()
        self._raise_if_broken()

    async def over(self) -> None:
        """Waits until the lease is confirmed. Raises the reason if it breaks."""
        while not self.is_over:
            await self._change()
        self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self._reason is not None:
            raise self._reason

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class LeaseTable:
    """All leases of one worker that are not over. A claim may come before its lease."""

    def __init__(self) -> None:
        self._leases: dict[bytes, Lease] = {}
        # By claimant too: one that asks for another's lease stands in nobody's way.
        self._awaited: dict[tuple[bytes, str], asyncio.Future[Lease]] = {}
        self._generations = count(1)

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def has_awaited(self) -> bool:
        """Whether a claimant waits for blocks that are yet to be computed."""
        return any(
            lease.is_claimed and lease.state is LeaseState.COMPUTING
            for lease in self._leases.values()
        )

    @contextmanager
    def open(self, lease_id: bytes, claimant: str, extent: Extent) -> Iterator[Lease]:
        """A new lease for the length of the block, after which it is over in any case."""
        if lease_id in self._leases:
            raise AlreadyExistsError("a lease with this id is already here")
        lease = Lease(lease_id, claimant, extent, next(self._generations))
        self._leases[lease_id] = lease
        awaited = self._awaited.get((lease_id, claimant))
        if awaited is not None and not awaited.done():
            awaited.set_result(lease)
        try:
            yield lease
        finally:
            lease.end(NotFoundError("the lease was called off by the side that computes it"))
            del self._leases[lease_id]

    @asynccontextmanager
    async def claim(self, lease_id: bytes, claimant: str, timeout: float) -> AsyncIterator[Lease]:
        """Claims a lease for the length of the block, waiting up to `timeout` seconds for it to be
        opened. If the block ends before the lease does, the lease breaks: the claimant is gone.

        Raises `NotFoundError` if it does not come, is another's, or was claimed before.
        """
        lease = self._leases.get(lease_id) or await self._wait_for((lease_id, claimant), timeout)
        if lease.is_claimed or lease.claimant != claimant:
            # One answer for both, so that ids cannot be probed.
            raise NotFoundError("no such lease for this worker")
        lease.take()
        try:
            yield lease
        finally:
            lease.end(UnavailableError("the decode worker stopped fetching"))

    def confirm(self, lease_id: bytes, generation: int) -> None:
        """Releases a lease. Raises `NotFoundError` if it is over."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise NotFoundError("the lease is over")
        lease.confirm(generation)

    async def _wait_for(self, claim: tuple[bytes, str], timeout: float) -> Lease:
        if claim in self._awaited:
            raise NotFoundError("no such lease for this worker")
        self._awaited[claim] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(self._awaited[claim], timeout)
        except TimeoutError as error:
            raise NotFoundError(f"no prefill came for this lease within {timeout:g} s") from error
        finally:
            del self._awaited[claim]
