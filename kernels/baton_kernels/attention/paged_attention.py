"""Paged attention of one layer for a step's ragged batch, on the decode and prefill kernels.

Sequences with no more tokens than a program of `paged_decode` holds, or than a decoding sequence
may have, go to it, the others to `paged_prefill`, and so do tokens that see later ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton_kernels.attention.inputs import PagedKv, ScoreRule
from baton_kernels.attention.paged_decode import Workspace, paged_decode
from baton_kernels.attention.paged_prefill import paged_prefill
from baton_kernels.attention.plan import (
    Int32Array,
    Ranges,
    SharedPrefix,
    SplitPlan,
    plan_splits,
    plan_tiles,
)
from baton_kernels.attention.plan_arrays import SplitArrays
from baton_kernels.attention.tiling import AttentionTiling


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention plan of a step, the same for all layers of a cache group."""

    splits: SplitPlan
    tiles: Int32Array


@dataclass(frozen=True, slots=True)
class AttentionArrays:
    """Attention plan on the device."""

    splits: SplitArrays
    tiles: torch.Tensor

    @classmethod
    def of(cls, plan: AttentionPlan, device: torch.device) -> "AttentionArrays":
        tiles = torch.from_numpy(plan.tiles).to(device, non_blocking=True)
        return cls(SplitArrays.of(plan.splits, device), tiles)


def plan_attention(
    ranges: Ranges,
    group: int,
    tiling: AttentionTiling,
    window: int | None = None,
    shared: Sequence[SharedPrefix] = (),
    max_decode_tokens: int = 1,
) -> AttentionPlan:
    """Divides a batch between the kernels.

    Args:
        group: number of query heads per KV head.
        shared: shared prefixes of sequences with few tokens each; not with a window.
        max_decode_tokens: most tokens of a sequence that decodes, drafts included.
    """
    is_few = ranges.num_queries <= max(tiling.decode.num_tokens(group), max_decode_tokens)
    if ranges.last_keys is not None:
        is_few &= ranges.last_keys == 0
    few, many = (ranges, ranges[:0]) if is_few.all() else (ranges[is_few], ranges[~is_few])
    if shared:
        number = np.cumsum(is_few) - 1  # index of a range among those with few tokens
        shared = [SharedPrefix(number[prefix.members], prefix.num_tokens) for prefix in shared]
    splits = plan_splits(
        few,
        tiling.splits,
        tiling.decode.keys,
        tiling.decode.num_tokens(group),
        window,
        shared,
        tiling.shared.num_tokens(group),
    )
    tokens_per_tile = tiling.prefill.num_tokens(group)
    tiles = plan_tiles(many, tokens_per_tile, tiling.prefill_splits, window)
    return AttentionPlan(splits, tiles)


def paged_attention(
    query: torch.Tensor,
    out: torch.Tensor,
    kv: PagedKv,
    rule: ScoreRule,
    tables: torch.Tensor,
    plan: AttentionArrays,
    workspace: Workspace,
    tiling: AttentionTiling,
) -> None:
    """Writes the output of all tokens of the plan into `out`; their K and V must already be in the
    cache. See `paged_decode` and `paged_prefill`."""
    if plan.splits.capacity.members:
        paged_decode(
            query, out, kv, rule, tables, plan.splits, workspace, tiling.decode, tiling.shared
        )
    if len(plan.tiles):
        merges = tiling.merges_in_prefill
        paged_prefill(query, out, kv, rule, tables, plan.tiles, tiling.prefill, merges=merges)
