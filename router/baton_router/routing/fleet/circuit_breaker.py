"""Circuit breaker for one worker: closed, open, half-open. Awaits nothing; the clock is passed in.

    closed  --loss, or failures in a row-->  open  --time-->  half-open: to be probed
      ^                                       ^                   |
      |                                       '----probe fails----'
      '----------------------------------------probe succeeds-----'

No client's request is the probe: the fleet probes the worker with a health check.
"""

import time
from enum import Enum, auto

from baton.rpc.backoff import Backoff
from baton.serving.deadline import Clock

# Backoff between health checks: short after the first failure, 1 to 2 seconds in a long outage.
PROBING = Backoff(first=0.2, longest=2.0)
# Consecutive failures tolerated from a worker that answers: a request may have caused them.
TOLERATED = 2


class CircuitState(Enum):
    """State of a circuit breaker. `CLOSED`: the worker gets requests. `HALF_OPEN`: to be probed."""

    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


class CircuitBreaker:
    """Circuit breaker of one worker."""

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
        """Seconds until the circuit is half-open; 0 if it is half-open or closed."""
        return 0.0 if self._probed_at is None else max(0.0, self._probed_at - self._clock())

    def trip(self) -> None:
        """Opens the circuit: the worker is dead or silent. Further calls that fail do not count."""
        if self.is_closed:
            self._open()

    def record_failure(self) -> None:
        """Counts a failure that the worker reported; opens at more than `TOLERATED` in a row."""
        self._num_failed += 1
        if self.is_closed and self._num_failed > TOLERATED:
            self._open()

    def record_success(self) -> None:
        """Resets the failure count and the backoff: the worker has served a request."""
        if self.is_closed:
            self._num_opened = self._num_failed = 0

    def probe_failed(self) -> None:
        if not self.is_closed:
            self._open()

    def probe_succeeded(self) -> None:
        """Closes the circuit. If it opens again before a success, it stays open longer."""
        self._probed_at = None

    def _open(self) -> None:
        self._num_opened += 1
        self._probed_at = self._clock() + self._backoff.delay(self._num_opened)
