"""Cost rates of one worker: seconds per step, token and transfer, fitted or assumed."""

from dataclasses import dataclass

# A sequence that joins others is slowed by each of them in so many of its steps.
STEPS_SLOWED = 40


@dataclass(frozen=True, slots=True)
class Rates:
    """The defaults are what is assumed before anything was measured.

    Attributes:
        prefill_seconds_per_step: what each step of a prompt takes, however few tokens it has.
        prefill_seconds_per_token: to compute a token of a prompt.
        attention_seconds_per_pair: to attend from one such token to one before it.
        max_step_tokens: tokens of one step at most; 0: not known, one step is assumed.
        handoff_seconds: from the end of a prompt until the decode worker can go on, whatever moves.
        transfer_seconds_per_token: to move a token's KV to a decode worker.
        interference_seconds_per_sequence: by which a running sequence slows one that joins it.
        slowness: how much slower than its pool the worker is thought to be; all that is said above
            of its computing has it in it.
    """

    prefill_seconds_per_step: float = 0.0
    prefill_seconds_per_token: float = 1e-4
    attention_seconds_per_pair: float = 0.0
    max_step_tokens: int = 0
    handoff_seconds: float = 2e-3
    transfer_seconds_per_token: float = 5e-6
    interference_seconds_per_sequence: float = 8e-4
    slowness: float = 1.0

    def prefill_seconds(self, num_uncached: int, num_cached: int) -> float:
        """How long a prompt takes, once begun, of which so many leading tokens are cached."""
        linear = num_uncached * self.prefill_seconds_per_token
        quadratic = self._attention_seconds(num_uncached, num_cached)
        return self.num_steps(num_uncached) * self.prefill_seconds_per_step + linear + quadratic

    def added_seconds(self, num_uncached: int, num_cached: int) -> float:
        """By how much such a prompt makes others' steps longer, or more: what depends on its
        tokens. A step that is computed anyway costs nobody more."""
        return self.queue_seconds(num_uncached) + self._attention_seconds(num_uncached, num_cached)

    def queue_seconds(self, num_queued: int) -> float:
        """How long so many tokens of other prompts take, whose steps are full."""
        steps = num_queued / self.max_step_tokens if self.max_step_tokens else 0.0
        return steps * self.prefill_seconds_per_step + num_queued * self.prefill_seconds_per_token

    def decode_seconds(self, num_sequences: float) -> float:
        """How long a step of so many sequences takes, in which each gets a token."""
        each = self.interference_seconds_per_sequence / STEPS_SLOWED
        return self.prefill_seconds_per_step + num_sequences * each

    def num_steps(self, num_tokens: int) -> int:
        """Of a prompt with so many tokens to compute, alone."""
        if not self.max_step_tokens:
            return min(1, num_tokens)
        return -(-num_tokens // self.max_step_tokens)

    def _attention_seconds(self, num_uncached: int, num_cached: int) -> float:
        num_pairs = num_uncached * (num_cached + num_uncached / 2)
        return num_pairs * self.attention_seconds_per_pair


PRIOR = Rates()
