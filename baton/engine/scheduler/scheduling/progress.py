"""Progress of sequences in one step. Plain data."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.scheduler.scheduling.plan import TokenLogprobs
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.sequence import FinishReason, Request, Sequence


@dataclass(frozen=True, slots=True)
class DecodeProgress:
    """The plain decodes of a step: one token each.

    Attributes:
        sequences: in the order of the arrays; those that ended have a `finish_reason`.
        rows: of the step's result, `[num_decodes]`.
        token_ids: `[num_decodes]`.
        num_tokens: of each sequence, with its new token: `[num_decodes]`.
    """

    sequences: list[Sequence]
    rows: Int64Array
    token_ids: npt.NDArray[np.int64]
    num_tokens: Int64Array


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """Progress of one sequence that was not a plain decode.

    Attributes:
        index: of the sequence in its request; of a finished beam, its place.
        token_ids: new tokens, from output position `position` on.
        rows: of the step's result, one per token; empty where `logprobs` are given instead.
        num_computed_tokens: KV of [0, this) is in the blocks.
        block_ids: per cache group, of a sequence that is computed for somebody else or suspended;
            else empty.
        score: of a finished beam.
        failure: why it `FAILED`.
        prompt_logprobs: of the prompt tokens that this step scored.
    """

    request: Request
    index: int
    token_ids: tuple[int, ...]
    position: int
    finish_reason: FinishReason | None
    num_computed_tokens: int
    rows: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    block_ids: tuple[tuple[int, ...], ...] = ()
    score: float | None = None
    failure: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepProgress:
    """All that a step changed."""

    decoded: DecodeProgress
    others: list[SequenceProgress]
