"""Work meter: tokens and attended pairs that an engine has computed, and the seconds they took.

Any two readings give an equation in the cost of a step, a token, an encoder token and an attended
pair on this engine, however they were batched; readers of the meter solve for them.
"""

from dataclasses import dataclass

from baton.engine.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Work reading: totals since the engine started.

    Attributes:
        num_steps: steps that computed tokens, or encoder outputs alone.
        num_prompt_tokens: tokens of sequences that were more than one token behind.
        num_prompt_pairs: for each of those, the tokens before it that its sequence had.
        num_decode_tokens: tokens of sequences that were one token behind.
        seconds: seconds of those steps.
        num_encoder_tokens: tokens of encoder inputs whose output was computed.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0
    num_decode_tokens: int = 0
    seconds: float = 0.0
    num_encoder_tokens: int = 0


class WorkMeter:
    """Work meter, written by the engine's thread; any thread may read `done`.

    Attributes:
        done: the latest reading.
    """

    def __init__(self) -> None:
        self.done = WorkDone()

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Adds a computed step."""
        if not plan.num_tokens and not plan.encoder.to_compute:
            return
        done, num_tokens, num_pairs = self.done, 0, 0
        for chunk in plan.chunks:
            num_tokens += chunk.end - chunk.start
            num_pairs += (chunk.end - chunk.start) * (chunk.start + chunk.end) // 2
        self.done = WorkDone(
            done.num_steps + 1,
            done.num_prompt_tokens + num_tokens,
            done.num_prompt_pairs + num_pairs,
            done.num_decode_tokens + plan.num_tokens - num_tokens,
            done.seconds + seconds,
            done.num_encoder_tokens + sum(o.encoder_input.length for o in plan.encoder.to_compute),
        )
