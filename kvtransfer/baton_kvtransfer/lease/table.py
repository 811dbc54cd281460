"""Lease table of one worker. Independent of the transport."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count

from baton.errors import (
    AlreadyExistsError,
    LeaseNotOpenedError,
    NotFoundError,
    UnavailableError,
)
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.clock import Clock
from baton_kvtransfer.lease.lease import Claim, Lease, no_such_lease
from baton_kvtransfer.lease.machine import LeaseState

NUM_REMEMBERED = 16_384
_DEFAULT_TIME_LIMIT = 60.0
# A decode worker claims before the router calls the prefill worker, and is cancelled if that fails.
DEFAULT_OPEN_TIMEOUT = 30.0


class LeaseTable:
    """Table of open leases, and of ids of past ones. A claim may arrive before its lease opens.

    Leases are looked up by the whole claim: a claim with the id of another tenant or worker gets
    the same error, after the same delay, as one with an id that does not exist.

    Attributes:
        open_timeout: seconds for which a claim waits for its lease to open.
    """

    def __init__(
        self,
        time_limit: float = _DEFAULT_TIME_LIMIT,
        clock: Callable[[], Clock] = asyncio.get_running_loop,
        *,
        open_timeout: float = DEFAULT_OPEN_TIMEOUT,
        num_remembered: int = NUM_REMEMBERED,
    ) -> None:
        """`time_limit`: seconds from a lease's completion to its confirmation. `clock` returns the
        clock; it is called when a lease opens. `open_timeout`: as the attribute. `num_remembered`:
        number of ids remembered after their leases are over, to reject a reused id."""
        self.open_timeout = open_timeout
        self._num_remembered = num_remembered
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
    def num_awaited(self) -> int:
        """Number of claims that wait for their leases to open."""
        return len(self._awaited)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest lease that is not over was opened; 0 if there is none."""
        return max((lease.age for lease in self._leases.values()), default=0.0)

    @property
    def has_awaited(self) -> bool:
        """Whether a claimant waits for blocks that are yet to be computed."""
        return any(lease.state is LeaseState.STREAMING for lease in self._leases.values())

    def check_new(self, lease_id: bytes) -> None:
        """Raises `AlreadyExistsError` for an id that is or was in use."""
        if lease_id in self._used:
            raise AlreadyExistsError("a lease with this id is here, or was; an id is used once")

    @contextmanager
    def open(self, claim: Claim, blocks: BlockRange) -> Iterator[Lease]:
        """Opens a lease for the duration of the `with` block, after which it is over in any case.

        Raises `AlreadyExistsError` for an id that is or was in use.
        """
        self.check_new(claim.lease_id)
        generation = next(self._generations)
        lease = Lease(claim, blocks, generation, self._time_limit, self._clock())
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
        """Claims a lease for the duration of the `with` block; waits up to `timeout` seconds for it
        to open. If the `with` block ends first, the lease breaks: its claimant is gone.

        Raises `NotFoundError` if it is over or was claimed before, and `LeaseNotOpenedError` if it
        does not open in time.
        """
        lease = self._leases.get(claim) or await self._wait_for(claim, timeout)
        lease.take()
        try:
            yield lease
        finally:
            lease.end(UnavailableError("its claimant stopped fetching"))

    def confirm(self, claim: Claim, generation: int) -> None:
        """Confirms and so releases a lease. Raises `NotFoundError` if it is over or unknown,
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
            raise LeaseNotOpenedError(
                f"nothing came for this lease within {timeout:g} s"
            ) from error
        finally:
            del self._awaited[claim]

    def _forget_later(self, lease_id: bytes) -> None:
        self._past.append(lease_id)
        if len(self._past) > self._num_remembered:
            del self._used[self._past.popleft()]
