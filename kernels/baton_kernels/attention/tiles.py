"""Online softmax of all attention kernels: one tile of keys folded into the running state.

A row is one query head of one token; the rows of a program share a KV head. Scores are in units of
log2, so that `exp2` needs no factor. Tiles begin at multiples of their size, counted from the
sequence's first token, in every program: the keys of a row and their order depend on the row alone.
A tile of which a row sees nothing leaves its state bitwise unchanged.
"""

from typing import Final

import triton
import triton.language as tl

from baton_kernels.launch import INTERPRETED

# All attention kernels keep multiplication and addition apart, except for explicit `fma`; so two
# kernels with the same tiles give bitwise the same results.
FP_FUSION: Final = False
LOG2E: Final = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    acc,
    row_max,
    row_sum,
    query,
    query_positions,
    last_keys,
    keys,
    values,
    descriptors,
    table,
    begin,
    end,
    seen_begin,
    seen_end,
    scale,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Folds the keys `[begin, end)` into the state of the rows, and returns it.

    `keys` and `values` point to the rows' KV head in block 0; a block's tokens are contiguous.
    Every row sees all of `[seen_begin, seen_end)`; only tiles beyond it are masked. `begin` is a
    multiple of `TILE_KEYS`. A row sees up to its `last_keys`; a window begins by its position.

    `descriptors`: of K and V, and the KV head; they load the tiles that are not masked, each of one
    block. None: all tiles are gathered by pointers.
    """
    inner_begin = begin
    if WINDOW is not None:
        inner_begin = tl.cdiv(tl.maximum(begin, seen_begin), TILE_KEYS) * TILE_KEYS
        for start in range(begin, tl.minimum(inner_begin, end), TILE_KEYS):
            acc, row_max, row_sum = _fold_tile(
                acc, row_max, row_sum, query, query_positions, last_keys, keys, values, None,
                table, start, end, scale, block_stride,
                BLOCK_SIZE, HEAD_DIM, WINDOW, SOFTCAP, TILE_KEYS, True,
            )  # fmt: skip
    inner_end = tl.maximum(inner_begin, tl.minimum(end, seen_end) // TILE_KEYS * TILE_KEYS)
    for start in range(inner_begin, inner_end, TILE_KEYS):
        acc, row_max, row_sum = _fold_tile(
            acc, row_max, row_sum, query, query_positions, last_keys, keys, values, descriptors,
            table, start, end, scale, block_stride,
            BLOCK_SIZE, HEAD_DIM, WINDOW, SOFTCAP, TILE_KEYS, False,
        )  # fmt: skip
    for start in range(inner_end, end, TILE_KEYS):
        acc, row_max, row_sum = _fold_tile(
            acc, row_max, row_sum, query, query_positions, last_keys, keys, values, None,
            table, start, end, scale, block_stride,
            BLOCK_SIZE, HEAD_DIM, WINDOW, SOFTCAP, TILE_KEYS, True,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _fold_tile(
    acc,
    row_max,
    row_sum,
    query,
    query_positions,
    last_keys,
    keys,
    values,
    descriptors,
    table,
    start,
    end,
    scale,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    positions = start + tl.arange(0, TILE_KEYS)
    if descriptors is None:
        if MASKED:
            # Positions beyond the context read the null block, whose zeros get weights of zero: the
            # content of a block after its last token is never used.
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)
        else:
            blocks = tl.load(table + positions // BLOCK_SIZE)
        offsets = blocks.to(tl.int64) * block_stride + positions % BLOCK_SIZE * HEAD_DIM
        key = load_rows(keys, offsets, HEAD_DIM, query.shape[1])
    else:
        key_descriptor, value_descriptor, kv_head = descriptors
        block = tl.load(table + start // BLOCK_SIZE)
        key = load_tile(key_descriptor, block, kv_head, start % BLOCK_SIZE)
    no_scores = tl.zeros([query.shape[0], TILE_KEYS], tl.float32)
    scores = dot(query, tl.trans(key.to(query.dtype)), no_scores)  # [rows, TILE_KEYS]
    factor = scale
    if SOFTCAP is not None:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), where `scale` includes the 2 and the soft cap.
        scores = 1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0)
        factor = SOFTCAP * LOG2E
    if MASKED:
        seen = positions[None, :] <= last_keys[:, None]
        if WINDOW is not None:
            seen &= positions[None, :] > query_positions[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * factor)
    shift = finite(new_max)
    weights = tl.exp2(tl.fma(scores, factor, -shift[:, None]))
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    if descriptors is None:
        value = load_rows(values, offsets, HEAD_DIM, query.shape[1])
    else:
        value = load_tile(value_descriptor, block, kv_head, start % BLOCK_SIZE)
    acc = dot(weights.to(query.dtype), value.to(query.dtype), acc * decay[:, None])
    return acc, new_max, row_sum


@triton.jit
def dot(left, right, acc):
    """Returns `acc` plus the product in float32; float32 inputs are not rounded to TF32."""
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), acc)
    else:  # noqa: RET505
        return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def load_rows(base, offsets, HEAD_DIM: tl.constexpr, TILE_DIM: tl.constexpr):
    """Loads rows, `[offsets, TILE_DIM]`; columns beyond `HEAD_DIM` are zero."""
    columns = tl.arange(0, TILE_DIM)
    pointers = base + offsets[:, None] + columns[None, :]
    if HEAD_DIM == TILE_DIM:
        return tl.load(pointers)
    else:  # noqa: RET505
        return tl.load(pointers, mask=columns[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def load_tile(descriptor, block, kv_head, first):
    """Loads adjacent rows of one block, `[TILE_KEYS, TILE_DIM]`, from row `first` on; columns
    beyond those of the cache are zero."""
    tile = descriptor.load([block, kv_head, first, 0])
    return tl.reshape(tile, [tile.shape[2], tile.shape[3]])


@triton.jit
def empty_accumulators(ROWS: tl.constexpr, TILE_DIM: tl.constexpr):
    """Returns the state of rows that have seen no key."""
    acc = tl.zeros([ROWS, TILE_DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    return acc, row_max, row_sum


@triton.jit
def merge(acc, row_max, row_sum, other_acc, other_max, other_sum):
    """Merges two partial states by their log-sum-exp."""
    new_max = tl.maximum(row_max, other_max)
    shift = finite(new_max)
    mine = tl.exp2(row_max - shift)
    others = tl.exp2(other_max - shift)
    acc = acc * mine[:, None] + other_acc * others[:, None]
    return acc, new_max, row_sum * mine + other_sum * others


@triton.jit
def finish(acc, row_max, row_sum, sinks, value_scales, kv_head):
    """Returns the output of the rows: zero for a row that has seen no key. `sinks`: one logit per
    row, -inf for none."""
    new_max = finite(tl.maximum(row_max, sinks * LOG2E))
    mine = tl.exp2(row_max - new_max)
    row_sum = row_sum * mine + tl.exp2(sinks * LOG2E - new_max)
    factor = mine / tl.where(row_sum > 0.0, row_sum, 1.0)
    if value_scales is not None:
        factor *= tl.load(value_scales + kv_head)
    return acc * factor[:, None]


@triton.jit
def load_sinks(sinks, heads):
    """Returns the sink of each row's head, -inf for none."""
    if sinks is None:
        return tl.full(heads.shape, float("-inf"), tl.float32)
    else:  # noqa: RET505
        return tl.load(sinks + heads).to(tl.float32)


@triton.jit
def finite(row_max):
    """Returns the number to subtract from scores: `row_max`, or 0 if all so far were -inf."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def score_scale(scale, key_scales, kv_head, SOFTCAP: tl.constexpr):
    """Returns the first factor for products of query and key; see `_fold_tile`."""
    if key_scales is not None:
        scale *= tl.load(key_scales + kv_head)
    if SOFTCAP is not None:
        return scale * (2.0 * LOG2E / SOFTCAP)
    else:  # noqa: RET505
        return scale * LOG2E
