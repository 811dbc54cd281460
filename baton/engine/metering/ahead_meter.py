"""Ahead meter: steps launched before the tokens of the step before were known, and others."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.engine.scheduler.scheduling.plan import NotAhead


@dataclass(frozen=True, slots=True)
class StepsAhead:
    """Steps since the engine started.

    Attributes:
        num_ahead: steps launched before the tokens of the step before were known.
        num_waits: steps behind which none was launched, by reason.
    """

    num_ahead: int = 0
    num_waits: Mapping[NotAhead, int] = field(default_factory=dict)


class AheadMeter:
    """Ahead meter, written by the engine's thread; any thread may read `done`.

    Attributes:
        done: the latest reading.
    """

    def __init__(self) -> None:
        self.done = StepsAhead()

    def note(self, reason: NotAhead | None) -> None:
        """Counts a step behind which one was launched, or the `reason` why none was."""
        done = self.done
        if reason is None:
            self.done = StepsAhead(done.num_ahead + 1, done.num_waits)
        else:
            waits = {**done.num_waits, reason: done.num_waits.get(reason, 0) + 1}
            self.done = StepsAhead(done.num_ahead, waits)
