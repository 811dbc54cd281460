"""One stream of tokens being generated. Knows nothing of blocks' content or of time."""

from dataclasses import dataclass, field
from enum import Enum, auto

from baton.cluster.prefix import BlockHash
from baton.sampling import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence stands. `AWAITING_KV`: blocks allocated, another worker fills them."""

    WAITING = auto()
    AWAITING_KV = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(Enum):
    """Why a sequence ended. `PREFILLED`: its first token was all that was asked for."""

    END_OF_SEQUENCE = auto()
    STOP_TOKEN = auto()
    LENGTH = auto()
    PREFILLED = auto()
    ABORTED = auto()


class KvSource(Enum):
    """Who computes the KV of the tokens that a sequence arrives with."""

    LOCAL = auto()
    EXTERNAL = auto()


class Purpose(Enum):
    """What a sequence is for. `PREFILL` ends after one token and keeps its blocks till released."""

    GENERATE = auto()
    PREFILL = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens and how far their KV is computed.

    Attributes:
        token_ids: prompt and output; grows as tokens are sampled.
        num_prompt_tokens: how many of them the caller calls prompt; `max_tokens` counts from here.
        num_computed_tokens: the leading tokens whose KV is in the pool: [0, num_computed_tokens).
        num_cached_tokens: of those, found in the prefix cache when it was first scheduled.
        block_ids: the blocks that hold [0, len(block_ids) * block_size), in order.
        block_hashes: the chain hashes of the leading full blocks, as far as known.
        num_committed_blocks: the leading blocks that are in the prefix cache's map.
        root: the chain's root (namespace and salt).
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    root: BlockHash
    kv_source: KvSource = KvSource.LOCAL
    purpose: Purpose = Purpose.GENERATE
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_committed_blocks: int = 0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """Adds a sampled token and decides whether the sequence ends with it."""
        self.token_ids.append(token_id)
        if token_id in self.eos_token_ids:
            self.finish_reason = FinishReason.END_OF_SEQUENCE
        elif token_id in self.stop_token_ids:
            self.finish_reason = FinishReason.STOP_TOKEN
        elif self.num_output_tokens >= self.params.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        elif self.purpose is Purpose.PREFILL:
            self.finish_reason = FinishReason.PREFILLED
