"""Reports of an engine core, in the order of what they report. Plain data."""

from dataclasses import dataclass

from baton.engine.metering.step_times import TimeSpent
from baton.engine.metering.work_meter import WorkDone
from baton.engine.outputs import StepOutput
from baton.engine.scheduler.kv.memory_report import MemoryReport
from baton.engine.scheduler.kv.pinned_blocks import Tables
from baton.engine.scheduler.scheduler_stats import SchedulerStats
from baton.errors import BatonError

QueryAnswer = int | Tables | MemoryReport | None


@dataclass(frozen=True, slots=True)
class Begun:
    """The engine has the request of this number from here on: earlier reports are not about it."""

    number: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine could not add a request that has begun."""

    request_id: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer to a query."""

    query: int
    answer: QueryAnswer


@dataclass(frozen=True, slots=True)
class QueryFailed:
    """Error in place of an answer to a query."""

    query: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step with updates or other news."""

    output: StepOutput


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine has ended with an error, and all of its requests with it. The last report."""

    reason: str


Report = Begun | Refused | Answered | QueryFailed | Stepped | Failed


@dataclass(frozen=True, slots=True)
class EngineReading:
    """Reading of an engine's counts and meters.

    Attributes:
        work_done, time_spent: since the start, by steps.
        num_late_compilations: kernels compiled after the warm-up, each of which stalled a step.
        idle_since: time since which no request is known and no block held, in seconds since 1970;
            None while one is.
    """

    stats: SchedulerStats
    work_done: WorkDone
    time_spent: TimeSpent
    num_late_compilations: int
    idle_since: float | None
