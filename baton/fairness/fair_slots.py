"""Slots that holders take in turns, so that none waits for all that another one wants."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable

from baton.fairness.fair_queue import FairQueue, Waiting


class FairSlots:
    """Slots that several holders take in turns. From one event loop.

    One of several slots is kept free of each holder: what it runs delays no other holder's first.

    Args:
        refusal: makes the error of one that gives way.
        max_waiting: maximum number of those that wait; the newest of the holder with most give way.
        max_bytes: maximum of their bytes, as well; one that waits alone may have more.
    """

    def __init__(
        self,
        num_slots: int,
        refusal: Callable[[], Exception],
        *,
        max_waiting: int,
        max_bytes: float = math.inf,
    ) -> None:
        self._num_slots = num_slots
        self._refusal = refusal
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(
            quantum=1, max_waiting=max_waiting, max_bytes=max_bytes
        )
        self._num_running: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        return self._num_running.total()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of those that wait."""
        return self._waiting.num_bytes

    def add(self) -> None:
        """Adds a slot, which the next holder gets."""
        self._num_slots += 1
        self._grant()

    async def acquire(self, holder: str, num_bytes: int = 0) -> None:
        """Waits until the holder has a slot, which `release` frees. Raises a refusal if it gives
        way to others."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._push(granted, holder, num_bytes)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._waiting.remove(waiting)
            elif granted.exception() is None:
                self.release(holder)
            raise

    def release(self, holder: str) -> None:
        """Frees a slot of the holder."""
        self._num_running[holder] -= 1
        if not self._num_running[holder]:
            del self._num_running[holder]
        self._grant()

    def close(self) -> None:
        """Refuses all that wait. What runs goes on."""
        while (waiting := self._waiting.pop()) is not None:
            self._refuse(waiting)

    def _push(
        self, granted: "asyncio.Future[None]", holder: str, num_bytes: int
    ) -> "Waiting[asyncio.Future[None]]":
        while self._waiting:
            victim = self._waiting.victim_for(holder, num_bytes)
            if victim is None:
                break
            if victim == holder:
                raise self._refusal()
            self._refuse(self._waiting.pop_newest(victim))
        return self._waiting.push(granted, tenant=holder, num_tokens=1, num_bytes=num_bytes)

    def _refuse(self, waiting: "Waiting[asyncio.Future[None]]") -> None:
        if not waiting.item.done():  # by its cancellation
            waiting.item.set_exception(self._refusal())

    def _grant(self) -> None:
        while self.num_running < self._num_slots:
            waiting = self._waiting.pop(self._may_acquire)
            if waiting is None:
                return
            if not waiting.item.done():
                self._num_running[waiting.tenant] += 1
                waiting.item.set_result(None)

    def _may_acquire(self, holder: str) -> bool:
        return self._num_running[holder] < max(1, self._num_slots - 1)
