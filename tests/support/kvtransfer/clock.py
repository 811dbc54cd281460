"""A clock that stands still until a test moves it."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class HeldTimer:
    def __init__(self, callback: Callable[[], Any]) -> None:
        self._callback: Callable[[], Any] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        if self._callback is not None:
            self._callback()


class HeldClock:
    """Timers come round in `advance`, each at its time; or never, where `is_late`, as on an event
    loop that is busy."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.is_late = False
        self._order = itertools.count()
        self._timers: list[tuple[float, int, HeldTimer]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], Any]) -> HeldTimer:
        timer = HeldTimer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while not self.is_late and self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            timer.fire()
        self.now = end
