"""Prefixes that running sequences share, attended once for all of them, against float64."""

import torch

from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.attention.tiling import Tiling
from tests.support.kernels.attention_cases import decode, make_case, share
from tests.support.kernels.comparison import each_case, pairwise

TILING, SHARED = Tiling(16, 32, 4, 2), Tiling(32, 64, 4, 2)
SPLITS = SplitRule(64, 3)
CASES = pairwise(
    dtype=(torch.bfloat16, torch.float32),
    head_dim=(64, 80),
    group=(1, 3, 8),
    softcap=(None, 4.0),
    has_sinks=(False, True),
    is_fp8=(False, True),
)


@each_case(CASES)
def test_cascade_counts_shared_prefix_once_per_member(case: dict) -> None:
    batch = make_case((140, 3, 150, 128), (1, 1, 1, 2), num_kv_heads=1, **case)
    prefix = share(batch, [3, 0, 2], 128)
    batch.check(decode(batch, TILING, SPLITS, SHARED, shared=[prefix]))


def test_cascade_attends_several_prefixes_with_own_members() -> None:
    case = make_case((140, 3, 150, 128, 130, 64), (1, 1, 1, 2, 1, 1), group=1)
    prefixes = [share(case, [3, 0], 128), share(case, [5, 2], 64)]
    case.check(decode(case, TILING, SPLITS, SHARED, shared=prefixes))


def test_cascade_cuts_prefix_with_more_members_than_tile() -> None:
    case = make_case([64] * 9, [1] * 9, group=5, num_kv_heads=1)
    prefix = share(case, list(range(9)), 64)
    case.check(decode(case, TILING, SPLITS, SHARED, shared=[prefix]))
