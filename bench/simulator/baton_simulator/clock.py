"""Simulated time: what happens when, in order. Knows nothing of what happens."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]

_STEP, _EVENT = 0, 1


class Clock:
    """A queue of actions, each at its moment.

    Of one moment the ends of steps come first, by engine; everything else follows in the order in
    which it was asked for. So the order does not depend on how many steps were run in one go.

    Attributes:
        now: seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, int, int, Action]] = []
        self._num_scheduled = 0

    def at(self, time: float, action: Action) -> None:
        """Acts at that moment, which has not passed."""
        self._push(time, _EVENT, 0, action)

    def at_step_end(self, time: float, engine: int, action: Action) -> None:
        """Acts at that moment, before what is not the end of a step."""
        self._push(time, _STEP, engine, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._queue:
            self.now, _, _, _, action = heapq.heappop(self._queue)
            action()

    def _push(self, time: float, kind: int, engine: int, action: Action) -> None:
        assert time >= self.now, "an action in the past"
        self._num_scheduled += 1
        heapq.heappush(self._queue, (time, kind, engine, self._num_scheduled, action))
