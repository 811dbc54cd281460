"""Progress of sequences in one step. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.engine.request import FinishReason
from baton.engine.scheduler.plan import Float32Array, TokenLogprobs
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class DecodeProgress:
    """Progress of the plain decodes of a step: one token each.

    Attributes:
        sequences: in the order of the arrays.
        rows: `[num_decodes]`, rows of the step's result.
        token_ids: `[num_decodes]`.
        num_tokens: `[num_decodes]`, tokens of each sequence, its new token included.
        reasons: of the sequences that finished with their token, by index of the arrays.
        failures: by index of the arrays, reasons why sequences `FAILED`.
    """

    sequences: list[Sequence]
    rows: Int64Array
    token_ids: npt.NDArray[np.int64]
    num_tokens: Int64Array
    reasons: Mapping[int, FinishReason]
    failures: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """Progress of one sequence that was not a plain decode.

    Attributes:
        index: index of the sequence in its request; of a finished beam, in the results.
        token_ids: new tokens, from output position `position` on.
        rows: rows of the step's result, one per token; empty where `logprobs` are given instead.
        num_computed_tokens: KV of [0, this) is in the blocks.
        block_ids: per cache group, of a sequence that is prefilled for another worker or suspended;
            else empty.
        score: score of a finished beam.
        failure: reason why it `FAILED`.
        prompt_logprobs: log-probabilities of the prompt tokens that this step scored.
        pooled: what the step adds to the pooled output; None: nothing.
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
    pooled: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Progress of all sequences in a step.

    `non_finite`: requests that it ended since their logits are not finite, with the position of the
    token that gave them.
    """

    decoded: DecodeProgress
    others: list[SequenceProgress]
    non_finite: Mapping[str, int] = field(default_factory=dict)
