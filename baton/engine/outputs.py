"""Requests and updates of an engine. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.cluster.events.kv_events import KvEvents
from baton.engine.metering.step_times import StepTimes
from baton.engine.request import FinishReason
from baton.engine.scheduler.kv.encoder_cache import HeldOutput
from baton.engine.scheduler.plan import (
    ExternalAllocation,
    Float32Array,
    TokenLogprobs,
)
from baton.engine.scheduler.sequences.config import Preemption
from baton.errors import BatonError


@dataclass(slots=True)  # a frozen one takes five times as long to make
class SequenceUpdate:
    """Update of one sequence by one step: one token at most; several updates for several tokens.
    Not changed once it is in a `StepOutput`.

    Attributes:
        index: index of the sequence in the request; of finished beams, in the results, best first.
        position: position of `token_id` in the output, from 0.
        logprobs: of `token_id`, if requested.
        num_computed_tokens: KV of [0, this) is in the blocks.
        block_ids: per cache group, the blocks of a `PREFILL` or suspended sequence; else empty.
        score: score of a finished beam.
        failure: reason why it `FAILED`; its output before is not valid.
        prompt_logprobs: of the prompt tokens that this step scored, in order; the first token of a
            prompt has none.
        pooled: what this step adds to the pooled output, `[width]`; None: nothing.
    """

    request_id: str
    index: int
    token_id: int | None
    position: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_ids: tuple[tuple[int, ...], ...] = ()
    score: float | None = None
    failure: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: Float32Array | None = None

    @property
    def logprob(self) -> float | None:
        return None if self.logprobs is None else self.logprobs.logprob


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of one step.

    Attributes:
        made_progress: False if only a command can change what the next step does.
        times: start, end and phases of the step.
        preempted: request id and handling of the KV of each preempted sequence.
        failed: requests that the step has ended, with the error of each.
        held_outputs: answers to encode jobs: outputs that are there, or blocks that can be filled.
    """

    updates: tuple[SequenceUpdate, ...]
    external: tuple[ExternalAllocation, ...]
    cache_events: KvEvents
    made_progress: bool
    times: StepTimes
    preempted: tuple[tuple[str, Preemption], ...] = ()
    failed: Mapping[str, BatonError] = field(default_factory=dict)
    held_outputs: tuple[HeldOutput, ...] = ()
