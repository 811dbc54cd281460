"""Lease on the blocks of one sequence: the source keeps them for one claimant.

The source worker opens the lease, closes it and frees the blocks; the claimant claims it, once. Its
states and events are the table of `baton_kvtransfer.lease.machine`; this module holds the blocks
and the waiting tasks, independent of the transport. Everything runs on one event loop: an open
lease stays open until the next await.

Fence: a confirmation is accepted only while the lease is `TRANSFERRING`. Until then every readable
block has kept its content: the engine frees the blocks of a prefill, a suspended sequence or a pin
on command, which comes after the lease is over, and preempts none of them; blocks that have left a
sliding window are not readable; and a table that changes under a claimant nevertheless ends the
lease here. So one generation per lease proves as much as one per block.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import BatonError, DataLossError, FailedPreconditionError, NotFoundError
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.clock import Clock, Timer
from baton_kvtransfer.lease.handle import FirstToken
from baton_kvtransfer.lease.machine import OVER, SOURCE, LeaseAction, LeaseState, SourceEvent

_CLAIMED = (LeaseState.STREAMING, LeaseState.TRANSFERRING)
_FILLING = (LeaseState.CREATED, LeaseState.COMPUTING, LeaseState.STREAMING)

Tables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim of a lease. All of its fields must match, or the lease is not found."""

    lease_id: bytes
    claimant: str
    tenant: str = ""


class Lease:
    """Lease on the blocks of one sequence, with the number of them that are filled.

    Attributes:
        blocks: block range of the whole sequence.
        generation: unique to this lease in this process; the confirmation must have it.
        block_ids: block table per cache group, at least of the filled blocks; `NULL_BLOCK` for
            blocks that have left a sliding window.
        num_filled: number of leading blocks that may be read.
        is_complete: whether all blocks may be read.
        first_token: token that follows the complete blocks; None for cached blocks alone.
        time_limit: seconds from the first completion to the expiry.
        deadline: time of the expiry, by its clock; None before the first completion.
    """

    def __init__(
        self, claim: Claim, blocks: BlockRange, generation: int, time_limit: float, clock: Clock
    ) -> None:
        self.claim = claim
        self.blocks = blocks
        self.generation = generation
        self.state = LeaseState.CREATED
        self.is_claimed = False
        self.block_ids: Tables = ()
        self.num_filled = 0
        self.is_complete = False
        self.first_token: FirstToken | None = None
        self.deadline: float | None = None
        self.time_limit = time_limit
        self._clock = clock
        self._opened = clock.time()
        self._timer: Timer | None = None
        self._free: Callable[[], None] | None = None
        self._reason: BatonError | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def num_waiting(self) -> int:
        """Number of tasks that wait for a change of it."""
        return len(self._waiters)

    @property
    def age(self) -> float:
        """Seconds since it was opened."""
        return self._clock.time() - self._opened

    # Calls of the source.

    def advance(self, block_ids: Tables, num_filled: int) -> None:
        """Lets the claimant read the first `num_filled` blocks, which `block_ids` covers. Breaks
        the lease if a block that may have been read has moved."""
        if self.state not in _FILLING or num_filled < self.num_filled:
            return
        if self.is_claimed and self.num_filled and not self._still_holds(block_ids):
            self.end(DataLossError("blocks were taken back while they could be read"))
            return
        self.block_ids, self.num_filled = block_ids, num_filled
        self._apply(SourceEvent.FILLED)

    def complete(self, first_token: FirstToken | None, free: Callable[[], None]) -> None:
        """Lets the claimant read all blocks of the last `advance`; `first_token` follows them.

        The lease then owns the blocks until it calls `free`, once; at once if the lease is over.
        """
        if self.is_over:
            free()
            return
        self._free = free
        self.is_complete, self.first_token = True, first_token
        self.num_filled = self.blocks.num_blocks
        if self.deadline is None:
            self.deadline = self._clock.time() + self.time_limit
            self._timer = self._clock.call_at(self.deadline, self.expire_if_due)
        self._apply(SourceEvent.COMPLETED)

    def retract(self) -> None:
        """Withdraws and frees all blocks, which the source will compute again. The lease must be
        unclaimed, so that no block has been read."""
        assert not self.is_claimed, "a lease retracted under its claimant"
        if not self.is_over:
            self.block_ids, self.num_filled = (), 0
            self.is_complete, self.first_token = False, None
            self._apply(SourceEvent.RETRACTED)

    def end(self, reason: BatonError) -> None:
        """Breaks the lease unless it is over; every task that waits on it gets `reason`."""
        if not self.is_over:
            self._reason = reason
            self._apply(SourceEvent.BROKEN)

    def expire_if_due(self) -> None:
        """Ends the lease if its time limit has passed, even if its timer has not fired yet."""
        if self.deadline is None or self.is_over or self._clock.time() < self.deadline:
            return
        self._reason = NotFoundError(f"the lease was over after its {self.time_limit:g} s")
        self._apply(SourceEvent.TIMED_OUT)

    # Calls of the claimant.

    def take(self) -> None:
        """Claims the lease. Raises `NotFoundError` if it is over or already claimed."""
        self.expire_if_due()
        if (self.state, SourceEvent.CLAIMED) not in SOURCE:
            raise no_such_lease()
        self.is_claimed = True
        self._apply(SourceEvent.CLAIMED)

    def confirm(self, generation: int) -> None:
        """Confirms that the claimant holds all blocks: the fence. Raises `NotFoundError` if it is
        late or early, `FailedPreconditionError` for another generation."""
        self.expire_if_due()
        if self.state not in _CLAIMED:
            raise no_such_lease()
        if generation != self.generation:
            raise FailedPreconditionError(
                f"the lease's generation is {self.generation}, the confirmation's is {generation}"
            )
        if self.state is not LeaseState.TRANSFERRING:
            raise NotFoundError("the lease is not ready to be confirmed")
        self._apply(SourceEvent.CONFIRMED)

    # Waiting.

    async def filled_beyond(self, num_blocks: int) -> None:
        """Waits until more than `num_blocks` blocks may be read, or all. Raises the reason if the
        lease breaks."""
        while self.state in _FILLING and self.num_filled <= num_blocks:
            await self._change()
        self._raise_if_broken()

    async def claimed(self) -> None:
        """Waits until the claimant has claimed it. Raises the reason if the lease breaks before."""
        while not self.is_claimed and not self.is_over:
            await self._change()
        self._raise_if_broken()

    async def over(self) -> None:
        """Waits until the lease is confirmed. Raises the reason if it breaks."""
        while not self.is_over:
            await self._change()
        self._raise_if_broken()

    def _still_holds(self, block_ids: Tables) -> bool:
        """Returns whether each block that may have been read is in place, or has left a window.

        `_runs` in `service` detects a block that left the window too early.
        """
        return all(
            len(new) >= len(old)
            and all(n in (o, NULL_BLOCK) for o, n in zip(old, new, strict=False))
            for old, new in zip(self.block_ids, block_ids, strict=True)
        )

    def _apply(self, event: SourceEvent) -> None:
        """Applies a transition that the caller knows to be in the table."""
        step = SOURCE[self.state, event]
        self.state = step.state
        if self.is_over and self._timer is not None:
            self._timer.cancel()
        for action in step.actions:
            self._act(action)

    def _act(self, action: LeaseAction) -> None:
        if action is LeaseAction.WAKE:
            self._wake()
            return
        assert action is LeaseAction.FREE, "an action of the other side"
        free, self._free = self._free, None
        if free is not None:
            free()
        if self.state is LeaseState.CONFIRMED:
            self._apply(SourceEvent.FREED)

    def _raise_if_broken(self) -> None:
        if self._reason is not None:
            raise self._reason

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:  # cancelled, and not woken
                self._waiters.remove(waiter)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def no_such_lease() -> NotFoundError:
    """Returns the same error for an unknown lease, a past one and that of another claimant, so that
    ids cannot be probed."""
    return NotFoundError("no such lease for this worker, or it is over")
