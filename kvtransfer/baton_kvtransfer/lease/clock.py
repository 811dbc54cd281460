"""Clock and timer interfaces for lease timeouts, which tests replace."""

from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """Scheduled callback."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic clock, in seconds. An asyncio event loop implements it."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], Any], /) -> Timer: ...
