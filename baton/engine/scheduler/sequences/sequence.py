"""A request and the streams of tokens that continue it. Knows nothing of blocks' content or time.

A request begins as one sequence. Those with several (`n`, `best_of`, beams) fork when the prompt is
computed, and from then on share its blocks. Of samples that were begun elsewhere each may go on
behind what it has come to: then the prompt is computed but for its last token, and each sequence
computes the rest for itself.
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
from baton.engine.scheduler.sequences.encoder_inputs import EncoderInput
from baton.sampling import SamplingParams

# What a token without drafts adds to the allowance: one in eight is tried when none are right.
DRAFT_PATIENCE = 0.125
MAX_DRAFT_ALLOWANCE = 64.0


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
    """Reason for which a sequence ended. `END_OF_SEQUENCE`: with such a token, or its grammar was
    matched to its end. `PREFILLED`: only its first token was requested. `SUSPENDED`: it resumes
    elsewhere, with its KV. `RETURNED`: it was preempted and given back to the router. `FAILED`: its
    grammar allows no further token."""

    END_OF_SEQUENCE = auto()
    STOP_TOKEN = auto()
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
        num_prompt_tokens: how many of them are the prompt; `max_tokens` counts from here.
        num_external_tokens: of how many KV comes from elsewhere if it is external; 0: of all.
        root: the chain's root (namespace and salt).
        block_hashes: the chain hashes of the leading blocks, if somebody has made them already.
        sequence_index: of the first sequence; random numbers depend on it.
        outputs: until they fork, what each of several sequences has come to already, in the order
            of their indices; None for one that has ended and is left out. Empty: they begin.
        priority: smaller is served first under the policy of that name.
        first_token_deadline: when the first token is due, on the clock of `arrival_time`, seconds.
        speculates: drafts may be verified for it.
        return_cost: it may be given back instead of making room here, at this cost; for one
            sequence alone, which arrives with KV from elsewhere. None: it may not.
        encoder_inputs: spans of the prompt that an encoder fills, such as images.
        grammar: what restricts its tokens; the runner knows what it is.
        sequences: those that have not ended, beams in the order of their scores.
        rank, arrival: its place in the policy's order and among all, given when it is added.
        num_unforked: sequences that will yet fork from the first.
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
            assert self.purpose is Purpose.GENERATE, "given outputs that nobody goes on with"
            assert not self.params.is_ranked, "given only some of what would rank them"
            assert len(self.outputs) == self.params.n, "an output for each sequence, or for none"
            assert any(output is not None for output in self.outputs), "nothing is left to do"
        self.next_index = self.sequence_index

    @property
    def awaits_fork(self) -> bool:
        """Its only sequence is yet to become those that were asked for."""
        return self.num_unforked > 0 or bool(self.outputs)

    @property
    def leaves_last_token(self) -> bool:
        """Its sequences, as they are now, are computed but for their last token; what comes then is
        another step's business."""
        return self.steps_together or bool(self.outputs)

    @property
    def steps_together(self) -> bool:
        """Its sequences are beams, which compute their last tokens in one step or not at all."""
        return self.beams is not None and not self.num_unforked

    @property
    def length_limit(self) -> int:
        return self.num_prompt_tokens + self.params.max_tokens

    def reason_to_end(self, token_id: int, num_tokens: int) -> FinishReason | None:
        """Why a sequence ends with this token as its `num_tokens`-th, or None."""
        if token_id in self.eos_token_ids:
            return FinishReason.END_OF_SEQUENCE
        if token_id in self.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if num_tokens >= self.length_limit:
            return FinishReason.LENGTH
        return FinishReason.PREFILLED if self.purpose is Purpose.PREFILL else None


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens and how far its KV is computed.

    While it has a slot its tokens and counts are in the columns there; else they are its own.

    Attributes:
        block_ids: per cache group, the blocks that hold its tokens in order; `NULL_BLOCK` where a
            window has passed.
        block_hashes: the chain hashes of the leading full blocks, as far as known.
        num_committed_blocks: the leading blocks that were offered to the prefix cache.
        num_cached_tokens: found in the prefix cache when it was first scheduled.
        shares_tail: its last block may have other holders, so it is copied before it is written.
        num_reserved: per group, blocks that nobody else may take, beyond those it holds.
        host_block_ids: per group, where its KV is while it is swapped.
        drafts: tokens that may follow, to be verified in its next step.
        draft_allowance: how many drafts were worth verifying, by what became of the last ones,
        allowed_at: when it had so many tokens.
        num_scored: leading prompt tokens whose log-probabilities were reported.
    """

    request: Request
    index: int
    tokens: TokenArray
    own_num_tokens: int
    own_num_computed: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    batch_slots: BatchSlots | None = None
    batch_slot: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    num_committed_blocks: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    shares_tail: bool = False
    num_trimmed: list[int] = field(default_factory=list)
    num_reserved: list[int] | None = None
    host_block_ids: list[list[int]] = field(default_factory=list)
    drafts: TokenArray | None = None
    draft_allowance: float = 2.0
    allowed_at: int = 0
    num_scored: int = 0

    def __post_init__(self) -> None:
        self.allowed_at = self.own_num_tokens

    @classmethod
    def first_of(cls, request: Request) -> "Sequence":
        """The sequence a request begins as: the first one that has not ended."""
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
        """Who holds its encoder inputs: one of a request's sequences may compute the prompt again
        while another ends."""
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
        """A view of its tokens, valid until it moves."""
        return self.tokens[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    @property
    def is_plain(self) -> bool:
        """Nothing but its own next token is to be decided when it decodes."""
        request = self.request
        is_simple = request.beams is None and request.grammar is None
        return is_simple and self.drafts is None and not self.shares_tail

    @property
    def num_drafts_allowed(self) -> int:
        """How many drafts are worth verifying now; the longer there were none, the more."""
        num_since = self.num_tokens - self.allowed_at
        return int(self.draft_allowance + DRAFT_PATIENCE * num_since)

    def learn_from_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Twice as many drafts after all were right, one more than were right after some, half
        after none; below one, only every few tokens."""
        if num_accepted == num_drafts:
            self.draft_allowance = min(2.0 * num_drafts, MAX_DRAFT_ALLOWANCE)
        elif num_accepted:
            self.draft_allowance = num_accepted + 1.0
        else:
            self.draft_allowance = num_drafts / 2
        self.allowed_at = self.num_tokens

    def acquire_slot(self, batch_slots: BatchSlots) -> None:
        """Takes a free slot."""
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
        """Gives its slot back and takes its tokens along. Its tables have been emptied."""
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
        """Goes on behind tokens that were chosen elsewhere, with which it did not end. It has a
        slot."""
        begin, end = self.num_tokens, self.num_tokens + len(token_ids)
        self.tokens[begin:end] = token_ids
        self.num_tokens = self.allowed_at = end

    def append(self, token_id: int) -> None:
        """Adds a chosen token and decides whether the sequence ends with it."""
        num_tokens = self.num_tokens
        if self.batch_slots is None and num_tokens == len(self.tokens):
            self.tokens = np.append(self.tokens, np.int32(0))
        self.tokens[num_tokens] = token_id
        self.num_tokens = num_tokens + 1
        self.finish_reason = self.request.reason_to_end(token_id, num_tokens + 1)
