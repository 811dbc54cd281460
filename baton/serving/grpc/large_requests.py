"""Large requests: a byte budget that they share, and the threads that parse them.

A request of up to `LARGE_BYTES` needs neither. Independent of what is parsed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from baton.errors import OverloadedError

LARGE_BYTES = 64 * 2**10
DEFAULT_BUDGET_BYTES = 64 * 2**20

# Seconds that a request waits for its share of the budget; a client's deadline may end it earlier.
WAIT_SECONDS = 10.0
_RETRY_SECONDS = 1.0
# Parsing holds the interpreter lock for most of its time, so more threads would parse no more.
_NUM_THREADS = 2

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
        num_bytes: what it holds.
    """

    def __init__(self, requests: "LargeRequests") -> None:
        self._requests = requests
        self.num_bytes = 0

    async def grow(self, num_bytes: int) -> None:
        """Holds `num_bytes` in all, once they are free. Raises `OverloadedError` if that takes
        longer than a share may wait, or if all requests that hold bytes would wait for more."""
        if num_bytes > LARGE_BYTES and num_bytes > self.num_bytes:
            await self._requests.take(self, num_bytes - self.num_bytes)


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
        self._num_held = 0
        self._holders: set[Share] = set()
        self._waiting: deque[_Waiting] = deque()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="parse")

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Opens a share, which is returned at the end of the block."""
        share = Share(self)
        try:
            yield share
        finally:
            self._num_held -= share.num_bytes
            self._holders.discard(share)
            self._admit()

    async def parse(
        self, function: Callable[[*_Arguments], _Result], *args: *_Arguments
    ) -> _Result:
        """Calls the function in a thread, and returns or raises what it does."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """Ends the threads, once each has parsed what it has."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def take(self, share: Share, more: int) -> None:
        """Adds `more` bytes to those of `share`. Called by `Share.grow` alone."""
        if not self._waiting and self._fits(share, more):
            self._hold(share, more)
            return
        others = {waiting.share for waiting in self._waiting}
        if share in self._holders and self._holders <= {share, *others}:
            raise self._overload()  # or none of them would ever be granted more
        waiting = _Waiting(share, more, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiting.granted
        except TimeoutError:
            raise self._overload() from None
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._admit()

    def _overload(self) -> OverloadedError:
        return OverloadedError(
            f"large requests hold {self._num_held} bytes; expected at most {self._budget} with "
            "this one. Retry later, or raise --large-request-budget-bytes.",
            _RETRY_SECONDS,
            reason="large_requests",
        )

    def _fits(self, share: Share, more: int) -> bool:
        return self._num_held + more <= self._budget or self._num_held == share.num_bytes

    def _hold(self, share: Share, more: int) -> None:
        self._num_held += more
        share.num_bytes += more
        self._holders.add(share)

    def _admit(self) -> None:
        """Grants what fits, in the order of arrival."""
        while self._waiting and self._fits(self._waiting[0].share, self._waiting[0].more):
            waiting = self._waiting.popleft()
            if not waiting.granted.done():
                self._hold(waiting.share, waiting.more)
                waiting.granted.set_result(None)
