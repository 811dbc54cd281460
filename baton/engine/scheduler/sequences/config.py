"""Scheduler configuration: budgets of a step, preemption mode and preemption costs. Plain data."""

from dataclasses import dataclass
from enum import Enum


class Preemption(Enum):
    """Preemption mode: handling of a preempted sequence's KV."""

    RECOMPUTE = "recompute"
    """Drops the KV and recomputes it."""
    SWAP = "swap"
    """Swaps the KV to host memory and back if the host pools can hold it; else as `RECOMPUTE`."""
    RETURN = "return"
    """Drops the KV and returns the request to the router, if it may; else as `RECOMPUTE`."""
    AUTO = "auto"
    """Chooses the mode with the least expected time."""


@dataclass(slots=True)
class PreemptionCosts:
    """Measured costs of swapping and recomputing, in seconds.

    Attributes:
        swap_block: to copy one block of one group, one way.
        compute_token: to compute one token of a prompt.
    """

    swap_block: float = 1e-5
    compute_token: float = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduler limits: budgets of one step, admission rules and policy.

    Attributes:
        max_num_batched_tokens: tokens computed in one step.
        max_num_tokens_with_decodes: the same, of a step in which sequences decode. None: no other
            limit.
        max_num_seqs: sequences that have a batch slot at once.
        max_cache_reads: cache reads of one step, summed over its sequences. None: no limit.
        long_prefill_threshold: prompt tokens of one sequence in one step. None: no limit.
        handoff_chunk_tokens: fewest prompt tokens in a chunk that is cut for a handoff. None: no
            chunk is.
        free_block_margin: share of each pool that is held free for running sequences to grow into:
            prompts, waiting or begun, leave it unless nothing else runs.
        full_sequence_must_fit: admit only sequences whose whole prompt could be computed with the
            blocks that are free now.
        policy: name of the scheduling policy.
        encoder_budget: tokens of encoder inputs computed in one step.
        encoder_cache_tokens: tokens of encoder inputs cached at once.
        cuts_encoder_inputs: a chunk may end within an encoder input.
        max_drafts: draft tokens verified per sequence and step.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_tokens_with_decodes: int | None = None
    prefix_caching: bool = True
    max_cache_reads: int | None = None
    long_prefill_threshold: int | None = None
    handoff_chunk_tokens: int | None = None
    free_block_margin: float = 0.0
    full_sequence_must_fit: bool = False
    policy: str = "decode-first"
    preemption: Preemption = Preemption.AUTO
    encoder_budget: int = 0
    encoder_cache_tokens: int = 0
    cuts_encoder_inputs: bool = True
    max_drafts: int = 0
