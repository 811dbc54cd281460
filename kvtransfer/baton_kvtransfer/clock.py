"""The time that leases run by, so that a test can hold it still."""

from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A callback that is yet to be made."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Monotonic seconds. An asyncio event loop is one."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], Any], /) -> Timer: ...
