"""Scheduler statistics. Plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts of one moment, blocks summed over the cache groups. Held blocks include those of
    leases; cached ones are not held; free ones are empty. `num_reserved_blocks` of the last two
    are kept for prompts that have begun; host blocks hold swapped sequences. `num_step_tokens` is
    of the last step; the totals after it since the start. Encoder blocks hold encoder outputs;
    waiting encoder tokens are those of waiting encode jobs that may have to be computed."""

    num_waiting: int
    num_running: int
    num_awaiting_kv: int
    num_swapped: int
    num_kept: int
    num_held_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_blocks: int
    num_reserved_blocks: int
    num_host_blocks: int
    num_held_host_blocks: int
    num_step_tokens: int
    num_recomputes: int
    num_swaps: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_returns: int
    num_hit_tokens: int
    num_prompt_tokens: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_computed_tokens: int
    num_pulled_tokens: int
    num_steps_ahead: int
    num_encoder_blocks: int
    num_held_encoder_blocks: int
    num_cached_encoder_blocks: int
    num_non_finite_requests: int
    num_encode_jobs: int
    num_waiting_encode_jobs: int
    num_waiting_encoder_tokens: int

    @property
    def is_idle(self) -> bool:
        """True if no request and no encode job is known, and no block is held."""
        sequences = self.num_waiting + self.num_running + self.num_awaiting_kv + self.num_swapped
        blocks = self.num_held_blocks + self.num_held_host_blocks
        return sequences + self.num_kept + self.num_encode_jobs + blocks == 0

    @property
    def num_preemptions(self) -> int:
        """Preempted sequences: recomputed, swapped and returned ones. The counts are read while the
        engine's thread changes them; none of these sums can be less than an earlier one."""
        return self.num_recomputes + self.num_swaps + self.num_returns
