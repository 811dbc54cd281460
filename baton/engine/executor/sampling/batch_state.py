"""Batch state of sampling: the parameters of all batch slots as numpy columns.

Written when a sequence acquires a slot; a step gathers the rows of its batch. Independent of torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from baton.sampling import MAX_BAD_TOKEN_SEQUENCE_LENGTH, SamplingParams

Int64Array = npt.NDArray[np.int64]

# Features that a slot's parameters use beyond greedy sampling; the bits of `SamplingColumns.uses`.
RANDOM: Final = 1
TRUNCATION: Final = 2  # top-k or top-p
MIN_P: Final = 4
LOGPROBS: Final = 8
BIAS: Final = 16
REPETITION: Final = 32
COUNTS: Final = 64  # presence or frequency penalty
BAD_TOKENS: Final = 128
MIN_TOKENS: Final = 256
GRAMMAR: Final = 512  # set by a step that has a mask for the row
HISTORY: Final = REPETITION | COUNTS | BAD_TOKENS  # features that read the previous tokens
PROCESSING: Final = BIAS | REPETITION | COUNTS | BAD_TOKENS | MIN_TOKENS | GRAMMAR

_MAX_PREFIX: Final = MAX_BAD_TOKEN_SEQUENCE_LENGTH - 1
_NUMBERS = np.dtype(
    [
        ("num_prompt_tokens", np.int64),
        ("min_length", np.int64),  # tokens of prompt and output before an end may be chosen
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("num_top_logprobs", np.int64),
    ]
)
_TOKEN = np.dtype([("token_id", np.int64)])
_BIASED_TOKEN = np.dtype([("token_id", np.int64), ("bias", np.float32)])
# The last token of a bad sequence, and its prefix in reverse order.
_BAD_TOKENS = np.dtype(
    [
        ("token_id", np.int64),
        ("prefix_length", np.int64),
        ("prefix", np.int32, (_MAX_PREFIX,)),
    ]
)


class RaggedColumn:
    """Column with a list of records per slot, padded to the longest list so far."""

    def __init__(self, num_batch_slots: int, dtype: np.dtype[Any]) -> None:
        self._counts = np.zeros(num_batch_slots, np.int64)
        self._records = np.zeros((num_batch_slots, 0), dtype)

    def assign(self, batch_slot: int, records: Sequence[tuple[Any, ...]]) -> None:
        """Replaces the slot's list."""
        if len(records) > self._records.shape[1]:
            self._widen(2 * len(records))
        self._counts[batch_slot] = len(records)
        if records:
            self._records[batch_slot, : len(records)] = np.array(records, self._records.dtype)

    def gather(self, batch_slots: Int64Array) -> tuple[Int64Array, npt.NDArray[Any]]:
        """Returns all records of `batch_slots`, as (their indices into `batch_slots`, records)."""
        counts = self._counts[batch_slots]
        rows, slots = np.nonzero(np.arange(counts.max(initial=0)) < counts[:, None])
        return rows, self._records[batch_slots[rows], slots]

    def _widen(self, width: int) -> None:
        # Zeros take no memory until they are written, so only slots in use are copied.
        wider = np.zeros((len(self._counts), width), self._records.dtype)
        used = np.flatnonzero(self._counts)
        wider[used, : self._records.shape[1]] = self._records[used]
        self._records = wider


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of scores with the sampling parameters of their slots; a slot may have several rows.

    Attributes:
        batch_slots: `[num_rows]`.
        lengths: `[num_rows]`, tokens before the one to choose, prompt included.
        uses: `[num_rows]`, the feature bits above.
        numbers: `[num_rows]`, one field for each scalar parameter.
    """

    batch_slots: Int64Array
    lengths: Int64Array
    uses: npt.NDArray[np.uint16]
    numbers: npt.NDArray[Any]

    def that_use(self, uses: int) -> Int64Array:
        """Returns the indices of the rows that use any of the features `uses`."""
        return np.flatnonzero(self.uses & uses)

    def take(self, indices: Int64Array) -> "Rows":
        return Rows(
            self.batch_slots[indices],
            self.lengths[indices],
            self.uses[indices],
            self.numbers[indices],
        )


class SamplingColumns:
    """Sampling parameters, one row per slot. `uses` is 0 for plain greedy sampling.

    Ignores token ids outside the vocabulary, which have no logit.
    """

    def __init__(
        self, num_batch_slots: int, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._numbers = np.zeros(num_batch_slots, _NUMBERS)
        self.uses = np.zeros(num_batch_slots, np.uint16)
        self.biases = RaggedColumn(num_batch_slots, _BIASED_TOKEN)
        self.bad_tokens = RaggedColumn(num_batch_slots, _BAD_TOKENS)
        self.ends = RaggedColumn(num_batch_slots, _TOKEN)

    def assign(self, batch_slot: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Replaces the parameters of the slot."""
        self.uses[batch_slot] = self._uses(params)
        self._numbers[batch_slot] = (
            num_prompt_tokens,
            num_prompt_tokens + params.min_tokens,
            params.temperature or 0.0,
            min(params.top_k or self._vocab_size, self._vocab_size),
            params.top_p or 1.0,
            params.min_p or 0.0,
            params.seed or 0,
            params.repetition_penalty or 1.0,
            params.presence_penalty,
            params.frequency_penalty,
            params.top_logprobs,
        )
        self.biases.assign(batch_slot, [pair for pair in params.logit_bias if self._has(pair[0])])
        self.bad_tokens.assign(batch_slot, self._bad_tokens(params.bad_token_ids))
        ends = self._eos_token_ids.union(params.stop_token_ids) if params.min_tokens else ()
        self.ends.assign(batch_slot, [(token_id,) for token_id in ends if self._has(token_id)])

    def rows(
        self, batch_slots: Int64Array, lengths: Int64Array, uses: npt.NDArray[np.uint16]
    ) -> Rows:
        """Returns the rows of these slots. Clears MIN_TOKENS in `uses` for rows that have reached
        their minimum length."""
        numbers = self._numbers[batch_slots]
        uses[lengths >= numbers["min_length"]] &= ~np.uint16(MIN_TOKENS)
        return Rows(batch_slots, lengths, uses, numbers)

    def _uses(self, params: SamplingParams) -> int:
        is_random = not params.is_greedy
        top_k, top_p = params.top_k or 0, params.top_p or 1.0
        is_truncated = 0 < top_k < self._vocab_size or top_p < 1.0
        has_count_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        return (
            RANDOM * is_random
            | TRUNCATION * (is_random and is_truncated)
            | MIN_P * (is_random and bool(params.min_p))
            | LOGPROBS * params.logprobs
            | BIAS * bool(params.logit_bias)
            | REPETITION * (params.repetition_penalty not in (None, 1.0))
            | COUNTS * has_count_penalty
            | BAD_TOKENS * bool(params.bad_token_ids)
            | MIN_TOKENS * (params.min_tokens > 0)
        )

    def _bad_tokens(self, sequences: tuple[tuple[int, ...], ...]) -> list[tuple[Any, ...]]:
        records: list[tuple[Any, ...]] = []
        for token_ids in sequences:
            *prefix, last = token_ids
            # As in transformers, an end-of-sequence token alone is no bad word.
            if all(map(self._has, token_ids)) and (prefix or last not in self._eos_token_ids):
                padding = (0,) * (_MAX_PREFIX - len(prefix))
                records.append((last, len(prefix), (*reversed(prefix), *padding)))
        return records

    def _has(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size
