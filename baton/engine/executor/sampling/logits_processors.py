"""Logits processors: bias, penalties and bans, in the order and with the rules of transformers.

Each works in place, on only the rows that use it, and depends on only scores, parameters and token
history, so the result is the same after a preemption, on another worker and for drafts. Scores are
logits, or log-probabilities for beams.
"""

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.executor.sampling.batch_state import (
    BAD_TOKENS,
    BIAS,
    COUNTS,
    MIN_TOKENS,
    REPETITION,
    Int64Array,
    Rows,
    SamplingColumns,
)
from baton.engine.executor.sampling.draw import to_tensor

Int32Array = npt.NDArray[np.int32]

# Int32 `[num_rows, ceil(vocab_size / 32)]`; token i is allowed by bit `i % 32` of word `i // 32`.
Bitmask = Int32Array | torch.Tensor


def process(
    scores: torch.Tensor, rows: Rows, columns: SamplingColumns, history: Int32Array
) -> None:
    """Applies bias, repetition penalty, count penalties, bad tokens and minimum of tokens.

    Args:
        scores: `[num_rows, vocab_size]`, float32, contiguous; changed in place.
        rows: sampling parameters of each row of `scores`.
        history: `[num_batch_slots, capacity]`, the token ids of each slot.
    """
    uses = int(np.bitwise_or.reduce(rows.uses))
    if uses & BIAS:
        _add_bias(scores, rows, columns)
    if uses & REPETITION:
        _penalise_repetition(scores, rows, history)
    if uses & COUNTS:
        _penalise_counts(scores, rows, history)
    if uses & BAD_TOKENS:
        _ban_bad_tokens(scores, rows, columns, history)
    if uses & MIN_TOKENS:
        _ban_ends(scores, rows, columns)


def restrict(scores: torch.Tensor, at: Int64Array, bitmask: Bitmask) -> None:
    """Masks all tokens of the rows `at` that their grammar does not allow.

    If earlier processors have banned all allowed tokens, the grammar takes precedence, since a
    violation cannot be undone. As in transformers, the allowed ones are then equally likely.

    Args:
        scores: `[num_rows, vocab_size]`, float32; changed in place.
    """
    is_allowed = _unpack(bitmask, scores)
    index = to_tensor(at, scores.device)
    restricted = scores[index].masked_fill_(~is_allowed, -torch.inf)
    is_empty = restricted.amax(-1, keepdim=True) == -torch.inf
    scores[index] = restricted.masked_fill_(is_empty & is_allowed, 0.0)


def _unpack(bitmask: Bitmask, scores: torch.Tensor) -> torch.Tensor:
    """Returns bool `[num_rows, vocab_size]`, on the device of the scores."""
    if not isinstance(bitmask, torch.Tensor):
        bitmask = to_tensor(bitmask, scores.device)
    assert bitmask.dtype == torch.int32
    # As bytes: every machine that torch runs on is little-endian.
    octets = bitmask.to(scores.device).contiguous().view(torch.uint8)
    bits = torch.arange(8, dtype=torch.uint8, device=scores.device)
    return (octets[:, :, None] >> bits & 1).bool().flatten(1)[:, : scores.shape[-1]]


def _add_bias(scores: torch.Tensor, rows: Rows, columns: SamplingColumns) -> None:
    at = rows.that_use(BIAS)
    owners, records = columns.biases.gather(rows.batch_slots[at])
    where = (to_tensor(at[owners], scores.device), to_tensor(records["token_id"], scores.device))
    scores[where] += to_tensor(records["bias"], scores.device)


def _penalise_repetition(scores: torch.Tensor, rows: Rows, history: Int32Array) -> None:
    at = rows.that_use(REPETITION)
    selected = rows.take(at)
    cells, counts = _occurrences(scores, at, selected, np.zeros_like(selected.lengths), history)
    penalty = to_tensor(selected.numbers["repetition_penalty"], scores.device)[:, None]
    flat = scores.view(-1)
    old = flat[cells]
    new = torch.where(old < 0, old * penalty, old / penalty)
    flat[cells] = torch.where(counts > 0, new, old)


def _penalise_counts(scores: torch.Tensor, rows: Rows, history: Int32Array) -> None:
    """Applies presence and frequency penalties as OpenAI defines them: over the output only."""
    at = rows.that_use(COUNTS)
    selected = rows.take(at)
    begins = selected.numbers["num_prompt_tokens"]
    cells, counts = _occurrences(scores, at, selected, begins, history)
    frequency = to_tensor(selected.numbers["frequency_penalty"], scores.device)[:, None]
    presence = to_tensor(selected.numbers["presence_penalty"], scores.device)[:, None]
    flat = scores.view(-1)
    flat[cells] = flat[cells] - frequency * counts - presence * (counts > 0)


def _occurrences(
    scores: torch.Tensor, at: Int64Array, rows: Rows, begins: Int64Array, history: Int32Array
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cells in the flat scores of the tokens at positions [begin, length), and the
    count of each token there: both `[len(at), width]`.

    Padding, and tokens without a score, become token 0 with its own true count. So equal cells of a
    row have equal counts, and results may be written back in any order.
    """
    width = int((rows.lengths - begins).max())
    positions = begins[:, None] + np.arange(width)
    is_inside = positions < rows.lengths[:, None]
    tokens = history[rows.batch_slots[:, None], np.where(is_inside, positions, 0)].astype(np.int64)
    is_inside &= (tokens >= 0) & (tokens < scores.shape[-1])
    index = to_tensor(np.where(is_inside, tokens, 0), scores.device)
    counts = torch.zeros(len(at), scores.shape[-1], dtype=torch.int32, device=scores.device)
    counts.scatter_add_(1, index, to_tensor(is_inside.astype(np.int32), scores.device))
    return index + to_tensor(at, scores.device)[:, None] * scores.shape[-1], counts.gather(1, index)


def _ban_bad_tokens(
    scores: torch.Tensor, rows: Rows, columns: SamplingColumns, history: Int32Array
) -> None:
    """Bans the last token of each bad sequence if the history ends with its prefix."""
    at = rows.that_use(BAD_TOKENS)
    owners, records = columns.bad_tokens.gather(rows.batch_slots[at])
    batch_slots, lengths = rows.batch_slots[at[owners]][:, None], rows.lengths[at[owners]][:, None]
    distances = np.arange(records["prefix_length"].max(initial=0))
    ends = history[batch_slots, np.maximum(lengths - 1 - distances, 0)]
    is_equal = (ends == records["prefix"][:, : len(distances)]) & (distances < lengths)
    is_beyond = distances >= records["prefix_length"][:, None]
    is_hit = (is_equal | is_beyond).all(axis=1)
    _ban(scores, at[owners[is_hit]], records["token_id"][is_hit])


def _ban_ends(scores: torch.Tensor, rows: Rows, columns: SamplingColumns) -> None:
    at = rows.that_use(MIN_TOKENS)
    owners, records = columns.ends.gather(rows.batch_slots[at])
    _ban(scores, at[owners], records["token_id"])


def _ban(scores: torch.Tensor, rows: Int64Array, token_ids: Int64Array) -> None:
    scores[to_tensor(rows, scores.device), to_tensor(token_ids, scores.device)] = -torch.inf
