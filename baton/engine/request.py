"""Request to an engine, and the reasons for which its sequences finish. Plain data."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum, auto

from baton.cluster.prefix import BlockHash
from baton.models.images.encoder_input import EncoderInput
from baton.sampling import SamplingParams


class FinishReason(Enum):
    """Finish reason of a sequence. `END_OF_SEQUENCE`: an end-of-sequence token, or its grammar is
    complete. `STOP_STRING`: its text has a stop string, which the router found. `PREFILLED`: only
    its first token was requested. `SUSPENDED`: it resumes on another worker, with its KV.
    `RETURNED`: it was preempted and returned to the router. `FAILED`: its grammar allows no further
    token."""

    END_OF_SEQUENCE = auto()
    STOP_TOKEN = auto()
    STOP_STRING = auto()
    LENGTH = auto()
    PREFILLED = auto()
    SUSPENDED = auto()
    RETURNED = auto()
    ABORTED = auto()
    FAILED = auto()


class KvSource(Enum):
    """Source of the KV of the tokens that a sequence arrives with."""

    LOCAL = auto()
    EXTERNAL = auto()


class Purpose(Enum):
    """Purpose of a request. `PREFILL` ends after one token and keeps its blocks until released."""

    GENERATE = auto()
    PREFILL = auto()


@dataclass(frozen=True, slots=True)
class ReturnCost:
    """Cost of resuming a request on another worker, in seconds; the router estimates it.

    Attributes:
        fixed: with the tokens that the request arrived with.
        per_token: for each token generated since.
        recompute_token: to recompute one of its tokens here instead.
    """

    fixed: float
    per_token: float
    recompute_token: float

    def seconds(self, num_new_tokens: int) -> float:
        """Returns the cost after `num_new_tokens` tokens were generated here."""
        return self.fixed + num_new_tokens * self.per_token


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
        salt, adapter: sequences share prefixes only if both are equal, and compiled grammars only
            if the salt is.
        tenant: whose grammars take turns with those of others.
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
    tenant: str = ""
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
    def num_tokens(self) -> int:
        """Tokens that it arrives with."""
        return len(self.token_ids)

    @property
    def unfinished(self) -> tuple[tuple[int, ...], ...]:
        """Output tokens so far, after `token_ids`, of each sequence that is to be generated."""
        if not self.outputs:
            return ((),) * self.params.num_sequences
        return tuple(output for output in self.outputs if output is not None)


@dataclass(frozen=True, slots=True)
class MultimodalPrompt:
    """Prompt with images.

    Attributes:
        token_ids: with a placeholder for each token of an image.
        encoder_inputs: the images, in the order of their spans, which do not overlap.
    """

    token_ids: SequenceOf[int]
    encoder_inputs: tuple[EncoderInput, ...] = ()
