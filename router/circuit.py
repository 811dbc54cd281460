"""Whether a worker is given work after it has failed. Awaits nothing; its clock is given.

    closed  --failure-->  open  --time-->  half-open: to be probed
      ^                    ^                   |
      |                    '----probe fails----'
      '-----------------------probe succeeds---'

Nobody's request is the probe: whoever owns the worker asks it whether it is well.
"""

import time
from enum import Enum, auto

from baton.serving.deadline import Clock
from router.backoff import Backoff

# A worker that is well again takes work a moment later, one that stays away is asked now and then.
PROBING = Backoff(first=0.2, longest=2.0)


class CircuitState(Enum):
    """`CLOSED`: it is given work. `HALF_OPEN`: it is to be asked whether it is well."""

    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


class Circuit:
    """The standing of one worker."""

    def __init__(self, backoff: Backoff = PROBING, clock: Clock = time.monotonic) -> None:
        self._backoff = backoff
        self._clock = clock
        self._num_failures = 0
        self._probed_at: float | None = None  # None: closed

    @property
    def state(self) -> CircuitState:
        if self._probed_at is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if self.seconds_to_probe > 0 else CircuitState.HALF_OPEN

    @property
    def is_closed(self) -> bool:
        return self._probed_at is None

    @property
    def seconds_to_probe(self) -> float:
        """Until it is half open; 0 once it is, or where it is closed."""
        return 0.0 if self._probed_at is None else max(0.0, self._probed_at - self._clock())

    def fail(self) -> None:
        """Work failed there. One cause fails many requests, so only the first of them counts."""
        if self.is_closed:
            self._open()

    def succeed(self) -> None:
        """Work ended well there, so that its next failure is a first one again."""
        if self.is_closed:
            self._num_failures = 0

    def probe_failed(self) -> None:
        if not self.is_closed:
            self._open()

    def probe_succeeded(self) -> None:
        """It says that it is well. Where work fails again all the same, it stays open longer."""
        self._probed_at = None

    def _open(self) -> None:
        self._num_failures += 1
        self._probed_at = self._clock() + self._backoff.delay(self._num_failures)
