"""Fallback sampling kernel for rows that keep too many tokens to gather, by passes over the row.

A threshold is found by bisection, about 30 passes over logits that are then in the L2 cache, for
top-k and again for top-p. That is far slower than `sampling`, and only for flat distributions and
very large `top_k`.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.launch import FLOATS, TRITON_TYPES
from baton_kernels.sampling.philox import uniform
from baton_kernels.sampling.row_summary import VOCAB_SIZE, RowSummary, Tiling
from baton_kernels.sampling.rows import ROW_SIGNATURE, SamplingRows
from baton_kernels.sampling.truncation import (
    LOWEST,
    NEGLIGIBLE_KEY,
    NO_TOKEN,
    SMALLEST,
    chance_of,
    key_of,
    middle,
    num_ties,
    score_of,
)
from baton_kernels.variant import Variant

FP_FUSION: Final = False
_NUM_WARPS: Final = 8


@triton.jit
def _tile(logits, first, vocab_size, largest, temperature, TILE: tl.constexpr):
    """Returns keys, scores and tokens of one tile."""
    tokens = first + tl.arange(0, TILE)
    inside = tokens < vocab_size
    values = tl.load(logits + tokens, inside, -float("inf")).to(tl.float32)
    scores = score_of(values, largest, temperature)
    return tl.where(inside, key_of(scores), LOWEST), scores, tokens


@triton.jit
def _above(logits, key, vocab_size, largest, temperature, TILE: tl.constexpr):
    """Returns the number of tokens above the key, the sum of their chances, and the chance of one
    token at the key."""
    count, sum_above = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    chance = tl.full((), 0, tl.int64)
    for first in range(0, vocab_size, TILE):
        keys, scores, _tokens = _tile(logits, first, vocab_size, largest, temperature, TILE)
        chances = chance_of(scores)
        count += tl.sum((keys > key).to(tl.int32), axis=0)
        sum_above += tl.sum(tl.where(keys > key, chances, 0), axis=0)
        chance = tl.maximum(chance, tl.max(tl.where(keys == key, chances, 0), axis=0))
    return count, sum_above, chance


@triton.jit
def _kept(keys, scores, key, ties, seen, least_score):
    """Returns the chances of a tile's tokens, 0 for tokens that are cut off, and the number of its
    ties; `seen` tokens of earlier tiles are ties."""
    is_tie = keys == key
    rank = seen + tl.cumsum(is_tie.to(tl.int32), axis=0)
    is_kept = (keys > key) | (is_tie & (rank <= ties))
    is_kept &= scores.to(tl.float64) >= least_score
    return tl.where(is_kept, chance_of(scores), 0), tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def _search_kernel(
    logits, stride, temperatures, top_ks, top_ps, min_ps, seeds, indices, positions,
    tile_maxima, left_over, out, vocab_size,
    NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Draws one row's token, if the row is left over."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(left_over + row) != 0:
        tiles = tl.arange(0, BLOCK_TILES)
        maxima = tile_maxima + row * NUM_TILES + tiles
        largest = tl.max(tl.load(maxima, tiles < NUM_TILES, -float("inf")), axis=0)
        temperature = tl.maximum(tl.load(temperatures + row), SMALLEST)
        k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        least_score = tl.log(tl.load(min_ps + row))
        number = uniform(tl.load(seeds + row), tl.load(indices + row), tl.load(positions + row))
        start = logits + row * stride
        low = tl.full((), NEGLIGIBLE_KEY, tl.int32)
        high = tl.where(k < vocab_size, 0, low)
        while low < high:
            key = middle(low, high)
            if _above(start, key, vocab_size, largest, temperature, TILE)[0] < k:
                high = key
            else:
                low = key + 1
        count, above, chance = _above(start, low, vocab_size, largest, temperature, TILE)
        ties = tl.where(k < vocab_size, k - count, NO_TOKEN)
        floor = low
        # At the lowest key chances are 0, so it does not matter how many ties there are.
        mass = top_p * (above + tl.where(chance > 0, ties, 0) * chance).to(tl.float64)
        high = tl.where(top_p < 1.0, 0, low)
        while low < high:
            key = middle(low, high)
            if _above(start, key, vocab_size, largest, temperature, TILE)[1].to(tl.float64) < mass:
                high = key
            else:
                low = key + 1
        count, above, chance = _above(start, low, vocab_size, largest, temperature, TILE)
        fewer = tl.where(top_p < 1.0, num_ties(mass, above, chance), NO_TOKEN)
        ties = tl.where(low == floor, tl.minimum(ties, fewer), fewer)
        total, seen = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
        for first in range(0, vocab_size, TILE):
            keys, scores, _tokens = _tile(start, first, vocab_size, largest, temperature, TILE)
            chances, num_tied = _kept(keys, scores, low, ties, seen, least_score)
            total += tl.sum(chances, axis=0)
            seen += num_tied
        target = number * total.to(tl.float64)
        drawn = tl.full((), NO_TOKEN, tl.int32)
        total, seen = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
        for first in range(0, vocab_size, TILE):
            keys, scores, tokens = _tile(start, first, vocab_size, largest, temperature, TILE)
            chances, num_tied = _kept(keys, scores, low, ties, seen, least_score)
            is_past = (total + tl.cumsum(chances, axis=0)).to(tl.float64) > target
            found = tl.where(is_past & (chances > 0), tokens, NO_TOKEN)
            drawn = tl.minimum(drawn, tl.min(found, axis=0))
            total += tl.sum(chances, axis=0)
            seen += num_tied
        if drawn != NO_TOKEN:
            tl.store(out + row, drawn.to(tl.int64))


def search(
    logits: torch.Tensor,
    rows: SamplingRows,
    summary: RowSummary,
    left_over: torch.Tensor,
    out: torch.Tensor,
    tiling: Tiling,
) -> None:
    """Writes the tokens of rows whose `left_over`, int32 `[num_rows]`, is not 0 into `out`."""
    num_rows, vocab_size = logits.shape
    _search_kernel[(num_rows,)](
        logits, logits.stride(0), rows.temperature, rows.top_k, rows.top_p, rows.min_p,
        rows.seeds, rows.sequence_indices, rows.positions,
        summary.maxima, left_over, out, vocab_size,
        **_constants(tiling, vocab_size), num_warps=_NUM_WARPS, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip


def _constants(tiling: Tiling, vocab_size: int) -> dict[str, Any]:
    num_tiles = tiling.num_tiles(vocab_size)
    return {
        "NUM_TILES": num_tiles,
        "BLOCK_TILES": triton.next_power_of_2(num_tiles),
        "TILE": tiling.tile,
    }


def _variant(dtype: torch.dtype) -> Variant:
    constants = _constants(Tiling(), VOCAB_SIZE)
    return Variant(
        name=f"sample, search {TRITON_TYPES[dtype]}",
        kernel=_search_kernel,
        signature={"logits": f"*{TRITON_TYPES[dtype]}", "stride": "i32", "vocab_size": "i32:16"}
        | ROW_SIGNATURE
        | {"tile_maxima": "*fp32", "left_over": "*i32", "out": "*i64"},
        constants=constants,
        num_warps=_NUM_WARPS,
        num_stages=3,
    )


VARIANTS: Final = tuple(map(_variant, FLOATS))
