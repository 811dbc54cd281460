"""Step plan and step result: the data between scheduler and model runner. Plain and frozen.

Tokens and block tables are in the arrays of `BatchSlots`; a plan names rows, the range of each, and
the block moves that come before.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.engine.scheduler.kv.encoder_cache import EncoderStep
from baton.engine.scheduler.kv.memory_operations import BlockMove
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.config import Preemption

if TYPE_CHECKING:
    from baton.engine.scheduler.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledRange:
    """The tokens [start, end) of one sequence that is not a plain decode.

    Attributes:
        num_drafts: the last tokens of the span are guesses, to be verified.
        num_samples: sequences that take their first token from its last logits: 1, more when a
            request forks, 0 when the span ends before the last token.
        first_row: of the plan's sampled rows, the first that is this span's; drafts and the token
            before them have a row each.
        scored: positions of prompt tokens whose log-probabilities the span's logits give and
            somebody wants.
    """

    sequence: "Sequence"
    start: int
    end: int
    num_drafts: int
    num_samples: int
    first_row: int
    scored: range = range(0)


@dataclass(frozen=True, slots=True)
class ExternalAllocation:
    """Blocks for a sequence whose KV comes from elsewhere, one table per cache group.

    The first `num_hit_blocks` of each hold it already, as far as a window reaches back;
    `NULL_BLOCK` stands where nothing is needed. No tables at all: nothing is awaited any more.
    """

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    num_hit_blocks: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what the runner shall compute, and what it can forget. Valid until `apply`.

    The batch is flat: the tokens of the plain decodes, one each, then those of `spans` in order.

    Attributes:
        decode_slots: `[num_decodes]`, the slots that advance by one token.
        decode_starts: `[num_decodes]`, the position of that token.
        made_progress: whether the next step could do more than this one; if nothing was planned
            and nobody moved, only a command can change that.
        new_slots: sequences that acquired a slot since the last plan.
        forgotten: sequences that ended or left since the last plan, each exactly once.
        sample_rows: `[num_rows]`, of the flat batch, whose logits choose a token.
        sample_slots, sample_indices, sample_lengths: `[num_rows]`, the slot, the sequence index
            and the number of tokens before the chosen one.
        beam_rows, beam_slots, beam_lengths: `[num_beams]`, the same for rows that yield
            candidates.
        num_beam_candidates: per such row.
        swap_out, copies, cleared, swap_in: to be done to the pools first, in this order. Copies
            are (group, source, target), cleared are (group, block).
        encoder: what the encoder shall forget and compute before the forward pass.
        preempted: for each sequence that had to make room its request, and what became of its KV.
    """

    decode_slots: Int64Array
    decode_starts: Int64Array
    spans: tuple[ScheduledRange, ...]
    new_slots: "tuple[Sequence, ...]"
    forgotten: tuple[tuple[str, int], ...]
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
        """Every sequence computes one token and samples: what a captured graph can replay."""
        return not self.spans

    @property
    def has_memory_operations(self) -> bool:
        return bool(self.copies or self.cleared or self.swap_in or self.swap_out)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities in nats at one position: the token's, and the most likely ones'."""

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step: the chosen tokens.

    Attributes:
        token_ids: `[num_rows]`, for the plan's sampled rows.
        logprobs: `[num_rows]` in nats, where a row asked.
        top_token_ids, top_logprobs: `[num_rows, k]`, where a row asked.
        beam_token_ids, beam_scores: `[num_beams, num_beam_candidates]`, most likely first; the
            log-probabilities after all processors.
        beam_logprobs: the untouched log-probabilities of the same candidates, if wanted.
        endings: rows with whose token a sequence ends, whatever the token is: its grammar is
            matched to its end (None), or cannot go on (why).
        prompt_logprobs: per span of the plan that is scored, its prompt tokens' in order.
    """

    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32] | None = None
    top_token_ids: npt.NDArray[np.int64] | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None
    beam_token_ids: npt.NDArray[np.int64] | None = None
    beam_scores: npt.NDArray[np.float32] | None = None
    beam_logprobs: npt.NDArray[np.float32] | None = None
    endings: dict[int, str | None] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
