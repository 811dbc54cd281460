"""Paged attention for prefill: ragged chunks of prompts over the paged cache, in one launch.

A program has adjacent tokens of one sequence, with all query heads of one KV head, and attends over
their whole context. In deterministic mode it merges partial results at the splits of
`paged_decode`, and in the same order.
"""

import torch
import triton
import triton.language as tl

from baton_kernels.attention.inputs import PagedKv, ScoreRule, check_inputs
from baton_kernels.attention.plan import TILE_FIELDS, PrefillTile
from baton_kernels.attention.tiles import (
    FP_FUSION,
    attend,
    empty_accumulators,
    finish,
    load_sinks,
    merge,
    score_scale,
)
from baton_kernels.attention.tiling import Tiling, tile_dim
from baton_kernels.launch import check_dtype, check_packed, check_shape

_FIELDS = tl.constexpr(TILE_FIELDS)
_TILE = tl.constexpr(PrefillTile(*range(TILE_FIELDS)))


@triton.jit(do_not_specialize=["table_width"])
def prefill_kernel(
    out,
    query,
    keys,
    values,
    key_descriptor,
    value_descriptor,
    tables,
    tiles,
    sinks,
    key_scales,
    value_scales,
    scale,
    out_stride,
    query_stride,
    block_stride,
    head_stride,
    table_width,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MERGES: tl.constexpr,
):
    """Computes the output of a tile, up to ROWS / GROUP tokens, for one KV head.

    Reads 2 * HEAD_DIM numbers per token of the context, which concurrent programs of the same KV
    head find in the L2 cache; reads and writes HEAD_DIM per row.
    """
    tile = tiles + tl.program_id(0) * _FIELDS
    kv_head = tl.program_id(1)
    num_tokens = tl.load(tile + _TILE.value.num_tokens)
    start = tl.load(tile + _TILE.value.start)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, TILE_DIM)
    held = rows // GROUP < num_tokens
    heads = kv_head * GROUP + rows % GROUP
    token = (tl.load(tile + _TILE.value.first_token) + rows // GROUP).to(tl.int64)
    inside = held[:, None] & (columns < HEAD_DIM)[None, :]
    queries = query + (token * query_stride + heads * HEAD_DIM)[:, None] + columns[None, :]
    tile_query = tl.load(queries, mask=inside, other=0.0)
    positions = start + rows // GROUP
    last_key = tl.load(tile + _TILE.value.last_key)
    last_keys = tl.where(held, tl.maximum(positions, last_key), -1)
    head_keys = keys + kv_head * head_stride
    head_values = values + kv_head * head_stride
    descriptors = None
    if key_descriptor is not None:
        descriptors = (key_descriptor, value_descriptor, kv_head)
    table = tables + tl.load(tile + _TILE.value.batch_slot).to(tl.int64) * table_width
    head_scale = score_scale(scale, key_scales, kv_head, SOFTCAP)
    begin = 0
    seen_begin = 0
    if WINDOW is not None:
        begin = tl.maximum(start - WINDOW + 1, 0) // TILE_KEYS * TILE_KEYS
        seen_begin = start + num_tokens - WINDOW
    end = tl.maximum(start + num_tokens, last_key + 1)

    acc, row_max, row_sum = empty_accumulators(ROWS, TILE_DIM)
    if not MERGES:
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, tile_query, positions, last_keys, head_keys, head_values,
            descriptors, table, begin, end, seen_begin, start + 1, head_scale, block_stride,
            BLOCK_SIZE, HEAD_DIM, WINDOW, SOFTCAP, TILE_KEYS,
        )  # fmt: skip
    else:
        split = tl.load(tile + _TILE.value.split_tokens)
        for edge in range(begin // split * split, end, split):
            part_acc, part_max, part_sum = empty_accumulators(ROWS, TILE_DIM)
            part_acc, part_max, part_sum = attend(
                part_acc, part_max, part_sum, tile_query, positions, last_keys, head_keys,
                head_values, descriptors, table, tl.maximum(begin, edge),
                tl.minimum(end, edge + split), seen_begin, start + 1, head_scale, block_stride,
                BLOCK_SIZE, HEAD_DIM, WINDOW, SOFTCAP, TILE_KEYS,
            )  # fmt: skip
            acc, row_max, row_sum = merge(acc, row_max, row_sum, part_acc, part_max, part_sum)
    result = finish(acc, row_max, row_sum, load_sinks(sinks, heads), value_scales, kv_head)
    outs = out + (token * out_stride + heads * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(outs, result.to(out.dtype.element_ty), mask=inside)


def paged_prefill(
    query: torch.Tensor,
    out: torch.Tensor,
    kv: PagedKv,
    rule: ScoreRule,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    tiling: Tiling,
    *,
    merges: bool = False,
) -> None:
    """Writes the output of the tiles' tokens into `out`; its other tokens are unchanged.

    Args:
        query, out: `[num_tokens, num_heads, head_dim]`, tokens may be strided.
        tables: `[num_batch_slots, max_blocks]` in int32, with every block that a token sees.
        tiles: result of `plan_tiles` for this tiling, on the device.
        merges: whether the tiles have splits, whose partial results are merged.
    """
    check_inputs(query, out, kv, rule, tables)
    check_shape("tiles", tiles, (len(tiles), TILE_FIELDS))
    check_dtype("tiles", tiles, torch.int32)
    if not len(tiles):
        return
    check_packed("tiles", tiles, 2)
    descriptors = kv.descriptors
    if descriptors is not None and descriptors.tile_keys != tiling.keys:
        raise ValueError(
            f"descriptors load tiles of {descriptors.tile_keys} keys; must be {tiling.keys}, as in "
            "the tiling: call describe_tiles with it"
        )
    prefill_kernel[(len(tiles), kv.num_kv_heads)](
        out,
        query,
        kv.keys,
        kv.values,
        None if descriptors is None else descriptors.keys,
        None if descriptors is None else descriptors.values,
        tables,
        tiles,
        rule.sinks,
        kv.key_scales,
        kv.value_scales,
        rule.scale,
        out.stride(0),
        query.stride(0),
        *kv.keys.stride()[:2],
        tables.stride(0),
        GROUP=query.shape[1] // kv.num_kv_heads,
        HEAD_DIM=kv.head_dim,
        TILE_DIM=tile_dim(kv.head_dim),
        BLOCK_SIZE=kv.block_size,
        WINDOW=rule.window,
        SOFTCAP=rule.softcap,
        ROWS=tiling.rows,
        TILE_KEYS=tiling.keys,
        MERGES=merges,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
        enable_fp_fusion=FP_FUSION,
    )
