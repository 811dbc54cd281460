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
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose
from baton.engine.scheduler.sequences.batch_slots import BatchSlots, TokenArray
from baton.engine.scheduler.sequences.beam import BeamSearch

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


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Request in a scheduler: what its caller asked for, and how far it is.

    Attributes:
        spec: as its caller added it.
        root: root of the hash chain (namespace and salt).
        eos_token_ids: end a sequence; empty if the request ignores them.
        speculates: drafts may be verified for it.
        grammar: opaque grammar that restricts its tokens; the runner interprets it.
        kv_source: external until the KV has come, or will not.
        outputs: those of `spec` until its sequences have forked, then empty.
        sequences: the unfinished sequences; beams in the order of their scores.
        rank, arrival: scheduling rank and order of arrival, set when the request is added.
        num_unforked: sequences that will yet fork from the first.
        num_promised_slots: batch slots kept free for its forks to come, while it has a slot.
    """

    spec: EngineRequest
    root: BlockHash
    eos_token_ids: frozenset[int] = frozenset()
    speculates: bool = False
    grammar: object | None = None
    request_id: str = field(init=False)
    kv_source: KvSource = field(init=False)
    outputs: tuple[tuple[int, ...] | None, ...] = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    sequences: "list[Sequence]" = field(default_factory=list, init=False)
    rank: float = field(default=0.0, init=False)
    arrival: int = field(default=0, init=False)
    num_unforked: int = field(default=0, init=False)
    num_promised_slots: int = field(default=0, init=False)
    next_index: int = field(init=False)
    beams: BeamSearch | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        spec, params = self.spec, self.spec.params
        self.request_id = spec.request_id
        self.kv_source, self.outputs = spec.kv_source, spec.outputs
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.next_index = spec.sequence_index
        if spec.return_cost is not None:
            assert spec.kv_source is KvSource.EXTERNAL, "given back by who computed it"
            assert spec.purpose is Purpose.GENERATE, "given back while others wait for its KV"
            assert params.num_sequences == 1, "given back by one sequence of several"
        if spec.purpose is Purpose.GENERATE:
            self.num_unforked = params.num_sequences - spec.outputs.count(None) - 1
        if params.beam_width and spec.purpose is Purpose.GENERATE:
            self.beams = BeamSearch(
                width=params.beam_width,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                eos_token_ids=self.eos_token_ids | self.stop_token_ids,
                max_tokens=params.max_tokens,
            )
        if spec.outputs:
            assert spec.purpose is Purpose.GENERATE, "given outputs in a prefill"
            assert not params.is_ranked, "given only some of what would rank them"
            assert len(spec.outputs) == params.n, "an output for each sequence, or for none"
            assert any(output is not None for output in spec.outputs), "nothing is left to do"

    @property
    def awaits_fork(self) -> bool:
        """True until its only sequence has forked into all that were requested."""
        return self.num_unforked > 0 or bool(self.outputs)

    @property
    def num_forks_to_come(self) -> int:
        """Most sequences that may yet fork. Beams that became fewer may become more again."""
        if self.beams is not None:
            return self.spec.params.beam_width - len(self.sequences)
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
        return self.spec.purpose is Purpose.PREFILL and self.length_limit > self.spec.num_tokens + 1

    @property
    def length_limit(self) -> int:
        return self.spec.num_prompt_tokens + self.spec.params.max_tokens

    def reason_to_end(self, token_id: int, num_tokens: int) -> FinishReason | None:
        """Returns the finish reason if `token_id` as `num_tokens`-th ends a sequence, or None."""
        if token_id in self.eos_token_ids:
            return FinishReason.END_OF_SEQUENCE
        if token_id in self.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if num_tokens >= self.length_limit:
            return FinishReason.LENGTH
        return FinishReason.PREFILLED if self.spec.purpose is Purpose.PREFILL else None


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
        tokens = np.array(request.spec.token_ids, np.int32)
        ended = takewhile(lambda output: output is None, request.outputs)
        index = request.spec.sequence_index + sum(1 for _ in ended)
        sequence = cls(request, index, tokens, len(tokens))
        sequence.block_hashes = list(request.spec.block_hashes)
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
        return self.num_tokens - self.request.spec.num_prompt_tokens

    @property
    def is_plain(self) -> bool:
        """True if its next step only chooses one token: no beams, drafts or shared tail."""
        return self.request.beams is None and self.drafts is None and not self.shares_tail

    @property
    def awaits_encoder(self) -> bool:
        """True until the last token that an encoder fills is computed."""
        inputs = self.request.spec.encoder_inputs
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
