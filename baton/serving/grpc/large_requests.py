"""Large requests: a byte budget that they share, and the threads that parse them.

A request of up to `LARGE_BYTES` needs neither. Independent of what is parsed.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from baton.errors import OverloadedError
from baton.fairness.fair_bound import FairBound
from baton.fairness.fair_threads import FairThreads

LARGE_BYTES = 64 * 2**10
DEFAULT_BUDGET_BYTES = 64 * 2**20

# Seconds that a request waits for its share of the budget; a client's deadline may end it earlier.
WAIT_SECONDS = 10.0
_RETRY_SECONDS = 1.0
# Parsing holds the interpreter lock for most of its time, so more threads would parse no more.
_NUM_THREADS = 2
# Requests that wait to be parsed, of all holders.
_MAX_UNPARSED = 1024

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Share that waits for `more` bytes."""

    share: "Share"
    more: int
    granted: asyncio.Future[None]


class Share:
    """Share of one request in the budget.

    Attributes:
        holder: the tenant that it is of.
        num_bytes: what it holds.
        has_given_way: whether it was ended for another holder's.
    """

    def __init__(self, requests: "LargeRequests", holder: str) -> None:
        self.holder = holder
        self.num_bytes = 0
        self.has_given_way = False
        self._requests = requests
        self._receipt: asyncio.Timeout | None = None

    @property
    def is_arriving(self) -> bool:
        """Whether it may give way: its body arrives."""
        return self._receipt is not None and not self.has_given_way

    @asynccontextmanager
    async def receiving(self, seconds: float) -> AsyncIterator[None]:
        """Runs the block in which a body arrives, and in which the share may have to give way to
        another holder's. Raises `OverloadedError` then, and `TimeoutError` after `seconds`."""
        try:
            async with asyncio.timeout(seconds) as self._receipt:
                yield
        except TimeoutError:
            self._check()
            raise
        finally:
            self._receipt = None
        self._check()

    async def grow(self, num_bytes: int) -> None:
        """Holds `num_bytes` in all, once they are free. Raises `OverloadedError` if that takes
        longer than a share may wait, or if all requests that hold bytes would wait for more."""
        self._check()
        if num_bytes > LARGE_BYTES and num_bytes > self.num_bytes:
            await self._requests.take(self, num_bytes - self.num_bytes)

    def give_way(self) -> None:
        """Ends the block in which the body arrives."""
        assert self._receipt is not None, "a share whose body is whole gives way"
        self.has_given_way = True
        self._receipt.reschedule(asyncio.get_running_loop().time())

    def _check(self) -> None:
        if self.has_given_way:
            raise self._requests.overload() from None


class LargeRequests:
    """Budget and threads for the large requests of one process.

    A request alone may exceed the budget, so that any size that the server takes is served.
    """

    def __init__(
        self, budget_bytes: int = DEFAULT_BUDGET_BYTES, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        """`wait_seconds`: longest wait of a share for bytes."""
        self._budget = budget_bytes
        self._wait_seconds = wait_seconds
        self._held = FairBound(budget_bytes)
        self._shares: dict[Share, None] = {}  # that hold bytes, by age
        self._waiting: dict[str, deque[_Waiting]] = {}
        self._threads = FairThreads(_NUM_THREADS, _MAX_UNPARSED, "parsing")

    @property
    def num_bytes(self) -> int:
        """Bytes that all shares hold."""
        return self._held.total

    @contextmanager
    def share(self, holder: str = "") -> Iterator[Share]:
        """Opens a share, which is returned at the end of the block."""
        share = Share(self, holder)
        try:
            yield share
        finally:
            self._release(share)
            self._admit()

    async def parse(
        self, holder: str, function: Callable[[*_Arguments], _Result], *args: *_Arguments
    ) -> _Result:
        """Calls the function in a thread, in a turn of the holder, and returns or raises what it
        does."""
        return await self._threads.call(holder, function, *args)

    def close(self) -> None:
        """Ends the threads, once each has parsed what it has."""
        self._threads.close()

    async def take(self, share: Share, more: int) -> None:
        """Adds `more` bytes to those of `share`. Called by `Share.grow` alone."""
        self._make_room(share, more)
        waiting = _Waiting(share, more, asyncio.get_running_loop().create_future())
        queue = self._waiting.setdefault(share.holder, deque())
        queue.append(waiting)
        self._admit()
        try:
            if not waiting.granted.done() and share in self._shares and self._all_wait():
                raise self.overload()  # or none of them would ever be granted more
            async with asyncio.timeout(self._wait_seconds):
                await waiting.granted
        except TimeoutError:
            raise self.overload() from None
        finally:
            if waiting in queue:
                self._forget(waiting)
                self._admit()

    def overload(self) -> OverloadedError:
        return OverloadedError(
            f"large requests hold {self.num_bytes} bytes; expected at most {self._budget} with "
            "this one. Retry later, or raise --large-request-budget-bytes.",
            _RETRY_SECONDS,
            reason="large_requests",
        )

    def _make_room(self, share: Share, more: int) -> None:
        """Has bodies that arrive give way, of the holders that have more than this one then would,
        the newest first."""
        while (victim := self._held.victim_for(share.holder, more)) not in (None, share.holder):
            arriving = (each for each in reversed(self._shares) if each.is_arriving)
            newest = next((each for each in arriving if each.holder == victim), None)
            if newest is None:
                return
            newest.give_way()
            self._release(newest)

    def _all_wait(self) -> bool:
        """Returns whether all shares that hold bytes wait for more."""
        return self._shares.keys() <= {
            each.share for queue in self._waiting.values() for each in queue
        }

    def _fits(self, waiting: _Waiting) -> bool:
        is_alone = self.num_bytes == waiting.share.num_bytes
        return is_alone or self.num_bytes + waiting.more <= self._budget

    def _admit(self) -> None:
        """Grants what fits: of the holder with the least first, and of one in order of arrival."""
        while self._waiting:
            first = self._waiting[min(self._waiting, key=self._held.held_by)][0]
            if not self._fits(first):
                return
            self._forget(first)
            if not (first.granted.done() or first.share.has_given_way):
                self._held.add(first.share.holder, first.more)
                first.share.num_bytes += first.more
                self._shares[first.share] = None
                first.granted.set_result(None)

    def _forget(self, waiting: _Waiting) -> None:
        holder = waiting.share.holder
        self._waiting[holder].remove(waiting)
        if not self._waiting[holder]:
            del self._waiting[holder]

    def _release(self, share: Share) -> None:
        if share in self._shares:
            self._held.remove(share.holder, share.num_bytes)
            share.num_bytes = 0
            del self._shares[share]
