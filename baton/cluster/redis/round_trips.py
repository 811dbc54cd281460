"""Counters and latency of a process's Redis round trips, whatever the commands are."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Kind = Literal["command", "read"]
"""A command, answered immediately, or a read of streams, which blocks for new entries."""


class RoundTrips:
    """Round trips of one process since its start.

    Attributes:
        num_answered, num_failed: number of round trips, by kind.
        seconds: total seconds of the answered ones, by kind.
    """

    def __init__(self) -> None:
        self.num_answered: dict[str, int] = {"command": 0, "read": 0}
        self.num_failed: dict[str, int] = {"command": 0, "read": 0}
        self.seconds: dict[str, float] = {"command": 0.0, "read": 0.0}

    @contextmanager
    def timed(self, kind: Kind) -> Iterator[None]:
        """Counts and times the `with` block as one round trip, failed if it raises `Exception`. A
        cancelled one counts as neither failed nor answered."""
        began = time.monotonic()
        try:
            yield
        except Exception:
            self.num_failed[kind] += 1
            raise
        self.num_answered[kind] += 1
        self.seconds[kind] += time.monotonic() - began
