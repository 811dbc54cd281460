"""Step timing: schedule, forward and sample time of each step, and totals since the start.

A step is scheduled, computed (forward) and its tokens are chosen (sample); applying its result
counts as scheduling. On a GPU, which computes beside the thread, forward is the time to launch a
step and to wait for it, sampling included: the thread cannot tell them apart.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Time reading: the seconds of all steps so far, by phase."""

    num_steps: int = 0
    schedule: float = 0.0
    forward: float = 0.0
    sample: float = 0.0

    @property
    def seconds(self) -> float:
        return self.schedule + self.forward + self.sample

    def since(self, earlier: "TimeSpent") -> "TimeSpent":
        """Returns the time spent after an earlier reading."""
        return TimeSpent(
            self.num_steps - earlier.num_steps,
            self.schedule - earlier.schedule,
            self.forward - earlier.forward,
            self.sample - earlier.sample,
        )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one step.

    Attributes:
        started, ended: on the clock of `time.perf_counter`, in seconds.
        before, after: the readings at both moments.
    """

    started: float
    ended: float
    before: TimeSpent
    after: TimeSpent

    @property
    def spent(self) -> TimeSpent:
        """Time spent in this step."""
        return self.after.since(self.before)


class StepClock:
    """Step clock, written by the engine's thread; any thread may read `spent`.

    Attributes:
        spent: the latest reading.
    """

    def __init__(self, *, is_on_gpu: bool = False) -> None:
        self.spent = TimeSpent()
        self._is_on_gpu = is_on_gpu
        self._is_running = False
        self._forward = 0.0
        self._sample = 0.0

    def forward(self) -> AbstractContextManager[None]:
        """Adds the time of the `with` block to forward."""
        return self._measured(is_forward=True)

    def sample(self) -> AbstractContextManager[None]:
        """Adds the time of the `with` block, which chooses or awaits tokens, to sample."""
        return self._measured(is_forward=self._is_on_gpu)

    @contextmanager
    def _measured(self, *, is_forward: bool) -> Iterator[None]:
        """Measures a block. One inside another counts for that: waiting may run the work."""
        if self._is_running:
            yield
            return
        start, self._is_running = time.perf_counter(), True
        try:
            yield
        finally:
            seconds, self._is_running = time.perf_counter() - start, False
            if is_forward:
                self._forward += seconds
            else:
                self._sample += seconds

    def note_step(self, started: float) -> StepTimes:
        """Records a step that began at `started` and ends now; all of it that was neither forward
        nor sample counts as schedule."""
        ended, before = time.perf_counter(), self.spent
        forward, sample, self._forward, self._sample = self._forward, self._sample, 0.0, 0.0
        self.spent = TimeSpent(
            before.num_steps + 1,
            before.schedule + max(0.0, ended - started - forward - sample),
            before.forward + forward,
            before.sample + sample,
        )
        return StepTimes(started, ended, before, self.spent)
