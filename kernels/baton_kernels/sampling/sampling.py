"""Sampling kernels: one token per row by temperature, top-k, top-p, min-p and a counter-based draw.

The rules are those of the CPU sampler: a strict order of tokens by score and id, and the inverse
transform in the order of the vocabulary. The random integers are bitwise the same. Probabilities
differ in rounding, so that about one draw in a million gives another token. A row is computed from
itself alone, in a fixed order, so that it gets the same token in any batch.

`row_summary` reads the logits once. A row without truncation then reads only the tile of its token.
A row with truncation gathers its largest logits from the few strips that have any; if those surely
contain all kept tokens, it draws from them, else `sampling_search` does. The host decides nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.gpu import GPUS, Gpu
from baton_kernels.launch import FLOATS, TRITON_TYPES, check_dtype, check_packed, check_shape
from baton_kernels.sampling.philox import uniform
from baton_kernels.sampling.row_summary import (
    VOCAB_SIZE,
    RowSummary,
    Tiling,
    logprobs_of,
    summarise,
)
from baton_kernels.sampling.rows import ROW_SIGNATURE, SamplingRows, check_rows
from baton_kernels.sampling.search import search
from baton_kernels.sampling.truncation import (
    LOWEST,
    NEGLIGIBLE_KEY,
    NO_TOKEN,
    SMALLEST,
    UNIT,
    chance_of,
    key_of,
    kth_largest,
    nucleus,
    num_ties,
    score_of,
    score_of_key,
)
from baton_kernels.variant import Variant

# So that scores are bitwise those of the CPU sampler.
FP_FUSION: Final = False
MOST_TOKENS: Final = 2**18  # so that sums of chances fit into 63 bits
_DRAW_WARPS: Final = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the work on a row; the same for all rows and batches.

    Attributes:
        tiling: tiling of the pass over all logits.
        capacity: maximum number of a row's largest logits that are gathered; a power of 2.
        wanted: number to gather for a row without a smaller top-k.
    """

    tiling: Tiling = field(default_factory=Tiling)
    capacity: int = 1024
    wanted: int = 256


@dataclass(frozen=True, slots=True)
class Nearest:
    """Largest scores of the truncated rows, in the order of the vocabulary.

    Attributes:
        scores, tokens: float32 and int32 `[num_rows, capacity]`.
        counts: int32 `[num_rows]`, number found; of more than `capacity` the rest is dropped.
        keys: int32 `[num_rows]`, the smallest key that was gathered.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    keys: torch.Tensor


@triton.jit
def _gather_kernel(
    logits, stride, temperatures, top_ks, top_ps, min_ps, strip_maxima,
    near_scores, near_tokens, near_counts, near_keys, vocab_size,
    NUM_STRIPS: tl.constexpr, BLOCK_STRIPS: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr,
    CAPACITY: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """Gathers the scores of one row that are no less than its `k`th largest strip maximum; these
    are at least `k`."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k = tl.load(top_ks + row)
    is_cut = (k < vocab_size) | (tl.load(top_ps + row) < 1.0) | (tl.load(min_ps + row) > 0.0)
    if is_cut & (temperature > 0.0):
        temperature = tl.maximum(temperature, SMALLEST)
        every = tl.arange(0, BLOCK_STRIPS)
        is_strip = every < NUM_STRIPS
        strips = tl.load(strip_maxima + row * NUM_STRIPS + every, is_strip, -float("inf"))
        largest = tl.max(strips, axis=0)
        keys = tl.where(is_strip, key_of(score_of(strips, largest, temperature)), LOWEST)
        least = kth_largest(keys, tl.minimum(k, WANTED))
        count = tl.full((), 0, tl.int32)
        for tile in range(NUM_STRIPS * STRIP // TILE):
            of_tile = tile * (TILE // STRIP) + tl.arange(0, TILE // STRIP)
            maxima = tl.load(strip_maxima + row * NUM_STRIPS + of_tile)
            has_any = key_of(score_of(maxima, largest, temperature)) >= least
            if tl.max(has_any.to(tl.int32), axis=0) > 0:
                tokens = of_tile[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
                is_read = has_any[:, None] & (tokens < vocab_size)
                values = tl.load(logits + row * stride + tokens, is_read, -float("inf"))
                scores = score_of(values.to(tl.float32), largest, temperature)
                is_near = tl.reshape(is_read & (key_of(scores) >= least), (TILE,))
                found = is_near.to(tl.int32)
                places = count + tl.cumsum(found, axis=0) - found
                near = row * CAPACITY + places
                is_kept = is_near & (places < CAPACITY)
                tl.store(near_scores + near, tl.reshape(scores, (TILE,)), is_kept)
                tl.store(near_tokens + near, tl.reshape(tokens, (TILE,)), is_kept)
                count += tl.sum(found, axis=0)
        tl.store(near_counts + row, count)
        tl.store(near_keys + row, least)


@triton.jit
def _pick_in_tile(logits, first, vocab_size, largest, temperature, target, TILE: tl.constexpr):
    """Returns the token of a tile at which its cumulative chances exceed `target`, in units."""
    tokens = first + tl.arange(0, TILE)
    inside = tokens < vocab_size
    values = tl.load(logits + tokens, inside, -float("inf")).to(tl.float32)
    scores = score_of(values, largest, temperature)
    chances = tl.where(inside, chance_of(scores.to(tl.float64)), 0)
    sums = tl.cumsum(chances, axis=0)
    # The target is from sums with other rounding, so it may be slightly outside.
    target = tl.minimum(tl.maximum(target.to(tl.int64), 0), tl.max(sums, axis=0) - 1)
    is_past = (sums > target) & (chances > 0)
    return tl.min(tl.where(is_past, tokens, NO_TOKEN), axis=0)


@triton.jit
def _pick_near(scores, tokens, inside, chances, k, top_p, least_score, mass, number):
    """Draws one of `tokens`, which are in the order of the vocabulary. `k`: how many are kept at
    most, 0 for all; `mass`: the total that `top_p` is a fraction of if all are kept."""
    keys = tl.where(inside, key_of(scores), LOWEST)
    key = tl.full((), NEGLIGIBLE_KEY, tl.int32)
    ties = tl.full((), NO_TOKEN, tl.int32)
    if k > 0:
        key = kth_largest(keys, k)
        above = tl.sum(tl.where(keys > key, chances, 0), axis=0)
        chance = tl.max(tl.where(keys == key, chances, 0), axis=0)
        ties = k - tl.sum((keys > key).to(tl.int32), axis=0)
        mass = (above + ties * chance).to(tl.float64)
    if top_p < 1.0:
        floor = key
        key = nucleus(keys, chances, floor, top_p * mass)
        above = tl.sum(tl.where(keys > key, chances, 0), axis=0)
        chance = tl.max(tl.where(keys == key, chances, 0), axis=0)
        fewer = num_ties(top_p * mass, above, chance)
        ties = tl.where(key == floor, tl.minimum(ties, fewer), fewer)
    is_tie = keys == key
    is_kept = (keys > key) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= ties))
    is_kept &= scores.to(tl.float64) >= least_score
    sums = tl.cumsum(tl.where(is_kept, chances, 0), axis=0)
    is_past = inside & (sums.to(tl.float64) > number * tl.max(sums, axis=0).to(tl.float64))
    return tl.min(tl.where(is_past, tokens, NO_TOKEN), axis=0)


@triton.jit
def _draw_kernel(
    logits, stride, temperatures, top_ks, top_ps, min_ps, seeds, indices, positions,
    tile_maxima, tile_tokens, tile_masses,
    near_scores, near_tokens, near_counts, near_keys, out, left_over, vocab_size,
    NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr, TILE: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Draws one row's token, or stores 1 in `left_over` if the gathered scores do not suffice."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    is_tile = tiles < NUM_TILES
    maxima = tl.load(tile_maxima + row * NUM_TILES + tiles, is_tile, -float("inf"))
    largest = tl.max(maxima, axis=0)
    firsts = tl.load(tile_tokens + row * NUM_TILES + tiles, is_tile, NO_TOKEN)
    token = tl.min(tl.where(maxima == largest, firsts, NO_TOKEN), axis=0)
    temperature = tl.load(temperatures + row)
    is_left_over = tl.full((), 0, tl.int32)
    if temperature > 0.0:
        temperature = tl.maximum(temperature, SMALLEST)
        k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
        number = uniform(tl.load(seeds + row), tl.load(indices + row), tl.load(positions + row))
        masses = tl.load(tile_masses + row * NUM_TILES + tiles, is_tile, 0.0).to(tl.float64)
        masses *= tl.exp(score_of(maxima, largest, temperature).to(tl.float64))
        masses = tl.where(masses > 0.0, masses * UNIT, 0.0)  # NaN if no token has a chance
        if (k == vocab_size) & (top_p == 1.0) & (min_p == 0.0):
            sums = tl.cumsum(masses, axis=0)
            target = number * tl.max(sums, axis=0)
            tile = tl.min(tl.where(sums > target, tiles, NUM_TILES - 1), axis=0)
            target -= tl.sum(tl.where(tiles < tile, masses, 0.0), axis=0)
            drawn = _pick_in_tile(
                logits + row * stride, tile * TILE, vocab_size, largest, temperature, target, TILE
            )
        else:
            count, least = tl.load(near_counts + row), tl.load(near_keys + row)
            near = row * CAPACITY + tl.arange(0, CAPACITY)
            inside = tl.arange(0, CAPACITY) < count
            scores = tl.load(near_scores + near, inside, 0.0)
            tokens = tl.load(near_tokens + near, inside, 0)
            chances = tl.where(inside, chance_of(scores.to(tl.float64)), 0)
            of_near = tl.sum(chances, axis=0).to(tl.float64)
            least_score = tl.log(min_p)
            has_all = least == NEGLIGIBLE_KEY
            mass = tl.where(has_all, of_near, tl.sum(masses, axis=0))
            is_k_all = k == vocab_size
            is_known = has_all | (k <= count)
            is_known |= is_k_all & (top_p < 1.0) & (of_near >= top_p * mass)
            has_min_p = score_of_key(least).to(tl.float64) <= least_score
            is_known |= (is_k_all | (top_p == 1.0)) & has_min_p
            is_left_over = ((is_known & (count <= CAPACITY)) == 0).to(tl.int32)
            at_most = tl.where(k <= count, k, 0)
            drawn = _pick_near(
                scores, tokens, inside, chances, at_most, top_p, least_score, mass, number
            )
        token = tl.where(drawn == NO_TOKEN, token, drawn)
    # For NaN scores, some valid token.
    tl.store(out + row, tl.minimum(token, vocab_size - 1).to(tl.int64))
    tl.store(left_over + row, is_left_over)


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    out: torch.Tensor | None = None,
    logprobs: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Draws one token per row: int64 `[num_rows]`. A row without any chance still gets some token.

    Args:
        logits: `[num_rows, vocab_size]` of any float type, after the processors; not changed. Rows
            may be strided.
        out: int64 `[num_rows]` to write to; allocated if None.
        logprobs: float32 `[num_rows]`: if given, gets the chosen tokens' log-probabilities in nats
            under `logits`, without temperature.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
    check_rows(rows, num_rows)
    check_shape("out", out, (num_rows,))
    check_dtype("out", out, torch.int64)
    check_packed("out", out)
    if not 0 < vocab_size <= MOST_TOKENS:
        raise ValueError(f"logits have {vocab_size} columns; must have 1 to {MOST_TOKENS}")
    plan = plan or Plan()
    summary = summarise(logits, rows.temperature, plan.tiling)
    if num_rows:
        nearest = _gather(logits, rows, summary, plan)
        left_over = _draw(logits, rows, summary, nearest, out, plan)
        search(logits, rows, summary, left_over, out, plan.tiling)
    if logprobs is not None:
        logprobs_of(logits, out, summary, logprobs)
    return out


def _gather_warps(gpu: Gpu) -> int:
    """Returns so few warps that two rows fit on a multiprocessor; more, where those would spill."""
    return 8 if gpu.capability >= (12, 0) else 4


def _gather(logits: torch.Tensor, rows: SamplingRows, summary: RowSummary, plan: Plan) -> Nearest:
    num_rows, vocab_size = logits.shape
    nearest = Nearest(
        logits.new_empty((num_rows, plan.capacity), dtype=torch.float32),
        logits.new_empty((num_rows, plan.capacity), dtype=torch.int32),
        logits.new_empty(num_rows, dtype=torch.int32),
        logits.new_empty(num_rows, dtype=torch.int32),
    )
    _gather_kernel[(num_rows,)](
        logits, logits.stride(0), rows.temperature, rows.top_k, rows.top_p, rows.min_p,
        summary.strip_maxima, *_tensors(nearest), vocab_size,
        **_gather_constants(plan, vocab_size), num_warps=_gather_warps(Gpu.of(logits.device)),
        enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    return nearest


def _draw(
    logits: torch.Tensor,
    rows: SamplingRows,
    summary: RowSummary,
    nearest: Nearest,
    out: torch.Tensor,
    plan: Plan,
) -> torch.Tensor:
    """Draws tokens into `out`. Returns int32 `[num_rows]`, not 0 for rows that are left over."""
    num_rows, vocab_size = logits.shape
    left_over = logits.new_empty(num_rows, dtype=torch.int32)
    _draw_kernel[(num_rows,)](
        logits, logits.stride(0), rows.temperature, rows.top_k, rows.top_p, rows.min_p,
        rows.seeds, rows.sequence_indices, rows.positions,
        summary.maxima, summary.tokens, summary.masses,
        *_tensors(nearest), out, left_over, vocab_size,
        **_draw_constants(plan, vocab_size), num_warps=_DRAW_WARPS, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip
    return left_over


def _tensors(nearest: Nearest) -> tuple[torch.Tensor, ...]:
    return nearest.scores, nearest.tokens, nearest.counts, nearest.keys


def _gather_constants(plan: Plan, vocab_size: int) -> dict[str, Any]:
    num_strips = plan.tiling.num_strips(vocab_size)
    return {
        "NUM_STRIPS": num_strips,
        "BLOCK_STRIPS": triton.next_power_of_2(num_strips),
        "TILE": plan.tiling.tile,
        "STRIP": plan.tiling.strip,
        "CAPACITY": plan.capacity,
        "WANTED": plan.wanted,
    }


def _draw_constants(plan: Plan, vocab_size: int) -> dict[str, Any]:
    num_tiles = plan.tiling.num_tiles(vocab_size)
    return {
        "NUM_TILES": num_tiles,
        "BLOCK_TILES": triton.next_power_of_2(num_tiles),
        "TILE": plan.tiling.tile,
        "CAPACITY": plan.capacity,
    }


_NEAR_SIGNATURE: Final = {
    "near_scores": "*fp32",
    "near_tokens": "*i32",
    "near_counts": "*i32",
    "near_keys": "*i32",
}


def _variants(dtype: torch.dtype) -> Iterator[Variant]:
    name = TRITON_TYPES[dtype]
    common = {"logits": f"*{name}", "stride": "i32", "vocab_size": "i32:16"}
    gather, draw = _gather_constants(Plan(), VOCAB_SIZE), _draw_constants(Plan(), VOCAB_SIZE)
    for num_warps in (4, 8):
        yield Variant(
            name=f"sample, gather {name} in {num_warps} warps",
            kernel=_gather_kernel,
            signature=common
            | {key: ROW_SIGNATURE[key] for key in ("temperatures", "top_ks", "top_ps", "min_ps")}
            | {"strip_maxima": "*fp32"}
            | _NEAR_SIGNATURE,
            constants=gather,
            num_warps=num_warps,
            num_stages=3,
            targets=tuple(n for n, gpu in GPUS.items() if _gather_warps(gpu) == num_warps),
        )
    yield Variant(
        name=f"sample, draw {name}",
        kernel=_draw_kernel,
        signature=common
        | ROW_SIGNATURE
        | {"tile_maxima": "*fp32", "tile_tokens": "*i32", "tile_masses": "*fp32"}
        | _NEAR_SIGNATURE
        | {"out": "*i64", "left_over": "*i32"},
        constants=draw,
        num_warps=_DRAW_WARPS,
        num_stages=3,
    )


VARIANTS: Final = tuple(variant for dtype in FLOATS for variant in _variants(dtype))
