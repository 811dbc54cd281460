"""What crosses between the thinking and the computing half of the engine. Plain frozen data."""

from dataclasses import dataclass

from baton.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class AddedSequence:
    """A sequence the runner does not know, or no longer: everything about it.

    `block_ids` is the whole table at this moment, the blocks of this step among them.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The tokens [start, end) of one sequence, to be computed in this step.

    `new_block_ids` extend the table the runner has. `samples`: the last token's logits choose the
    next token, which the runner appends to its own copy.
    """

    request_id: str
    start: int
    end: int
    new_block_ids: tuple[int, ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class ExternalAllocation:
    """Blocks for a sequence whose KV comes from elsewhere; the first `num_hit_blocks` hold it."""

    request_id: str
    block_ids: tuple[int, ...]
    num_hit_blocks: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what the runner shall compute, and what it can forget.

    A sequence that was preempted or finished is in `dropped` exactly once.
    """

    added: tuple[AddedSequence, ...]
    scheduled: tuple[ScheduledSequence, ...]
    dropped: tuple[str, ...]
    external: tuple[ExternalAllocation, ...]
    num_tokens: int

    @property
    def is_pure_decode(self) -> bool:
        """Every sequence computes one token and samples: what a captured graph can replay."""
        return all(s.samples and s.end - s.start == 1 for s in self.scheduled)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens chosen, and their log-probabilities in nats, for the plan's sampling sequences, in
    the plan's order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
