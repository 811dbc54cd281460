"""Requests and updates of an engine. Plain data."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from baton.cluster.prefix import BlockHash, PrefixNamespace
from baton.engine.metering.step_times import StepTimes
from baton.engine.scheduler.kv.block_pool import CacheEvents
from baton.engine.scheduler.kv.encoder_cache import HeldOutput
from baton.engine.scheduler.scheduling.plan import (
    ExternalAllocation,
    Float32Array,
    TokenLogprobs,
)
from baton.engine.scheduler.sequences.config import Preemption, ReturnCost
from baton.engine.scheduler.sequences.sequence import FinishReason, KvSource, Purpose
from baton.errors import BatonError
from baton.models.encoder_input import EncoderInput
from baton.models.image_format import ImageFormat
from baton.models.pooling import Pooling
from baton.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a loaded model.

    Attributes:
        pooling: its pooled output; None: it generates.
        images: the images that it takes in prompts; None: it takes none.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    fingerprint: bytes
    namespace: PrefixNamespace
    pooling: Pooling | None = None
    images: ImageFormat | None = None


@dataclass(frozen=True, slots=True)
class MultimodalPrompt:
    """Prompt with images.

    Attributes:
        token_ids: with a placeholder for each token of an image.
        encoder_inputs: the images, in the order of their spans, which do not overlap.
    """

    token_ids: SequenceOf[int]
    encoder_inputs: tuple[EncoderInput, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """Request to an engine.

    Attributes:
        token_ids: the prompt and any output generated so far.
        num_prompt_tokens: length of the prompt in `token_ids`.
        purpose: `PREFILL` ends after one token and keeps its blocks until `release`.
        kv_source: `EXTERNAL` allocates blocks and waits for `commit_external`.
        num_external_tokens: leading tokens whose KV is external, whole blocks and fewer than all;
            the rest is computed here. 0: all of them.
        salt, adapter: sequences share prefixes only if both are equal.
        block_hashes: the chain hashes of the leading blocks, if already computed.
        sequence_index: index of the first sequence; more follow it if `params` ask for several.
        outputs: for several resumed sequences that are not ranked, the output tokens of each after
            `token_ids`, their prompt, by index; None for a sequence that has ended, which gets no
            tokens or updates. Empty: nothing to resume.
        priority: smaller is served first under the policy of that name.
        arrival_time, first_token_deadline: seconds on one monotonic clock, for the policy
            `deadline`; None: no deadline.
        return_cost: cost at which a preemption may return the request to the router: its last
            update says `RETURNED`. Only for a single sequence with external KV. None: it may not.
        is_pooled: it ends with the pooled output of its prompt (`baton.engine.pooling`).
        encoder_inputs: images of the prompt, in the order of their spans. Their content hashes are
            believed: one that stands for two contents gives one of them the other's KV.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    num_prompt_tokens: int
    purpose: Purpose = Purpose.GENERATE
    kv_source: KvSource = KvSource.LOCAL
    num_external_tokens: int = 0
    salt: bytes = b""
    adapter: bytes = b""
    block_hashes: tuple[BlockHash, ...] = ()
    sequence_index: int = 0
    outputs: tuple[tuple[int, ...] | None, ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    first_token_deadline: float | None = None
    return_cost: ReturnCost | None = None
    is_pooled: bool = False
    encoder_inputs: tuple[EncoderInput, ...] = ()

    @property
    def unfinished(self) -> tuple[tuple[int, ...], ...]:
        """Output tokens so far, after `token_ids`, of each sequence that is to be generated."""
        if not self.outputs:
            return ((),) * self.params.num_sequences
        return tuple(output for output in self.outputs if output is not None)


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
    cache_events: CacheEvents
    made_progress: bool
    times: StepTimes
    preempted: tuple[tuple[str, Preemption], ...] = ()
    failed: Mapping[str, BatonError] = field(default_factory=dict)
    held_outputs: tuple[HeldOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """Finished continuation of a prompt.

    Attributes:
        text: the new tokens as text; None if all prompts were token ids and no tokenizer is loaded.
        logprobs: one per token, if requested; else empty.
        score: score of a beam.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """Continuations of a prompt: `n` of them, the best first where they were ranked.

    Attributes:
        prompt_logprobs: from the second prompt token on, if requested.
    """

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first continuation; the properties below are its as well."""
        return self.completions[0].token_ids

    @property
    def text(self) -> str | None:
        return self.completions[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(logprobs.logprob for logprobs in self.completions[0].logprobs)
