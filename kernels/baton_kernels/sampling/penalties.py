"""Repetition, presence and frequency penalties for tokens of the history, in place.

The kernels touch only tokens of the history. They count them into a scratch of the size of the
scores, which is zero before and after: the first thread that takes a token's count resets it and
applies the token's penalties, once. As in the CPU sampler, biases come before and bans after
(`token_rules`).
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from baton_kernels.launch import check_dtype, check_packed, check_shape
from baton_kernels.variant import Variant

# So that float32 scores are bitwise those of the CPU sampler.
FP_FUSION: Final = False
_BLOCK: Final = 1024
_NUM_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class History:
    """Token history of each row, before the token to choose, on the device.

    Attributes:
        token_ids: int32 `[num_batch_slots, capacity]`.
        batch_slots: int64 `[num_rows]`; `token_ids[batch_slots[r], :lengths[r]]` is the history of
            row r.
        lengths: int64 `[num_rows]`, prompt included.
        num_prompt_tokens: int64 `[num_rows]`, length of the prompt.
        longest: maximum of the lengths, or an upper bound.
    """

    token_ids: torch.Tensor
    batch_slots: torch.Tensor
    lengths: torch.Tensor
    num_prompt_tokens: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of each row, float32 `[num_rows]`, as in `SamplingParams`: 1, 0 and 0 are neutral.
    Repetition counts prompt and output, presence and frequency the output alone."""

    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor


@triton.jit
def _history(
    token_ids, batch_slots, lengths, num_prompt_tokens, capacity, vocab_size, BLOCK: tl.constexpr
):
    """Loads `BLOCK` tokens of a row's history; returns them, whether each has a score, and whether
    it is output."""
    row = tl.program_id(0)
    positions = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < tl.load(lengths + row)
    batch_slot = tl.load(batch_slots + row).to(tl.int64)
    tokens = tl.load(token_ids + batch_slot * capacity + positions, inside, -1)
    is_scored = (tokens >= 0) & (tokens < vocab_size)
    return tokens, is_scored, positions >= tl.load(num_prompt_tokens + row)


@triton.jit
def _count_kernel(
    token_ids,
    batch_slots,
    lengths,
    num_prompt_tokens,
    counts,
    capacity,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Counts tokens: adds 2 for each occurrence in the output; bit 0 marks the prompt."""
    tokens, is_scored, is_output = _history(
        token_ids, batch_slots, lengths, num_prompt_tokens, capacity, vocab_size, BLOCK
    )
    cells = counts + tl.program_id(0).to(tl.int64) * vocab_size + tokens
    tl.atomic_add(cells, 2, is_scored & is_output, sem="relaxed")
    tl.atomic_or(cells, 1, is_scored & (is_output == 0), sem="relaxed")


@triton.jit
def _penalise_kernel(
    token_ids, batch_slots, lengths, num_prompt_tokens, counts, scores, scores_stride,
    repetition, presence, frequency, capacity, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Resets the counts of `BLOCK` tokens, and penalises each token whose count was not yet 0."""
    tokens, is_scored, _ = _history(
        token_ids, batch_slots, lengths, num_prompt_tokens, capacity, vocab_size, BLOCK
    )
    row = tl.program_id(0).to(tl.int64)
    taken = tl.atomic_xchg(counts + row * vocab_size + tokens, 0, is_scored, sem="relaxed")
    is_first = is_scored & (taken != 0)
    number = (taken >> 1).to(tl.float32)
    factor = tl.load(repetition + row)
    cells = scores + row * scores_stride + tokens
    score = tl.load(cells, is_first, 0.0)
    score = tl.where(score < 0, score * factor, tl.div_rn(score, factor))
    score = score - tl.load(frequency + row) * number
    score = score - tl.where(number > 0, tl.load(presence + row), 0.0)
    tl.store(cells, score, is_first)


def penalise(
    scores: torch.Tensor, history: History, penalties: Penalties, counts: torch.Tensor
) -> None:
    """Applies the penalties to tokens of the history, bitwise as the CPU sampler does.

    Args:
        scores: float32 `[num_rows, vocab_size]`; changed in place. Rows may be strided.
        counts: scratch, int32 `[num_rows or more, vocab_size]`, all zero before and after.
    """
    num_rows, vocab_size = scores.shape
    _check(scores, history, penalties, counts)
    if not num_rows or not history.longest:
        return
    grid = (num_rows, triton.cdiv(history.longest, _BLOCK))
    of_history = (
        history.token_ids, history.batch_slots, history.lengths, history.num_prompt_tokens, counts
    )  # fmt: skip
    sizes = (history.token_ids.shape[1], vocab_size)
    options = {"BLOCK": _BLOCK, "num_warps": _NUM_WARPS, "enable_fp_fusion": FP_FUSION}
    _count_kernel[grid](*of_history, *sizes, **options)
    _penalise_kernel[grid](
        *of_history, scores, scores.stride(0),
        penalties.repetition, penalties.presence, penalties.frequency, *sizes, **options,
    )  # fmt: skip


def reference_penalise(scores: torch.Tensor, history: History, penalties: Penalties) -> None:
    """Computes `penalise` in torch, row by row."""
    for row in range(len(scores)):
        tokens = history.token_ids[history.batch_slots[row], : history.lengths[row]].long()
        output = tokens[history.num_prompt_tokens[row] :]
        seen, counts = (
            torch.bincount(ids[(ids >= 0) & (ids < scores.shape[1])], minlength=scores.shape[1])
            for ids in (tokens, output)
        )
        old = scores[row]
        factor = penalties.repetition[row]
        new = torch.where(seen > 0, torch.where(old < 0, old * factor, old / factor), old)
        new = new - penalties.frequency[row] * counts
        scores[row] = new - penalties.presence[row] * (counts > 0)


def _check(
    scores: torch.Tensor, history: History, penalties: Penalties, counts: torch.Tensor
) -> None:
    num_rows, vocab_size = scores.shape
    check_dtype("scores", scores, torch.float32)
    check_packed("scores", scores)
    check_shape("counts", counts, (max(len(counts), num_rows), vocab_size))
    check_dtype("counts", counts, torch.int32)
    check_packed("counts", counts, 2)
    check_dtype("token_ids", history.token_ids, torch.int32)
    check_packed("token_ids", history.token_ids, 2)
    for name in ("batch_slots", "lengths", "num_prompt_tokens"):
        check_shape(name, getattr(history, name), (num_rows,))
        check_dtype(name, getattr(history, name), torch.int64)
        check_packed(name, getattr(history, name))
    for name in ("repetition", "presence", "frequency"):
        check_shape(name, getattr(penalties, name), (num_rows,))
        check_dtype(name, getattr(penalties, name), torch.float32)
        check_packed(name, getattr(penalties, name))


_OF_HISTORY: Final = {
    "token_ids": "*i32",
    "batch_slots": "*i64",
    "lengths": "*i64",
    "num_prompt_tokens": "*i64",
    "counts": "*i32",
}
_SIZES: Final = {"capacity": "i32:16", "vocab_size": "i32:16"}
_OF_SCORES: Final = {"scores": "*fp32", "scores_stride": "i32"} | dict.fromkeys(
    ("repetition", "presence", "frequency"), "*fp32"
)
VARIANTS: Final = (
    Variant(
        "penalise, count", _count_kernel, _OF_HISTORY | _SIZES, {"BLOCK": _BLOCK}, _NUM_WARPS, 1
    ),
    Variant(
        "penalise", _penalise_kernel, _OF_HISTORY | _OF_SCORES | _SIZES, {"BLOCK": _BLOCK},
        _NUM_WARPS, 1,
    ),
)  # fmt: skip
