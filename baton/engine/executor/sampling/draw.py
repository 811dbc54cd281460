"""Random sampling from scores: temperature, top-k, top-p, min-p, and inverse transform sampling.

Computed in float64 over the whole vocabulary, with a strict order of tokens, so that a row gets the
same token in any batch.
"""

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.executor.sampling.batch_state import MIN_P, TRUNCATION, Int64Array, Rows
from baton.engine.executor.sampling.random import uniform


def draw_by_torch(
    scores: torch.Tensor, rows: Rows, sequence_indices: Int64Array, positions: Int64Array
) -> torch.Tensor:
    """Calls `draw` with the uniform numbers of (seed, sequence index, position)."""
    numbers = uniform(rows.numbers["seed"], sequence_indices, positions)
    return draw(scores, rows, to_tensor(numbers, scores.device))


def draw(scores: torch.Tensor, rows: Rows, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws one token per row: `[num_rows]`. NaN scores still give some valid token.

    Args:
        scores: `[num_rows, vocab_size]`, float32; changed.
        uniforms: `[num_rows]`, float64 in [0, 1): the cumulative probability, in the order of the
            vocabulary, at which to take the token.
    """
    weights = _weights(scores, rows)
    cumulative = weights.cumsum(-1)
    # Scaled by the last sum, so that rounding can never point past the last token.
    targets = uniforms[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    # NaN scores choose no token; any valid id will do.
    return chosen.clamp_max(scores.shape[-1] - 1)


def _weights(scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Returns unnormalized probabilities, 0 for tokens that are cut off: float64
    `[num_rows, vocab_size]`. Changes `scores`."""
    temperature = to_tensor(rows.numbers["temperature"], scores.device)
    # Relative to the largest, so that even the smallest temperature gives no +inf.
    scores -= scores.amax(-1, keepdim=True)
    scores /= temperature.clamp_min_(torch.finfo(torch.float32).tiny)[:, None]
    weights = scores.softmax(-1, dtype=torch.float64)
    for at in _by_width(rows, scores.shape[-1]):
        truncated = _truncate(_take(weights, at), _take(scores, at), rows.take(at))
        weights = _put(weights, at, truncated)
    if (at := rows.that_use(MIN_P)).size:
        min_p = to_tensor(rows.numbers["min_p"][at], scores.device)[:, None]
        likely = _take(weights, at)
        is_tail = likely < min_p * likely.amax(-1, keepdim=True)
        weights = _put(weights, at, likely.masked_fill(is_tail, 0.0))
    return weights


def _by_width(rows: Rows, vocab_size: int) -> list[Int64Array]:
    """Returns the truncated rows in two parts: `top_k` up to `vocab_size` / 8, and the rest."""
    at = rows.that_use(TRUNCATION)
    is_few = rows.numbers["top_k"][at] <= vocab_size // 8
    return [part for part in (at[is_few], at[~is_few]) if part.size]


def _truncate(weights: torch.Tensor, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Keeps the `top_k` most likely tokens and, of those, the fewest whose sum is at least `top_p`
    of theirs; sets the rest to 0. Always keeps the most likely token."""
    numbers = rows.numbers
    width = int(numbers["top_k"].max())
    order = largest(scores, width)
    ranks = torch.arange(width, device=scores.device)
    top_k = to_tensor(numbers["top_k"], scores.device)[:, None]
    top_p = to_tensor(numbers["top_p"], scores.device)[:, None]
    ranked = weights.gather(-1, order).masked_fill_(ranks >= top_k, 0.0)
    cumulative = ranked.cumsum(-1)
    is_tail = (cumulative - ranked >= top_p * cumulative[:, -1:]) & (ranks > 0)
    return torch.zeros_like(weights).scatter_(-1, order, ranked.masked_fill_(is_tail, 0.0))


def _take(values: torch.Tensor, at: Int64Array) -> torch.Tensor:
    """Returns the rows `at`; the tensor itself if they are all rows."""
    return values if at.size == len(values) else values[to_tensor(at, values.device)]


def _put(values: torch.Tensor, at: Int64Array, rows: torch.Tensor) -> torch.Tensor:
    """Replaces the rows `at` of `values`, in place unless they are all rows."""
    if at.size == len(values):
        return rows
    return values.index_copy_(0, to_tensor(at, values.device), rows)


def largest(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Returns the ids of the `k` largest of each row, largest first, ties by id: `[num_rows, k]`.

    Sorts by float32 bits mapped to integers of opposite order, with the id in the low bits: no two
    keys are equal, so any sort gives the same order.
    """
    if k == 0:
        return torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    # Adding 0 makes a copy, and turns -0 into 0.
    bits = (scores + 0.0).view(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    keys = bits.bitwise_not_().long()
    keys <<= 32
    keys += torch.arange(scores.shape[-1], device=scores.device)
    if keys.is_cpu:
        # Ten times as fast as torch's sort on the CPU, and no slower than its topk.
        keys.numpy().sort(axis=-1)
    else:
        keys = keys.topk(k, largest=False).values
    return keys[:, :k] & 0xFFFFFFFF


def to_tensor(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copies an array to the device; it may be read-only, or a field of records."""
    return torch.from_numpy(np.array(values, order="C")).to(device)
