"""Attention of chunks of prompts over the paged cache, against float64."""

import numpy as np
import pytest
import torch

from baton_kernels.attention.inputs import HEAD_DIMS
from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.attention.tiling import Tiling, choose_tiling
from baton_kernels.gpu import GPUS
from tests.support.kernels.attention_cases import Case, attend, make_case, prefill
from tests.support.kernels.comparison import FLOATS, each_case, pairwise

TILING = Tiling(32, 32, 4, 2)
# One token in all, chunks that begin and end anywhere in a block, a whole prompt, no token.
CONTEXTS, NUM_QUERIES = (0, 0, 31, 9, 5, 64), (1, 16, 18, 40, 0, 3)
CASES = pairwise(
    dtype=FLOATS,
    head_dim=HEAD_DIMS,
    group=(1, 2, 3, 4, 5, 7, 8, 12, 16),
    block_size=(16, 32),
    window=(None, 1, 21, 32, 50),
    softcap=(None, 4.0),
    has_sinks=(False, True),
    is_fp8=(False, True),
    splits=(None, SplitRule.fixed(32), SplitRule(32, 1)),
)


@each_case(CASES, num_quick=6)
def test_prefill_attention_matches_float64_for_prompt_chunks(case: dict) -> None:
    shape = {name: case[name] for name in case if name != "splits"}
    batch = make_case(CONTEXTS, NUM_QUERIES, num_kv_heads=1, **shape)
    batch.check(prefill(batch, TILING, case["splits"]))


# Images in the middle of a chunk, begun before it, two side by side, and up to its last token.
def _with_images(case: Case) -> Case:
    ranges = case.ranges
    slots, positions = ranges.places()
    last_keys = positions.copy()
    for index, begin, end in ((1, 3, 15), (2, 25, 41), (3, 9, 20), (3, 20, 49), (5, 64, 67)):
        is_image = slots == ranges.batch_slots[index]
        last_keys[is_image & (positions >= begin) & (positions < end)] = end - 1
    return case.of(ranges.seeing(last_keys))


@each_case(CASES, num_quick=6)
def test_prefill_attention_sees_whole_images(case: dict) -> None:
    shape = {name: case[name] for name in case if name != "splits"}
    batch = _with_images(make_case(CONTEXTS, NUM_QUERIES, num_kv_heads=1, **shape))
    batch.check(prefill(batch, TILING, case["splits"]))


@each_case(CASES, num_quick=3)
def test_prefill_attention_keeps_broken_keys_apart(case: dict) -> None:
    """From earlier tokens of their chunk, and from later ones beyond a window."""
    shape = {name: case[name] for name in case if name != "splits"}
    batch = _with_images(make_case(CONTEXTS, NUM_QUERIES, num_kv_heads=1, **shape))
    expected = batch.expected()
    batch.spoil({1: 15, 2: 3, 3: 44, 5: 66})
    batch.check_spoilt(prefill(batch, TILING, case["splits"]), expected)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_serves_images_beside_decodes(window: int | None, deterministic: bool) -> None:
    case = _with_images(make_case(CONTEXTS, NUM_QUERIES, torch.float32, 64, 4, 1, window=window))
    tiling = choose_tiling(64, torch.float32, torch.float32, 1, GPUS[90], deterministic)
    case.check(attend(case, tiling, max_decode_tokens=4))


def test_prefill_attention_leaves_tokens_outside_tiles() -> None:
    case = make_case((5, 20, 40), (9, 3, 30))
    out = prefill(case.of(case.ranges[np.array([0, 2])]), TILING)
    assert out[9:12].isnan().all()
    assert not out[:9].isnan().any()
    assert not out[12:].isnan().any()


def test_prefill_attention_launches_nothing_for_empty_batch() -> None:
    case = make_case((5, 9), (1, 1))
    assert prefill(case.of(case.ranges[:0]), TILING).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "target", "deterministic"),
    [
        (torch.bfloat16, 128, 90, False),
        (torch.float16, 80, 80, False),
        (torch.bfloat16, 256, 90, True),
        (torch.float32, 64, 90, False),
    ],
    ids=str,
)
def test_attention_serves_ragged_batch_of_prefills_and_decodes(
    dtype: torch.dtype, head_dim: int, target: int, deterministic: bool
) -> None:
    case = make_case((0, 300, 17, 600, 0, 2), (200, 1, 4, 33, 1, 0), dtype, head_dim, 4, 1)
    tiling = choose_tiling(head_dim, dtype, dtype, 1, GPUS[target], deterministic)
    case.check(attend(case, tiling))
