"""Requests and their sequences: token streams that fork, share blocks and finish. Knows no clock.

A request begins as one sequence. With several (`n`, `best_of`, beams) it forks when the prompt is
computed, and its sequences share the prompt's blocks. Samples with given `outputs` resume: the
prompt is computed but for its last token, then each sequence computes the rest for itself.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile

import numpy as np

from baton.cluster.prefix import BlockHash
from baton.engine.scheduler.sequences.batch_slots import BatchSlots, TokenArray
from baton.engine.scheduler.sequences.beam import BeamSearch
from baton.engine.scheduler.sequences.config import ReturnCost
from baton.models.encoder_input import EncoderInput
from baton.sampling import SamplingParams

# Added to the draft allowance per token without drafts: one draft in 8 tokens if all are rejected.
DRAFT_RECOVERY_RATE = 0.125
MAX_DRAFT_LIMIT = 64.0


class SequenceStatus(Enum):
    """Status of a sequence.

    `AWAITING_KV`: blocks allocated, another worker fills them. `SWAPPED`: its KV is in host memory.
    `KEPT`: it computes nothing any more, its blocks are held until released.
    """

    WAITING = auto()
    AWAITING_KV = auto()
    RUNNING = auto()
    SWAPPED = auto()
    KEPT = auto()
    FINISHED = auto()


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


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Request of one caller.

    Attributes:
        token_ids: the prompt, and any output generated so far.
        num_prompt_tokens: length of the prompt in `token_ids`; `max_tokens` counts from here.
        num_external_tokens: leading tokens with KV from elsewhere if `kv_source` is external; 0:
            all.
        root: root of the hash chain (namespace and salt).
        block_hashes: chain hashes of the leading blocks, if already computed.
        sequence_index: index of the first sequence; random numbers depend on it.
        outputs: for several resumed sequences, the output tokens of each, by index, until they
            fork; None for a sequence that has ended and is left out. Empty: nothing to resume.
        priority: smaller is served first under the policy of that name.
        first_token_deadline: when the first token is due, on the clock of `arrival_time`, seconds.
        speculates: drafts may be verified for it.
        return_cost: the cost at which a preemption may return the request to the router; only for a
            single sequence that arrives with external KV. None: it may not be returned.
        encoder_inputs: spans of the prompt that an encoder fills, such as images.
        grammar: opaque grammar that restricts its tokens; the runner interprets it.
        sequences: the unfinished sequences; beams in the order of their scores.
        rank, arrival: scheduling rank and order of arrival, set when the request is added.
        num_unforked: sequences that will yet fork from the first.
        num_promised_slots: batch slots kept free for its forks to come, while it has a slot.
    """

    request_id: str
    token_ids: SequenceOf[int]
    num_prompt_tokens: int
    params: SamplingParams
    root: BlockHash
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    kv_source: KvSource = KvSource.LOCAL
    num_external_tokens: int = 0
    purpose: Purpose = Purpose.GENERATE
    block_hashes: tuple[BlockHash, ...] = ()
    sequence_index: int = 0
    outputs: tuple[tuple[int, ...] | None, ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    first_token_deadline: float | None = None
    speculates: bool = False
    return_cost: ReturnCost | None = None
    encoder_inputs: tuple[EncoderInput, ...] = ()
    grammar: object | None = None
    sequences: "list[Sequence]" = field(default_factory=list)
    rank: float = 0.0
    arrival: int = 0
    num_unforked: int = 0
    num_promised_slots: int = 0
    next_index: int = 0
    beams: BeamSearch | None = None

    def __post_init__(self) -> None:
        if self.return_cost is not None:
            assert self.kv_source is KvSource.EXTERNAL, "given back by who computed it"
            assert self.purpose is Purpose.GENERATE, "given back while others wait for its KV"
            assert self.params.num_sequences == 1, "given back by one sequence of several"
        if self.purpose is Purpose.GENERATE:
            self.num_unforked = self.params.num_sequences - self.outputs.count(None) - 1
        if self.params.beam_width and self.purpose is Purpose.GENERATE:
            self.beams = BeamSearch(
                width=self.params.beam_width,
                length_penalty=self.params.length_penalty,
                early_stopping=self.params.early_stopping,
                eos_token_ids=self.eos_token_ids | self.stop_token_ids,
                max_tokens=self.params.max_tokens,
            )
        if self.outputs:
            assert self.purpose is Purpose.GENERATE, "given outputs in a prefill"
            assert not self.params.is_ranked, "given only some of what would rank them"
            assert len(self.outputs) == self.params.n, "an output for each sequence, or for none"
            assert any(output is not None for output in self.outputs), "nothing is left to do"
        self.next_index = self.sequence_index

    @property
    def num_tokens(self) -> int:
        """Tokens that it arrives with."""
        return len(self.token_ids)

    @property
    def awaits_fork(self) -> bool:
        """True until its only sequence has forked into all that were requested."""
        return self.num_unforked > 0 or bool(self.outputs)

    @property
    def num_forks_to_come(self) -> int:
        """Most sequences that may yet fork. Beams that became fewer may become more again."""
        if self.beams is not None:
            return self.params.beam_width - len(self.sequences)
        return self.num_unforked

    @property
    def num_unpromised_slots(self) -> int:
        """Batch slots for forks to come that are not kept free yet."""
        return self.num_forks_to_come - self.num_promised_slots

    @property
    def leaves_last_token(self) -> bool:
        """True if its sequences now compute all but their last token, which a later step computes
        for all of them."""
        return self.steps_together or bool(self.outputs)

    @property
    def steps_together(self) -> bool:
        """True for forked beams, which compute their last tokens in one step or not at all."""
        return self.beams is not None and not self.num_unforked

    @property
    def is_handed_over(self) -> bool:
        """True for a prompt that another worker continues, unless its first token ends it."""
        return self.purpose is Purpose.PREFILL and self.length_limit > self.num_tokens + 1

    @property
    def length_limit(self) -> int:
        return self.num_prompt_tokens + self.params.max_tokens

    def reason_to_end(self, token_id: int, num_tokens: int) -> FinishReason | None:
        """Returns the finish reason if `token_id` as `num_tokens`-th ends a sequence, or None."""
        if token_id in self.eos_token_ids:
            return FinishReason.END_OF_SEQUENCE
        if token_id in self.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if num_tokens >= self.length_limit:
            return FinishReason.LENGTH
        return FinishReason.PREFILLED if self.purpose is Purpose.PREFILL else None


@dataclass(slots=True, eq=False)
class Sequence:
    """Token stream of a request, and the progress of its KV.

    While it has a batch slot its tokens and counts are in the arrays of `BatchSlots`.

    Attributes:
        block_ids: per cache group, the blocks that hold its tokens in order; `NULL_BLOCK` for
            blocks that a sliding window has passed.
        block_hashes: the chain hashes of the leading full blocks, as far as known.
        num_committed_blocks: leading blocks that were committed to the prefix cache.
        num_cached_tokens: tokens found in the prefix cache when it was first scheduled.
        num_interruptions: times it lost its slot before its end: it was preempted, or its external
            KV did not come.
        shares_tail: its last block may have other holders: copy on write.
        num_reserved: per group, free blocks reserved for it beyond the blocks that it holds.
        host_block_ids: per group, the host blocks of its KV while it is swapped.
        drafts: draft tokens, to be verified in its next step.
        draft_limit: number of drafts worth verifying, learned from the last ones,
        drafted_at: `num_tokens` when it was learned.
        num_scored: leading prompt tokens whose log-probabilities were reported.
    """

    request: Request
    index: int
    tokens: TokenArray
    own_num_tokens: int
    own_num_computed: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    batch_slots: "BatchSlots[Sequence] | None" = None
    batch_slot: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_committed_blocks: int = 0
    num_cached_tokens: int | None = None
    num_interruptions: int = 0
    shares_tail: bool = False
    num_trimmed: list[int] = field(default_factory=list)
    num_reserved: list[int] | None = None
    host_block_ids: list[list[int]] = field(default_factory=list)
    drafts: TokenArray | None = None
    draft_limit: float = 2.0
    drafted_at: int = 0
    num_scored: int = 0

    def __post_init__(self) -> None:
        self.drafted_at = self.own_num_tokens

    @classmethod
    def first_of(cls, request: Request) -> "Sequence":
        """Returns the sequence that a request begins as: the first one that has not ended."""
        tokens = np.array(request.token_ids, np.int32)
        ended = takewhile(lambda output: output is None, request.outputs)
        index = request.sequence_index + sum(1 for _ in ended)
        sequence = cls(request, index, tokens, len(tokens))
        sequence.block_hashes = list(request.block_hashes)
        return sequence

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.index

    @property
    def encoder_id(self) -> str:
        """Holder id in the encoder cache, unique per sequence: one of a request's sequences may
        recompute the prompt while another ends."""
        return f"{self.index}.{self.request.request_id}"

    @property
    def num_tokens(self) -> int:
        return (
            self.own_num_tokens
            if self.batch_slots is None
            else int(self.batch_slots.num_tokens[self.batch_slot])
        )

    @num_tokens.setter
    def num_tokens(self, value: int) -> None:
        if self.batch_slots is None:
            self.own_num_tokens = value
        else:
            self.batch_slots.num_tokens[self.batch_slot] = value

    @property
    def num_computed_tokens(self) -> int:
        """KV of [0, this) is in the blocks."""
        if self.batch_slots is None:
            return self.own_num_computed
        return int(self.batch_slots.num_computed[self.batch_slot])

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if self.batch_slots is None:
            self.own_num_computed = value
        else:
            self.batch_slots.num_computed[self.batch_slot] = value

    @property
    def token_ids(self) -> TokenArray:
        """A view of its tokens, valid until it acquires or releases a slot."""
        return self.tokens[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def is_plain(self) -> bool:
        """True if its next step only chooses one token: no beams, drafts or shared tail."""
        return self.request.beams is None and self.drafts is None and not self.shares_tail

    @property
    def awaits_encoder(self) -> bool:
        """True until the last token that an encoder fills is computed."""
        inputs = self.request.encoder_inputs
        return bool(inputs) and inputs[-1].end > self.num_computed_tokens

    @property
    def num_drafts_allowed(self) -> int:
        """Number of drafts worth verifying now; it grows with the tokens since the last drafts."""
        num_since = self.num_tokens - self.drafted_at
        return int(self.draft_limit + DRAFT_RECOVERY_RATE * num_since)

    def learn_from_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Sets the draft allowance: twice `num_drafts` if all were accepted, `num_accepted` + 1 if
        some were, half of `num_drafts` if none; below one, drafts come only every few tokens."""
        if num_accepted == num_drafts:
            self.draft_limit = min(2.0 * num_drafts, MAX_DRAFT_LIMIT)
        elif num_accepted:
            self.draft_limit = num_accepted + 1.0
        else:
            self.draft_limit = num_drafts / 2
        self.drafted_at = self.num_tokens

    def acquire_slot(self, batch_slots: "BatchSlots[Sequence]") -> None:
        """Takes a free slot and copies its state to the slot's row."""
        batch_slot = batch_slots.acquire()
        batch_slots.token_ids[batch_slot, : self.own_num_tokens] = self.tokens[
            : self.own_num_tokens
        ]
        batch_slots.num_tokens[batch_slot] = self.own_num_tokens
        batch_slots.num_computed[batch_slot] = self.own_num_computed
        batch_slots.length_limit[batch_slot] = self.request.length_limit
        batch_slots.sequence_index[batch_slot] = self.index
        batch_slots.rank[batch_slot] = self.request.rank
        batch_slots.owners[batch_slot] = self
        self.batch_slots, self.batch_slot, self.tokens = (
            batch_slots,
            batch_slot,
            batch_slots.token_ids[batch_slot],
        )

    def release_slot(self) -> None:
        """Releases its slot, clears the slot's block tables and takes its tokens along."""
        batch_slots = self.batch_slots
        assert batch_slots is not None, "leave() without a slot"
        num_tokens, num_computed = self.num_tokens, self.num_computed_tokens
        self.tokens = self.tokens[:num_tokens].copy()
        self.batch_slots, self.own_num_tokens, self.own_num_computed = (
            None,
            num_tokens,
            num_computed,
        )
        batch_slots.release(self.batch_slot, batch_slots.block_tables[0].shape[1])

    def extend(self, token_ids: SequenceOf[int]) -> None:
        """Appends tokens that were chosen elsewhere and did not end the sequence. It has a slot."""
        begin, end = self.num_tokens, self.num_tokens + len(token_ids)
        self.tokens[begin:end] = token_ids
        self.num_tokens = self.drafted_at = end

    def append(self, token_id: int) -> None:
        """Appends a chosen token and sets `finish_reason` if the sequence ends with it."""
        num_tokens = self.num_tokens
        if self.batch_slots is None and num_tokens == len(self.tokens):
            self.tokens = np.append(self.tokens, np.int32(0))
        self.tokens[num_tokens] = token_id
        self.num_tokens = num_tokens + 1
        self.finish_reason = self.request.reason_to_end(token_id, num_tokens + 1)
