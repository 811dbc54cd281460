"""Circuit breaker for one worker: closed, open, half-open. Awaits nothing; its clock is given.

    closed  --loss, or failures in a row-->  open  --time-->  half-open: to be probed
      ^                                       ^                   |
      |                                       '----probe fails----'
      '----------------------------------------probe succeeds-----'

Nobody's request is the probe: whoever owns the worker asks it whether it is well.
"""

import time
from enum import Enum, auto

from baton.serving.deadline import Clock
from baton_router.fleet.backoff import Backoff

# A worker that is well again takes work a moment later, one that stays away is asked now and then.
PROBING = Backoff(first=0.2, longest=2.0)
# Failures in a row of a worker that answers. One may be the request's fault.
TOLERATED = 2


class CircuitState(Enum):
    """`CLOSED`: it is given work. `HALF_OPEN`: it is to be asked whether it is well."""

    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


class CircuitBreaker:
    """The standing of one worker."""

    def __init__(self, backoff: Backoff = PROBING, clock: Clock = time.monotonic) -> None:
        self._backoff = backoff
        self._clock = clock
        self._num_opened = 0
        self._num_failed = 0
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

    def trip(self) -> None:
        """It died or fell silent. One cause ends many calls, so only the first of them counts."""
        if self.is_closed:
            self._open()

    def record_failure(self) -> None:
        """It says that it has failed at a request."""
        self._num_failed += 1
        if self.is_closed and self._num_failed > TOLERATED:
            self._open()

    def record_success(self) -> None:
        """It has done its part of a request, so that its next failure is a first one again."""
        if self.is_closed:
            self._num_opened = self._num_failed = 0

    def probe_failed(self) -> None:
        if not self.is_closed:
            self._open()

    def probe_succeeded(self) -> None:
        """It says that it is well. Where it is lost again all the same, it stays open longer."""
        self._probed_at = None

    def _open(self) -> None:
        self._num_opened += 1
        self._probed_at = self._clock() + self._backoff.delay(self._num_opened)
