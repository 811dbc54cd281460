"""Attention of one layer for a step's ragged batch: which kernel has which sequences.

Those with no more tokens than a program of `paged_decode` holds are its; the others are
`paged_prefill`'s. Knows nothing of how K and V came into the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton_kernels.attention_inputs import PagedKv, ScoreRule
from baton_kernels.attention_plan import (
    Int32Array,
    SharedPrefix,
    Spans,
    SplitPlan,
    plan_splits,
    plan_tiles,
)
from baton_kernels.attention_plan_arrays import SplitArrays
from baton_kernels.attention_tiling import AttentionTiling
from baton_kernels.paged_decode import Workspace, paged_decode
from baton_kernels.paged_prefill import paged_prefill


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's work, the same for all layers of a cache group."""

    splits: SplitPlan
    tiles: Int32Array


@dataclass(frozen=True, slots=True)
class AttentionArrays:
    """An `AttentionPlan` on the device."""

    splits: SplitArrays
    tiles: torch.Tensor

    @classmethod
    def of(cls, plan: AttentionPlan, device: torch.device) -> "AttentionArrays":
        tiles = torch.from_numpy(plan.tiles).to(device, non_blocking=True)
        return cls(SplitArrays.of(plan.splits, device), tiles)


def plan_attention(
    spans: Spans,
    group: int,
    tiling: AttentionTiling,
    window: int | None = None,
    shared: Sequence[SharedPrefix] = (),
) -> AttentionPlan:
    """Shares a batch out.

    Args:
        group: query heads of each KV head.
        shared: prefixes of sequences that have few tokens each; not with a window.
    """
    is_few = spans.num_queries <= tiling.decode.num_tokens(group)
    number = np.cumsum(is_few) - 1  # of a span, among those with few tokens
    splits = plan_splits(
        spans[is_few],
        tiling.split_tokens,
        tiling.decode.keys,
        tiling.decode.num_tokens(group),
        window,
        [SharedPrefix(number[prefix.members], prefix.num_tokens) for prefix in shared],
        tiling.shared.num_tokens(group),
    )
    return AttentionPlan(splits, plan_tiles(spans[~is_few], tiling.prefill.num_tokens(group)))


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
    """Writes the output of all tokens of the plan into `out`; K and V of these tokens are in the
    cache already. See `paged_decode` and `paged_prefill`."""
    paged_decode(query, out, kv, rule, tables, plan.splits, workspace, tiling.decode, tiling.shared)
    paged_prefill(query, out, kv, rule, tables, plan.tiles, tiling.prefill, tiling.prefill_split)
