"""Ragged batches over a paged pool, for tests of attention on any device.

Whatever attention must not read is NaN: other layers' part of the pool, blocks of no sequence, and
what a block holds after the last token of its sequence.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton_kernels.attention.inputs import PagedKv, ScoreRule
from baton_kernels.attention.paged_attention import AttentionArrays, paged_attention, plan_attention
from baton_kernels.attention.paged_decode import Workspace, paged_decode
from baton_kernels.attention.paged_prefill import paged_prefill
from baton_kernels.attention.plan import Ranges, SharedPrefix, plan_splits, plan_tiles
from baton_kernels.attention.plan_arrays import SplitArrays
from baton_kernels.attention.reference import reference_attention
from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.attention.tile_descriptors import describe_tiles
from baton_kernels.attention.tiling import AttentionTiling, Tiling
from baton_kernels.gpu import H100, Gpu
from tests.support.kernels.comparison import apart, assert_close, poisoned, random

FP8 = torch.float8_e4m3fn
# Weights are rounded to the type of the queries before they meet the values.
SLACK = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 2.0}


@dataclass(frozen=True, slots=True)
class Case:
    query: torch.Tensor
    kv: PagedKv
    rule: ScoreRule
    tables: torch.Tensor
    ranges: Ranges

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.kv.num_kv_heads

    def of(self, ranges: Ranges) -> "Case":
        """The same batch, asked for these spans alone."""
        return replace(self, ranges=ranges)

    def expected(self) -> torch.Tensor:
        return reference_attention(self.query, self.kv, self.rule, self.tables, self.ranges)

    def poisoned_out(self) -> torch.Tensor:
        query = self.query
        return poisoned(*query.shape, dtype=query.dtype, device=query.device)

    def check(self, out: torch.Tensor) -> None:
        assert_close(out, self.expected(), SLACK[out.dtype])

    def spoil(self, positions: dict[int, int]) -> None:
        """Makes NaN of the K of the token at `positions[i]` of range i."""
        size = self.kv.block_size
        for index, position in positions.items():
            block = self.tables[self.ranges.batch_slots[index], position // size]
            self.kv.keys[block, :, position % size] = torch.nan

    def check_spoilt(self, out: torch.Tensor, expected: torch.Tensor) -> None:
        """Checks that a token is NaN where it sees one that `spoil` made so, and else `expected`,
        from before."""
        sees = self.expected().isnan().any(-1).any(-1)
        if self.kv.keys.dtype != FP8:  # Triton's interpreter reads the NaN of fp8 as 480
            assert out[sees].isnan().any(-1).all()
        assert_close(out[~sees], expected[~sees], SLACK[out.dtype])


def make_case(
    contexts: Sequence[int],
    num_queries: Sequence[int],
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    group: int = 2,
    num_kv_heads: int = 2,
    block_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    is_fp8: bool = False,
    device: torch.device | str = "cpu",
) -> Case:
    """`contexts`: how many tokens each sequence has before those that ask."""
    device = torch.device(device)
    starts, counts = np.array(contexts), np.array(num_queries)
    lengths = starts + counts
    num_blocks = -(-lengths // block_size)
    tables = torch.zeros(len(starts) + 1, int(num_blocks.max()) + 1, dtype=torch.int32)
    ids = torch.randperm(int(num_blocks.sum()) + 2).int() + 1
    cache_dtype = FP8 if is_fp8 else dtype
    pool = poisoned(
        len(ids) + 1, num_kv_heads, 4, block_size, head_dim, dtype=cache_dtype, device=device
    )
    parts = pool[:, :, 1], pool[:, :, 2]
    batch_slots = np.random.default_rng(torch.initial_seed() % 2**32).permutation(len(starts))
    taken = 0
    for batch_slot, length, count in zip(batch_slots, lengths, num_blocks, strict=True):
        mine = ids[taken : taken + count]
        taken += count
        tables[batch_slot, :count] = mine
        for part in parts:
            tokens = part[mine.long()].transpose(1, 2).flatten(0, 1)
            tokens[:length] = random(*tokens[:length].shape, dtype=cache_dtype, device=device)
            part[mine.long()] = tokens.unflatten(0, (-1, block_size)).transpose(1, 2)
    pool[0] = 0.0
    scales = (
        [torch.rand(num_kv_heads, device=device) + 0.5 for _ in parts] if is_fp8 else [None] * 2
    )
    num_heads = group * num_kv_heads
    query = random(int(counts.sum()), num_heads, head_dim, dtype=dtype, device=device)
    sinks = torch.randn(num_heads, device=device) + 1.0 if has_sinks else None
    return Case(
        apart(query, gap=8),
        PagedKv(*parts, *scales),
        ScoreRule(1.5 * head_dim**-0.5, window, softcap, sinks),
        tables.to(device),
        Ranges.of_batch(batch_slots, starts, counts),
    )


def decode(
    case: Case,
    tiling: Tiling,
    splits: SplitRule,
    shared_tiling: Tiling | None = None,
    **plan: object,
) -> torch.Tensor:
    """By `paged_decode` alone, however many tokens a sequence has."""
    query, shared_tiling = case.query, shared_tiling or tiling
    split_plan = plan_splits(
        case.ranges,
        splits,
        tiling.keys,
        tiling.num_tokens(case.group),
        case.rule.window,
        tokens_per_shared_item=shared_tiling.num_tokens(case.group),
        **plan,
    )
    arrays = SplitArrays.of(split_plan, query.device)
    workspace = poisoned_workspace(case, split_plan.num_slots)
    out = case.poisoned_out()
    paged_decode(
        query, out, case.kv, case.rule, case.tables, arrays, workspace, tiling, shared_tiling
    )
    return out


def prefill(case: Case, tiling: Tiling, splits: SplitRule | None = None) -> torch.Tensor:
    """By `paged_prefill` alone, however few tokens a sequence has."""
    tokens_per_tile = tiling.num_tokens(case.group)
    plan = plan_tiles(case.ranges, tokens_per_tile, splits, case.rule.window)
    tiles, out = torch.from_numpy(plan).to(case.query.device), case.poisoned_out()
    arguments = (case.query, out, case.kv, case.rule, case.tables, tiles, tiling)
    paged_prefill(*arguments, merges=splits is not None)
    return out


def by_descriptors(case: Case, tiling: Tiling, gpu: Gpu = H100) -> Case:
    """The same batch, whose prefill loads tiles by descriptors."""
    kv = case.kv
    descriptors = describe_tiles(kv.keys, kv.values, tiling, gpu)
    assert descriptors is not None
    return replace(case, kv=replace(kv, descriptors=descriptors))


def poisoned_workspace(case: Case, num_slots: int) -> Workspace:
    workspace = Workspace.allocate(num_slots, *case.query.shape[1:], case.query.device)
    for tensor in (workspace.acc, workspace.row_max, workspace.row_sum):
        tensor.fill_(torch.nan)
    return workspace


def every_token(case: Case) -> Ranges:
    """Each token of the batch as a span of its own, as it would be decoded."""
    ranges = case.ranges
    of = np.repeat(np.arange(len(ranges)), ranges.num_queries)
    tokens = np.arange(len(of))
    steps = tokens - ranges.first_tokens[of]
    return Ranges(ranges.batch_slots[of], ranges.starts[of] + steps, np.ones_like(of), tokens)


def cut_at_random(ranges: Ranges) -> Ranges:
    """The same tokens in chunks of any size, shuffled."""
    pieces = []
    for batch_slot, start, count, first in zip(
        ranges.batch_slots, ranges.starts, ranges.num_queries, ranges.first_tokens, strict=True
    ):
        inner = np.flatnonzero(torch.rand(max(count - 1, 0)).numpy() < 0.1) + 1
        edges = [0, *inner.tolist(), int(count)]
        for begin, end in itertools.pairwise(edges):
            pieces.append((batch_slot, start + begin, end - begin, first + begin))
    order = torch.randperm(len(pieces)).tolist()
    return Ranges(*np.array([pieces[i] for i in order]).T)


def share(case: Case, members: Sequence[int], num_tokens: int) -> SharedPrefix:
    """Lets the members begin with the blocks of the first of them."""
    batch_slots = torch.from_numpy(case.ranges.batch_slots[list(members)])
    num_blocks = num_tokens // case.kv.block_size
    case.tables[batch_slots, :num_blocks] = case.tables[batch_slots[0], :num_blocks]
    return SharedPrefix(np.array(members), num_tokens)


def attend(
    case: Case,
    tiling: AttentionTiling,
    shared: Sequence[SharedPrefix] = (),
    max_decode_tokens: int = 1,
) -> torch.Tensor:
    """By the kernel that each sequence is given to."""
    plan = plan_attention(
        case.ranges, case.group, tiling, case.rule.window, shared, max_decode_tokens
    )
    assert len(plan.splits.shared_items) >= len(shared)
    arrays = AttentionArrays.of(plan, case.query.device)
    out, workspace = case.poisoned_out(), poisoned_workspace(case, plan.splits.num_slots)
    arguments = (case.query, out, case.kv, case.rule, case.tables, arrays, workspace)
    paged_attention(*arguments, tiling)
    return out
