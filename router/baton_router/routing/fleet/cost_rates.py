"""Cost rates of one worker: seconds per step, token and transfer, fitted or assumed."""

from dataclasses import dataclass

# Number of a joining sequence's decode steps in which each running sequence slows it.
STEPS_SLOWED = 40


@dataclass(frozen=True, slots=True)
class Rates:
    """Cost rates of one worker; the defaults apply before anything was measured.

    Attributes:
        prefill_seconds_per_step: fixed seconds of each step of a prompt.
        prefill_seconds_per_token: seconds to compute one prompt token.
        attention_seconds_per_pair: seconds to attend from one prompt token to an earlier one.
        max_step_tokens: maximum tokens of one step; 0: unknown, one step is assumed.
        handoff_seconds: fixed seconds from the end of a prefill until the decode worker resumes.
        transfer_seconds_per_token: seconds to transfer one token's KV to a decode worker.
        interference_seconds_per_sequence: seconds by which a running sequence slows a joining one.
        slowness: estimated factor by which the worker is slower than its pool; already part of all
            computing rates.
        encoder_seconds_per_token: seconds to encode one token of an encoder input.
    """

    prefill_seconds_per_step: float = 0.0
    prefill_seconds_per_token: float = 1e-4
    attention_seconds_per_pair: float = 0.0
    max_step_tokens: int = 0
    handoff_seconds: float = 2e-3
    transfer_seconds_per_token: float = 5e-6
    interference_seconds_per_sequence: float = 8e-4
    slowness: float = 1.0
    encoder_seconds_per_token: float = 1e-5

    def prefill_seconds(self, num_uncached: int, num_cached: int) -> float:
        """Returns the seconds to compute `num_uncached` tokens after `num_cached`, once begun."""
        return self.prefill_and_added_seconds(num_uncached, num_cached)[0]

    def added_seconds(self, num_uncached: int, num_cached: int) -> float:
        """Returns the seconds by which such a prompt delays other requests: the part that depends
        on its tokens. A step that runs anyway delays no request."""
        return self.prefill_and_added_seconds(num_uncached, num_cached)[1]

    def prefill_and_added_seconds(self, num_uncached: int, num_cached: int) -> tuple[float, float]:
        """Returns both, as placements need them of every worker."""
        size, step = self.max_step_tokens, self.prefill_seconds_per_step
        linear = num_uncached * self.prefill_seconds_per_token
        num_pairs = num_uncached * (num_cached + num_uncached / 2)
        quadratic = num_pairs * self.attention_seconds_per_pair
        if not size:  # one step is assumed, and none of other prompts
            return (step if num_uncached else 0.0) + linear + quadratic, linear + quadratic
        prefill = -(-num_uncached // size) * step + linear + quadratic
        return prefill, num_uncached / size * step + linear + quadratic

    def queue_seconds(self, num_queued: int, num_queued_encoder: int = 0) -> float:
        """Returns the seconds to compute `num_queued` tokens of other prompts in full steps, and
        `num_queued_encoder` tokens of their encoder inputs."""
        steps = num_queued / self.max_step_tokens if self.max_step_tokens else 0.0
        prompts = (
            steps * self.prefill_seconds_per_step + num_queued * self.prefill_seconds_per_token
        )
        if not num_queued_encoder:
            return prompts
        return prompts + num_queued_encoder * self.encoder_seconds_per_token

    def decode_seconds(self, num_sequences: float) -> float:
        """Returns the seconds of a decode step of `num_sequences`, one token for each."""
        each = self.interference_seconds_per_sequence / STEPS_SLOWED
        return self.prefill_seconds_per_step + num_sequences * each


PRIOR = Rates()
