"""All leases of one worker. Knows no transport."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count

from baton.errors import AlreadyExistsError, NotFoundError, UnavailableError
from baton_kvtransfer.block_range import BlockRange
from baton_kvtransfer.clock import Clock
from baton_kvtransfer.lease import Claim, Lease, no_such_lease
from baton_kvtransfer.lease_machine import LeaseState

# How many ids are remembered after their leases are over, so that none is used a second time.
NUM_REMEMBERED = 16_384
_DEFAULT_TIME_LIMIT = 60.0


class LeaseTable:
    """The leases that are not over, and the ids of those that were. A claim may come before its
    lease.

    A lease is found by all of its claim, so that whoever shows another tenant's or worker's is told
    the same, and as late, as one who made an id up.
    """

    def __init__(
        self,
        time_limit: float = _DEFAULT_TIME_LIMIT,
        clock: Callable[[], Clock] = asyncio.get_running_loop,
    ) -> None:
        """`time_limit`: seconds from a lease's completion to its confirmation. `clock` is asked for
        the clock when a lease is opened."""
        self._time_limit = time_limit
        self._clock = clock
        self._leases: dict[Claim, Lease] = {}
        self._used: dict[bytes, Claim] = {}
        self._past: deque[bytes] = deque()
        self._awaited: dict[Claim, asyncio.Future[Lease]] = {}
        self._generations = count(1)

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest lease that is not over was opened; 0 where there is none."""
        return max((lease.age for lease in self._leases.values()), default=0.0)

    @property
    def num_awaited(self) -> int:
        """Claims that wait for their lease to be opened."""
        return len(self._awaited)

    @property
    def has_awaited(self) -> bool:
        """Whether a claimant waits for blocks that are yet to be computed."""
        return any(lease.state is LeaseState.STREAMING for lease in self._leases.values())

    def check_new(self, lease_id: bytes) -> None:
        """Raises `AlreadyExistsError` for an id that is in use or has been."""
        if lease_id in self._used:
            raise AlreadyExistsError("a lease with this id is here, or was; an id is used once")

    @contextmanager
    def open(self, claim: Claim, extent: BlockRange) -> Iterator[Lease]:
        """A new lease for the length of the block, after which it is over in any case.

        Raises `AlreadyExistsError` for an id that is in use or has been.
        """
        self.check_new(claim.lease_id)
        generation = next(self._generations)
        lease = Lease(claim, extent, generation, self._time_limit, self._clock())
        self._used[claim.lease_id] = claim
        self._leases[claim] = lease
        awaited = self._awaited.get(claim)
        if awaited is not None and not awaited.done():
            awaited.set_result(lease)
        try:
            yield lease
        finally:
            lease.end(NotFoundError("the lease was called off by the side that has the blocks"))
            del self._leases[claim]
            self._forget_later(claim.lease_id)

    @asynccontextmanager
    async def claim(self, claim: Claim, timeout: float) -> AsyncIterator[Lease]:
        """Claims a lease for the length of the block, waiting up to `timeout` seconds for it to be
        opened. If the block ends before the lease does, the lease breaks: the claimant is gone.

        Raises `NotFoundError` if it does not come, is over, or was claimed before.
        """
        lease = self._leases.get(claim) or await self._wait_for(claim, timeout)
        lease.take()
        try:
            yield lease
        finally:
            lease.end(UnavailableError("its claimant stopped fetching"))

    def confirm(self, claim: Claim, generation: int) -> None:
        """Releases a lease. Raises `NotFoundError` if there is none to be released,
        `FailedPreconditionError` for another generation."""
        lease = self._leases.get(claim)
        if lease is None:
            raise no_such_lease()
        lease.confirm(generation)

    async def _wait_for(self, claim: Claim, timeout: float) -> Lease:
        if claim in self._awaited or self._used.get(claim.lease_id) == claim:
            raise no_such_lease()
        self._awaited[claim] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(self._awaited[claim], timeout)
        except TimeoutError as error:
            raise NotFoundError(f"nothing came for this lease within {timeout:g} s") from error
        finally:
            del self._awaited[claim]

    def _forget_later(self, lease_id: bytes) -> None:
        self._past.append(lease_id)
        if len(self._past) > NUM_REMEMBERED:
            del self._used[self._past.popleft()]
