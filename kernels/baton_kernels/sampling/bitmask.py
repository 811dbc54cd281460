"""Token bitmasks of grammars: a token that is not allowed gets a score of -inf.

A mask has 32 tokens per word, the lowest bit first, as grammar engines produce it, and is not
unpacked: 16 KiB for 128k tokens, beside 512 KiB of scores. If other rules have banned all allowed
tokens, these get a score of 0 and are equally likely: a violation of the grammar cannot be undone.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.launch import check_dtype, check_packed, check_shape
from baton_kernels.variant import Variant

FP_FUSION: Final = False
_WORDS: Final = 128  # words per program, of 32 tokens each
_NUM_WARPS: Final = 4


@triton.jit
def _allowed(words, words_stride, num_words, vocab_size, WORDS: tl.constexpr):
    """Returns the tokens of one program, `[WORDS, 32]`, and whether each is allowed."""
    mask, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tile * WORDS + tl.arange(0, WORDS)
    word = tl.load(words + mask * words_stride + places, places < num_words, 0)
    bits = tl.arange(0, 32)[None, :]
    tokens = places[:, None] * 32 + bits
    return tokens, (((word[:, None] >> bits) & 1) != 0) & (tokens < vocab_size)


@triton.jit
def _restrict_kernel(
    scores, scores_stride, rows, words, words_stride, has_any, num_words, vocab_size,
    NUM_TILES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Masks one tile of a row: reads the scores of allowed tokens, writes the others."""
    tokens, is_allowed = _allowed(words, words_stride, num_words, vocab_size, WORDS)
    mask = tl.program_id(0).to(tl.int64)
    cells = scores + tl.load(rows + mask) * scores_stride + tokens
    # NaN counts as a score too: it does not equal -inf.
    is_left = is_allowed & (tl.load(cells, is_allowed, -float("inf")) != -float("inf"))
    tl.store(cells, -float("inf"), (tokens < vocab_size) & (is_allowed == 0))
    found = tl.max(tl.max(is_left.to(tl.int32), axis=1), axis=0)
    tl.store(has_any + mask * NUM_TILES + tl.program_id(1), found)


@triton.jit
def _unmask_kernel(
    scores, scores_stride, rows, words, words_stride, has_any, num_words, vocab_size,
    NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Resets one tile of a row; writes only if no allowed token of the whole row is left."""
    mask = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    found = tl.load(has_any + mask * NUM_TILES + tiles, tiles < NUM_TILES, 0)
    if tl.max(found, axis=0) == 0:
        tokens, is_allowed = _allowed(words, words_stride, num_words, vocab_size, WORDS)
        tl.store(scores + tl.load(rows + mask) * scores_stride + tokens, 0.0, is_allowed)


def restrict(scores: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Masks the tokens of rows that their bitmasks do not allow, in place.

    Args:
        scores: float32 `[num_rows, vocab_size]`; rows may be strided.
        rows: int64 `[num_masks]`, rows of `scores` to mask; no row occurs twice.
        bitmask: int32 `[num_masks, ceil(vocab_size / 32)]`; token i is allowed by bit `i % 32` of
            word `i // 32`; bits beyond the vocabulary are ignored. Rows may be strided.
    """
    vocab_size = scores.shape[1]
    num_masks, num_words = len(rows), triton.cdiv(vocab_size, 32)
    _check(scores, rows, bitmask, num_words)
    if not num_masks:
        return
    num_tiles = triton.cdiv(num_words, _WORDS)
    has_any = torch.empty(num_masks, num_tiles, dtype=torch.int32, device=scores.device)
    given = (scores, scores.stride(0), rows, bitmask, bitmask.stride(0), has_any)
    constants = _constants(vocab_size)
    options = {"num_warps": _NUM_WARPS, "enable_fp_fusion": FP_FUSION}
    grid = (num_masks, num_tiles)
    _restrict_kernel[grid](*given, num_words, vocab_size, **constants, **options)
    _unmask_kernel[grid](
        *given, num_words, vocab_size,
        BLOCK_TILES=triton.next_power_of_2(num_tiles), **constants, **options,
    )  # fmt: skip


def reference_restrict(scores: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Computes `restrict` in torch, row by row."""
    for row, words in zip(rows.tolist(), bitmask, strict=True):
        bits = words[:, None] >> torch.arange(32, device=words.device) & 1
        is_allowed = bits.bool().flatten()[: scores.shape[1]]
        scores[row, ~is_allowed] = -torch.inf
        if (scores[row] == -torch.inf).all():
            scores[row, is_allowed] = 0.0


def _check(scores: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor, num_words: int) -> None:
    check_dtype("scores", scores, torch.float32)
    check_packed("scores", scores)
    check_shape("rows", rows, (len(rows),))
    check_dtype("rows", rows, torch.int64)
    check_packed("rows", rows)
    check_shape("bitmask", bitmask, (len(rows), num_words))
    check_dtype("bitmask", bitmask, torch.int32)
    check_packed("bitmask", bitmask)


def _constants(vocab_size: int) -> dict[str, Any]:
    return {"NUM_TILES": triton.cdiv(vocab_size, 32 * _WORDS), "WORDS": _WORDS}


_SIGNATURE: Final = {
    "scores": "*fp32",
    "scores_stride": "i32",
    "rows": "*i64",
    "words": "*i32",
    "words_stride": "i32",
    "has_any": "*i32",
    "num_words": "i32",
    "vocab_size": "i32:16",
}
VARIANTS: Final = (
    Variant(
        "restrict", _restrict_kernel, _SIGNATURE, {"NUM_TILES": 32, "WORDS": _WORDS},
        _NUM_WARPS, 1,
    ),
    Variant(
        "restrict, where nothing is left",
        _unmask_kernel,
        _SIGNATURE,
        {"NUM_TILES": 32, "BLOCK_TILES": 32, "WORDS": _WORDS},
        _NUM_WARPS,
        1,
    ),
)  # fmt: skip
