"""Step plan and step result: the data between scheduler and model runner. Plain and frozen.

Tokens and block tables are in the arrays of `BatchSlots`; a plan names rows, the range of each, and
the block moves that come before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from baton.engine.scheduler.kv.encoder_cache import EncoderOutput, EncoderStep
from baton.engine.scheduler.kv.memory_operations import BlockMove
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.config import Preemption
from baton.engine.scheduler.sequences.sequence import Sequence

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ScheduledRange:
    """Scheduled tokens [start, end) of one sequence that is not a plain decode.

    Attributes:
        num_drafts: number of draft tokens at the end of the range, to be verified.
        num_samples: sequences that take their first token from its last logits: 1, more when a
            request forks, 0 when the range ends before the last token.
        first_row: first of the plan's sampled rows that belongs to this range; drafts and the token
            before them have a row each.
        scored: positions of prompt tokens whose log-probabilities were requested and are given by
            the range's logits.
        encoder_outputs: those that fill some of its tokens.
    """

    sequence: Sequence
    start: int
    end: int
    num_drafts: int
    num_samples: int
    first_row: int
    scored: range = range(0)
    encoder_outputs: tuple[EncoderOutput, ...] = ()

    def num_accepted(self, token_ids: npt.NDArray[np.int64]) -> int:
        """Returns how many of its drafts are the tokens that the step chose, `[num_rows]`."""
        drafts = self.sequence.tokens[self.end - self.num_drafts : self.end]
        differs = drafts != token_ids[self.first_row : self.first_row + self.num_drafts]
        return int(differs.argmax()) if differs.any() else self.num_drafts


@dataclass(frozen=True, slots=True)
class ExternalAllocation:
    """Blocks for a sequence whose KV comes from elsewhere, one table per cache group.

    The first `num_hit_blocks` of each hold it already, as far as a window reaches back;
    `NULL_BLOCK` where nothing is needed. No tables: the sequence awaits no KV any more.
    """

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    num_hit_blocks: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one step: sequences for the runner to compute and to forget. Valid until `apply`.

    The batch is flat: the tokens of the plain decodes, one each, then those of `chunks` in order.

    Attributes:
        decode_slots: `[num_decodes]`, the slots that advance by one token.
        decode_starts: `[num_decodes]`, the position of that token.
        previous_rows: `[num_unknown]`, for the first decodes of a step that is planned ahead, the
            sampled row of the step before that chooses the token to compute; of the others it is
            in `BatchSlots`.
        made_progress: False if nothing was planned, preempted, resumed or answered: then only a
            command can change what the next step does.
        new_slots: sequences that acquired a slot since the last plan.
        released: sequences that ended or lost their slot since the last plan, each exactly once.
        sample_rows: `[num_rows]`, rows of the flat batch whose logits choose a token.
        sample_slots, sample_indices, sample_lengths: `[num_rows]`, the slot, the sequence index and
            the number of tokens before the chosen one.
        beam_rows, beam_slots, beam_lengths: `[num_beams]`, the same for rows that yield candidates.
        num_beam_candidates: candidates per such row.
        swap_out, copies, cleared, swap_in: block operations before the forward pass, in this order.
            Copies are (group, source, target), cleared are (group, block).
        encoder: encoder outputs to compute before the forward pass, and answers to encode jobs.
        preempted: request id and handling of the KV of each preempted sequence.
    """

    decode_slots: Int64Array
    decode_starts: Int64Array
    previous_rows: Int64Array
    chunks: tuple[ScheduledRange, ...]
    new_slots: tuple[Sequence, ...]
    released: tuple[tuple[str, int], ...]
    external: tuple[ExternalAllocation, ...]
    num_tokens: int
    made_progress: bool
    sample_rows: Int64Array
    sample_slots: Int64Array
    sample_indices: Int64Array
    sample_lengths: Int64Array
    beam_rows: Int64Array
    beam_slots: Int64Array
    beam_lengths: Int64Array
    num_beam_candidates: int
    swap_out: tuple[BlockMove, ...]
    copies: tuple[BlockMove, ...]
    cleared: tuple[tuple[int, int], ...]
    swap_in: tuple[BlockMove, ...]
    encoder: EncoderStep
    preempted: tuple[tuple[str, Preemption], ...] = ()

    @property
    def is_pure_decode(self) -> bool:
        """True if every sequence computes one token and samples."""
        return not self.chunks

    @property
    def samples_every_token(self) -> bool:
        """True if one token is chosen after each of the step, in order, and the encoder fills none:
        every sequence decodes, some with drafts. A CUDA graph can replay it."""
        return all(
            chunk.num_samples == 1
            and chunk.end - chunk.start == 1 + chunk.num_drafts
            and not chunk.scored
            and not chunk.encoder_outputs
            for chunk in self.chunks
        )

    @property
    def has_memory_operations(self) -> bool:
        return bool(self.copies or self.cleared or self.swap_in or self.swap_out)


class NotAhead(StrEnum):
    """Reason why no step is planned before the tokens of the one before it are known.

    `FORK`, `BEAMS`, `SPECULATION`: the next step depends on the tokens. `ENCODER`: an encoder input
    is due. `BLOCKS`: a sequence lacks blocks, so that another may be preempted. `BUDGET`: not
    all sequences fit the step, so that they are ordered by rank. `POLICY`: prompts come before
    decodes. `SUSPENSION`: a sequence is to be suspended between two steps. `FAILURE`: the step
    before has no result, or a sequence that it computes starts again. `GRAMMAR`: a sequence that it
    computes has no token yet. `NOTHING`: nothing is left to compute.
    """

    FORK = "fork"
    BEAMS = "beams"
    SPECULATION = "speculation"
    ENCODER = "encoder"
    BLOCKS = "blocks"
    BUDGET = "budget"
    POLICY = "policy"
    SUSPENSION = "suspension"
    FAILURE = "failure"
    GRAMMAR = "grammar"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities in nats at one position: of the token, and of the most likely ones."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Rows of a step whose logits are not finite: NaN, infinite, or -inf for every token.

    Attributes:
        rows, beam_rows: of the plan's sampled rows and rows of beams.
        ranges: by index of the plan's ranges with scores or pooled outputs that are not finite, the
            position of the first such token.
    """

    rows: frozenset[int] = frozenset()
    beam_rows: frozenset[int] = frozenset()
    ranges: Mapping[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.beam_rows or self.ranges)


ALL_FINITE = NonFinite()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step: the chosen tokens.

    Attributes:
        token_ids: `[num_rows]`, for the plan's sampled rows.
        logprobs: `[num_rows]` in nats, where a row's request asks for them.
        top_token_ids, top_logprobs: `[num_rows, k]`, where a row's request asks for them.
        beam_token_ids, beam_scores: `[num_beams, num_beam_candidates]`, most likely first; the
            log-probabilities after all processors.
        beam_logprobs: log-probabilities of the same candidates before all processors, if requested.
        endings: rows whose token ends a sequence because of its grammar: it is complete (None), or
            it allows no further token (the reason).
        late: rows without a token, since what it may be is not known yet: their last token is
            computed again.
        prompt_logprobs: per scored range of the plan, its prompt tokens' in order.
        pooled: by index of the plan's ranges, what they add to the pooled outputs, `[width]`.
        non_finite: rows from which no token was to be chosen.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32] | None = None
    top_token_ids: npt.NDArray[np.int64] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None
    beam_token_ids: npt.NDArray[np.int64] | None = None
    beam_scores: npt.NDArray[np.float32] | None = None
    beam_logprobs: npt.NDArray[np.float32] | None = None
    endings: dict[int, str | None] = field(default_factory=dict)
    late: frozenset[int] = frozenset()
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    pooled: Mapping[int, Float32Array] = field(default_factory=dict)
    non_finite: NonFinite = ALL_FINITE
