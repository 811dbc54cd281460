"""Attention of few queries over splits of the context, against float64."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from baton_kernels.attention.inputs import HEAD_DIMS, check_model
from baton_kernels.attention.paged_attention import plan_attention
from baton_kernels.attention.paged_decode import paged_decode
from baton_kernels.attention.plan import plan_splits
from baton_kernels.attention.plan_arrays import SplitArrays, SplitCapacity, pack
from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.attention.tiling import AttentionTiling, Tiling, choose_tiling
from tests.support.kernels.attention_cases import (
    attend,
    decode,
    every_token,
    make_case,
    poisoned_workspace,
)
from tests.support.kernels.comparison import FLOATS, each_case, pairwise
from tests.support.kernels.interpreter import compute_rows_alike

TILING = Tiling(16, 32, 4, 2)
SPLITS = SplitRule(64, 2)
# One token in all, one before a block is full, a full one, one behind; a split's edge; no sequence.
CONTEXTS, NUM_QUERIES = (0, 14, 15, 16, 63, 64, 3, 150), (1, 1, 1, 1, 1, 1, 0, 1)
CASES = pairwise(
    dtype=FLOATS,
    head_dim=HEAD_DIMS,
    group=(1, 2, 3, 4, 5, 7, 8, 12, 16),
    block_size=(16, 32),
    window=(None, 1, 21, 64, 100),
    softcap=(None, 4.0),
    has_sinks=(False, True),
    is_fp8=(False, True),
    num_kv_heads=(1, 2),
)


@each_case(CASES, num_quick=6)
def test_decode_attention_matches_float64_for_one_token_each(case: dict) -> None:
    batch = make_case(CONTEXTS, NUM_QUERIES, **case)
    batch.check(decode(batch, TILING, SPLITS))


@pytest.mark.parametrize("group", [1, 3, 16])
def test_decode_attention_is_causal_among_tokens_of_sequence(group: int) -> None:
    case = make_case((0, 15, 60, 100), (5, 3, 6, 1), group=group, num_kv_heads=1, window=21)
    case.check(decode(case, TILING, SPLITS))


@pytest.mark.parametrize("window", [None, 21])
def test_decode_attention_keeps_broken_drafts_apart(window: int | None) -> None:
    case = make_case((0, 15, 60, 100), (5, 3, 6, 1), num_kv_heads=1, window=window)
    expected = case.expected()
    case.spoil({0: 3, 1: 17, 2: 62, 3: 2})
    case.check_spoilt(decode(case, TILING, SPLITS), expected)


def test_decode_attention_is_batch_invariant() -> None:
    case = make_case((5, 150, 70, 64), (1, 3, 1, 1), softcap=4.0, has_sinks=True)
    together = decode(case, TILING, SPLITS)
    for i in range(len(case.ranges)):
        range_ = case.ranges[i : i + 1]
        alone = decode(case.of(range_), TILING, SPLITS)
        tokens = slice(range_.first_tokens[0], range_.first_tokens[0] + range_.num_queries[0])
        assert torch.equal(alone[tokens], together[tokens])


@pytest.mark.parametrize("window", [None, 21])
def test_drafts_are_attended_as_if_decoded_one_by_one(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Though a program holds 4 of the tokens of a sequence, of which one has longer splits."""
    compute_rows_alike(monkeypatch)
    case = make_case((5, 123, 62, 70), (1, 9, 5, 2), group=4, num_kv_heads=1, window=window)
    prefill = replace(TILING, rows=64)
    tiling = AttentionTiling(TILING, TILING, prefill, SPLITS, merges_in_prefill=False)
    plan = plan_attention(case.ranges, case.group, tiling, window, max_decode_tokens=9)
    assert not len(plan.tiles)
    one_by_one = attend(case.of(every_token(case)), tiling)
    assert torch.equal(attend(case, tiling, max_decode_tokens=9), one_by_one)


def test_decode_attention_leaves_tokens_outside_plan() -> None:
    case = make_case((5, 20, 70), (1, 1, 1))
    some = case.of(case.ranges[np.array([0, 2])])
    out = decode(some, TILING, SPLITS)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], decode(case, TILING, SPLITS)[[0, 2]])


def test_decode_attention_zeroes_unused_room_of_plan() -> None:
    case = make_case((5, 100, 0, 0), (1, 1, 1, 1))
    ranges = case.ranges[:2]
    plan = plan_splits(ranges, SPLITS, TILING.keys, TILING.num_tokens(case.group))
    capacity = SplitCapacity(items=20, shared_items=3, members=4)
    arrays = SplitArrays.view(torch.from_numpy(pack(plan, capacity)), capacity)
    out, workspace = case.poisoned_out(), poisoned_workspace(case, 20)
    arguments = (case.query, out, case.kv, case.rule, case.tables, arrays, workspace)
    paged_decode(*arguments, TILING, TILING)
    assert torch.equal(out[:2], decode(case.of(ranges), TILING, SPLITS)[:2])
    assert not out[2:].any()


def test_decode_attention_launches_nothing_for_empty_batch() -> None:
    case = make_case((5, 9), (1, 1))
    assert decode(case.of(case.ranges[:0]), TILING, SPLITS).isnan().all()


def test_decode_attention_checks_cache_of_layer_once() -> None:
    """As it is put together, and not again in each of its steps."""
    case, called = make_case((5, 9), (1, 1), is_fp8=True), []
    nothing = case.of(case.ranges[:0])
    sys.setprofile(lambda frame, *_: called.append(frame.f_code.co_name))
    try:
        decode(nothing, TILING, SPLITS)
    finally:
        sys.setprofile(None)
    assert "check_inputs" in called
    assert not {"check_pool_views", "check_fp8"} & {*called}


def test_decode_attention_gives_zero_when_sinks_dominate() -> None:
    case = make_case((40,), (1,), has_sinks=True)
    assert case.rule.sinks is not None
    case.rule.sinks.fill_(200.0)
    assert decode(case, TILING, SPLITS).abs().max() < 1e-30


@pytest.mark.parametrize("chosen", [(64, torch.bfloat16), (128, torch.float16)], ids=str)
def test_decode_attention_matches_float64_with_chosen_tiling(
    chosen: tuple[int, torch.dtype],
) -> None:
    head_dim, dtype = chosen
    tiling = choose_tiling(head_dim, dtype, dtype, num_kv_heads=1)
    case = make_case((600, 255, 3), (1, 1, 2), dtype, head_dim, group=4, num_kv_heads=1)
    case.check(decode(case, tiling.decode, tiling.splits))


def test_attention_refuses_unsupported_model_shape_or_dtype() -> None:
    def run(**changes: object) -> None:
        decode(replace(make_case((5,), (1,)), **changes), TILING, SPLITS)

    case = make_case((5,), (1,))
    with pytest.raises(
        ValueError, match=r"head size of 72 .* 64, 80, 96, 128 and 256 have: use the"
    ):
        check_model(num_heads=4, num_kv_heads=2, head_dim=72)
    with pytest.raises(
        ValueError, match=r"34 query heads over 2 KV heads .* may be 1 to 16 for each"
    ):
        check_model(num_heads=34, num_kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match="5 query heads over 2 KV heads"):
        check_model(num_heads=5, num_kv_heads=2, head_dim=64)
    with pytest.raises(
        ValueError, match="query is float64; must be bfloat16 or float16 or float32"
    ):
        run(query=case.query.double())
    with pytest.raises(ValueError, match="the KV cache is float32; must be float16"):
        run(query=case.query.half())
    with pytest.raises(ValueError, match="block tables is int64; must be int32"):
        run(tables=case.tables.long())
    with pytest.raises(ValueError, match="window is 0; must be at least 1, or None"):
        run(rule=replace(case.rule, window=0))
    with pytest.raises(ValueError, match=r"softcap is 0.0; must be above 0, or None"):
        run(rule=replace(case.rule, softcap=0.0))
    with pytest.raises(ValueError, match=r"scale is -1.0; must be above 0"):
        run(rule=replace(case.rule, scale=-1.0))
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\); must have \(4,\)"):
        run(rule=replace(case.rule, sinks=torch.zeros(3)))
    with pytest.raises(ValueError, match=r"values has shape .*; must have \(4, 2, 16, 64\)"):
        run(kv=replace(case.kv, values=case.kv.values[:, :, :8]))
    with pytest.raises(ValueError, match=r"keys have strides .* both must be views of one pool"):
        run(kv=replace(case.kv, values=case.kv.values.contiguous()))
    with pytest.raises(ValueError, match="last dimensions must be contiguous"):
        run(kv=replace(case.kv, keys=case.kv.keys.transpose(2, 3).contiguous().transpose(2, 3)))


def test_pack_refuses_plan_larger_than_capacity() -> None:
    plan = plan_splits(make_case((5,), (1,)).ranges, SPLITS, 32, 8)
    with pytest.raises(
        ValueError, match=r"items=1, .* more than .*items=0, .* capture a larger one"
    ):
        pack(plan, SplitCapacity(0, 0, 1))
