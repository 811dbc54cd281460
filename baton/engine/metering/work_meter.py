"""Counts what an engine has computed, and how long that took, since it started.

Any two readings make an equation in what a step, a token and an attended pair take here, whatever
was batched with what; who wants to know these, and solves for them, is not this module's business.
"""

from dataclasses import dataclass

from baton.engine.scheduler.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True)
class WorkDone:
    """One reading.

    Attributes:
        num_steps: that computed something.
        num_prompt_tokens: tokens of sequences that were more than one token behind.
        num_prompt_pairs: for each of those, the tokens before it that its sequence had.
        num_decode_tokens: tokens of sequences that were one token behind.
        seconds: of those steps.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0
    num_decode_tokens: int = 0
    seconds: float = 0.0


class WorkMeter:
    """Noted in the engine's thread; `done` may be read in any other.

    Attributes:
        done: the latest reading.
    """

    def __init__(self) -> None:
        self.done = WorkDone()

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step has been computed."""
        if not plan.num_tokens:
            return
        done, num_tokens, num_pairs = self.done, 0, 0
        for span in plan.spans:
            num_tokens += span.end - span.start
            num_pairs += (span.end - span.start) * (span.start + span.end) // 2
        self.done = WorkDone(
            done.num_steps + 1,
            done.num_prompt_tokens + num_tokens,
            done.num_prompt_pairs + num_pairs,
            done.num_decode_tokens + plan.num_tokens - num_tokens,
            done.seconds + seconds,
        )
