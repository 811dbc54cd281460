"""Paged attention for decode: few queries over long contexts, drafts, and shared prefixes.

Split-KV (flash-decoding): a program attends over one split of the context, for some tokens that see
it and all query heads of one KV head, and stores a partial result; a second kernel merges the
partial results of each token, in the order of the context. A token's splits depend on its own
context alone (`SplitRule`), and so does its result.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from baton_kernels.attention.inputs import PagedKv, ScoreRule, check_inputs
from baton_kernels.attention.plan import ITEM_FIELDS, SplitItem
from baton_kernels.attention.plan_arrays import SplitArrays
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
from baton_kernels.dependent_launch import dependent_launch, wait_for_kernel_before
from baton_kernels.gpu import resident_programs
from baton_kernels.launch import INTERPRETED, check_packed, check_shape

_FIELDS = tl.constexpr(ITEM_FIELDS)
_ITEM = tl.constexpr(SplitItem(*range(ITEM_FIELDS)))
MERGED_AT_ONCE: Final = 8
MERGE_WARPS: Final = 2
# Programs of the first launch of a kernel, and of all on the CPU.
_FEW_PROGRAMS: Final = 8
# Programs that the GPU runs at once, by all that a split kernel is compiled for: its grid, since a
# program that waited for another to end would begin its share of the work when the others are done.
_num_resident: dict[tuple[object, ...], int] = {}


@triton.jit(do_not_specialize=["table_width"])
def split_kernel(
    partial_acc,
    partial_max,
    partial_sum,
    query,
    keys,
    values,
    tables,
    items,
    num_items,
    members,
    positions,
    first_slots,
    key_scales,
    scale,
    query_stride,
    block_stride,
    head_stride,
    table_width,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Computes partial results in a persistent loop over items and KV heads.

    An item is up to ROWS / GROUP tokens and a split of the context that they see. A result reads K
    and V of the split, 2 * HEAD_DIM numbers per token, and writes HEAD_DIM + 2 floats per row.
    """
    wait_for_kernel_before(IS_DEPENDENT)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, TILE_DIM)
    num_works = tl.load(num_items) * NUM_KV_HEADS
    for work in range(tl.program_id(0), num_works, tl.num_programs(0)):
        kv_head = work % NUM_KV_HEADS
        item = items + work // NUM_KV_HEADS * _FIELDS
        held = rows // GROUP < tl.load(item + _ITEM.value.num_members)
        member = tl.load(item + _ITEM.value.first_member) + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        token = tl.load(members + member, mask=held, other=0).to(tl.int64)
        queries = query + (token * query_stride + heads * HEAD_DIM)[:, None] + columns[None, :]
        inside = held[:, None] & (columns < HEAD_DIM)[None, :]
        position = tl.load(positions + member, mask=held, other=-1)
        acc, row_max, row_sum = empty_accumulators(ROWS, TILE_DIM)
        acc, row_max, row_sum = attend(
            acc,
            row_max,
            row_sum,
            tl.load(queries, mask=inside, other=0.0),
            position,
            position,
            keys + kv_head * head_stride,
            values + kv_head * head_stride,
            None,
            tables + tl.load(item + _ITEM.value.batch_slot).to(tl.int64) * table_width,
            tl.load(item + _ITEM.value.begin),
            tl.load(item + _ITEM.value.end),
            tl.load(item + _ITEM.value.seen_begin),
            tl.load(item + _ITEM.value.seen_end),
            score_scale(scale, key_scales, kv_head, SOFTCAP),
            block_stride,
            BLOCK_SIZE,
            HEAD_DIM,
            WINDOW,
            SOFTCAP,
            TILE_KEYS,
        )
        first_slot = tl.load(first_slots + member, mask=held, other=0)
        slot = first_slot + tl.load(item + _ITEM.value.slot)
        place = slot.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(partial_max + place, row_max, mask=held)
        tl.store(partial_sum + place, row_sum, mask=held)
        tl.store(partial_acc + (place * HEAD_DIM)[:, None] + columns[None, :], acc, mask=inside)


@triton.jit
def merge_kernel(
    out,
    partial_acc,
    partial_max,
    partial_sum,
    members,
    first_slots,
    sinks,
    value_scales,
    out_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Merges the partial results of one head of one token, in their order, into its output.

    Reads HEAD_DIM + 2 floats of each and writes HEAD_DIM numbers; zeros if there are none.
    """
    wait_for_kernel_before(IS_DEPENDENT)
    member = tl.program_id(0)
    head = tl.program_id(1)
    heads = head + tl.arange(0, 1)
    columns = tl.arange(0, TILE_DIM)
    begin = tl.load(first_slots + member)
    end = tl.load(first_slots + member + 1)
    acc, row_max, row_sum = empty_accumulators(1, TILE_DIM)
    for first in range(begin, end, AT_ONCE):
        # Unrolled, so that the loads of several are in flight together.
        for i in tl.static_range(AT_ONCE):
            slot = first + i + tl.arange(0, 1)
            held = slot < end
            place = slot.to(tl.int64) * NUM_HEADS + heads
            inside = held[:, None] & (columns < HEAD_DIM)[None, :]
            accs = partial_acc + (place * HEAD_DIM)[:, None] + columns[None, :]
            acc, row_max, row_sum = merge(
                acc,
                row_max,
                row_sum,
                tl.load(accs, mask=inside, other=0.0),
                tl.load(partial_max + place, mask=held, other=float("-inf")),
                tl.load(partial_sum + place, mask=held, other=0.0),
            )
    result = finish(acc, row_max, row_sum, load_sinks(sinks, heads), value_scales, head // GROUP)
    token = tl.load(members + member).to(tl.int64)
    outs = out + (token * out_stride + heads * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(outs, result.to(out.dtype.element_ty), mask=(columns < HEAD_DIM)[None, :])


@dataclass(frozen=True, slots=True)
class Workspace:
    """Workspace for the partial results of one launch at a time, in float32.

    Attributes:
        acc: `[num_slots, num_heads, head_dim]`.
        row_max, row_sum: `[num_slots, num_heads]`.
    """

    acc: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor

    @classmethod
    def allocate(
        cls, num_slots: int, num_heads: int, head_dim: int, device: torch.device
    ) -> "Workspace":
        shape = (num_slots, num_heads)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


def paged_decode(
    query: torch.Tensor,
    out: torch.Tensor,
    kv: PagedKv,
    rule: ScoreRule,
    tables: torch.Tensor,
    plan: SplitArrays,
    workspace: Workspace,
    tiling: Tiling,
    shared_tiling: Tiling,
) -> None:
    """Writes the output of the plan's members into `out`; its other tokens are unchanged.

    Args:
        query, out: `[num_tokens, num_heads, head_dim]`, tokens may be strided.
        tables: `[num_batch_slots, max_blocks]` in int32, with every block that a member sees.
        plan: made for these tilings and the rule's window. Its capacity sets the grids.
        workspace: at least the plan's number of slots, which is on the device and not checked.
        shared_tiling: tiling for the plan's shared items.
    """
    check_inputs(query, out, kv, rule, tables)
    check_workspace(workspace, *query.shape[1:])
    capacity = plan.capacity
    work = (plan.items, plan.num_items, capacity.items, tiling)
    shared = (plan.shared_items, plan.num_shared_items, capacity.shared_items, shared_tiling)
    for items, num_items, most, of in (shared, work):
        if most:
            _launch_splits(query, kv, rule, tables, plan, workspace, items, num_items, most, of)
    if capacity.members:
        _launch_merge(out, kv, rule, plan, workspace)


def check_workspace(workspace: Workspace, num_heads: int, head_dim: int) -> None:
    check_shape("workspace.acc", workspace.acc, (len(workspace.acc), num_heads, head_dim))
    check_packed("workspace.acc", workspace.acc, 3)


def _launch_splits(
    query: torch.Tensor,
    kv: PagedKv,
    rule: ScoreRule,
    tables: torch.Tensor,
    plan: SplitArrays,
    workspace: Workspace,
    items: torch.Tensor,
    num_items: torch.Tensor,
    most_items: int,
    tiling: Tiling,
) -> None:
    constants = {
        "NUM_KV_HEADS": kv.num_kv_heads,
        "GROUP": query.shape[1] // kv.num_kv_heads,
        "HEAD_DIM": kv.head_dim,
        "TILE_DIM": tile_dim(kv.head_dim),
        "BLOCK_SIZE": kv.block_size,
        "WINDOW": rule.window,
        "SOFTCAP": rule.softcap,
        "ROWS": tiling.rows,
        "TILE_KEYS": tiling.keys,
    }
    compiled_for = (query.device, query.dtype, kv.keys.dtype, tiling, *constants.values())
    num_resident = _num_resident.get(compiled_for, _FEW_PROGRAMS)
    compiled = split_kernel[(min(most_items * kv.num_kv_heads, num_resident),)](
        workspace.acc,
        workspace.row_max,
        workspace.row_sum,
        query,
        kv.keys,
        kv.values,
        tables,
        items,
        num_items,
        plan.members,
        plan.positions,
        plan.first_slots,
        kv.key_scales,
        rule.scale,
        query.stride(0),
        *kv.keys.stride()[:2],
        tables.stride(0),
        **constants,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
        enable_fp_fusion=FP_FUSION,
        **dependent_launch(query.device),
    )
    if query.is_cuda and compiled_for not in _num_resident:
        _num_resident[compiled_for] = resident_programs(compiled, query.device)


def _launch_merge(
    out: torch.Tensor, kv: PagedKv, rule: ScoreRule, plan: SplitArrays, workspace: Workspace
) -> None:
    num_heads = out.shape[1]
    merge_kernel[(plan.capacity.members, num_heads)](
        out,
        workspace.acc,
        workspace.row_max,
        workspace.row_sum,
        plan.members,
        plan.first_slots,
        rule.sinks,
        kv.value_scales,
        out.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // kv.num_kv_heads,
        HEAD_DIM=kv.head_dim,
        TILE_DIM=tile_dim(kv.head_dim),
        AT_ONCE=1 if INTERPRETED else MERGED_AT_ONCE,
        num_warps=MERGE_WARPS,
        enable_fp_fusion=FP_FUSION,
        **dependent_launch(out.device),
    )
