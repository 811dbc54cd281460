"""Budgets and choices of a scheduler. Plain data."""

from dataclasses import dataclass
from enum import Enum


class Preemption(Enum):
    """Handling of a preempted sequence's KV."""

    RECOMPUTE = "recompute"
    """It is dropped and computed again."""
    SWAP = "swap"
    """It goes to host memory and comes back, as far as there is room; else as `RECOMPUTE`."""
    RETURN = "return"
    """It is dropped, and the request given back to who would place it anew; else as `RECOMPUTE`."""
    AUTO = "auto"
    """Whichever is expected to take less time."""


@dataclass(slots=True)
class PreemptionCosts:
    """Costs of swapping and recomputing, in seconds, as they are measured.

    Attributes:
        swap_block: to copy one block of one group, one way.
        compute_token: to compute one token of a prompt.
    """

    swap_block: float = 1e-5
    compute_token: float = 1e-4


@dataclass(frozen=True, slots=True)
class ReturnCost:
    """Cost of resuming a request elsewhere after it is given back, in seconds, estimated by the
    router.

    Attributes:
        fixed: with the tokens that it arrived with.
        per_token: for each token that has come since.
        recompute_token: to compute one of its tokens again here instead.
    """

    fixed: float
    per_token: float
    recompute_token: float

    def seconds(self, num_new_tokens: int) -> float:
        """With so many tokens more than it arrived with."""
        return self.fixed + num_new_tokens * self.per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of one step, and how to choose.

    Attributes:
        max_num_batched_tokens: tokens computed in one step.
        max_num_seqs: sequences that have a slot at once.
        max_cache_reads: tokens attended to in one step, summed over its sequences. None: no limit.
        long_prefill_threshold: prompt tokens of one sequence in one step. None: no limit.
        free_block_margin: free blocks of each cache group that must remain when something new is
            let in, so that what runs can grow; not asked for when nothing runs.
        full_sequence_must_fit: let nothing in whose prompt could not be computed to its end with
            the blocks that are free now.
        policy: a name of `baton.engine.scheduler.scheduling.policy.POLICIES`.
        encoder_budget: tokens of encoder inputs computed in one step.
        encoder_cache_tokens: tokens of encoder inputs kept at once.
        max_drafts: guessed tokens verified per sequence and step.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    max_model_len: int
    vocab_size: int
    prefix_caching: bool = True
    max_cache_reads: int | None = None
    long_prefill_threshold: int | None = None
    free_block_margin: int = 0
    full_sequence_must_fit: bool = False
    policy: str = "decode-first"
    preemption: Preemption = Preemption.AUTO
    encoder_budget: int = 0
    encoder_cache_tokens: int = 0
    max_drafts: int = 0
