"""Counts what a process asks of Redis, and how long that takes. Knows nothing of what it asks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Kind = Literal["command", "read"]
"""A command, answered at once; or a read of streams, which waits a while for news."""


class RoundTrips:
    """Those of one process, since it started.

    Attributes:
        num_answered, num_failed: of each kind.
        seconds: of those that were answered.
    """

    def __init__(self) -> None:
        self.num_answered: dict[str, int] = {"command": 0, "read": 0}
        self.num_failed: dict[str, int] = {"command": 0, "read": 0}
        self.seconds: dict[str, float] = {"command": 0.0, "read": 0.0}

    @contextmanager
    def timed(self, kind: Kind) -> Iterator[None]:
        """The block is one round trip, which has failed if it raises. One that is called off has
        neither failed nor been answered."""
        began = time.monotonic()
        try:
            yield
        except Exception:
            self.num_failed[kind] += 1
            raise
        self.num_answered[kind] += 1
        self.seconds[kind] += time.monotonic() - began
