"""The deterministic mode: a token's attention is the same, bit by bit, however it is computed."""

import pytest
import torch

from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.attention.tiling import Tiling, choose_tiling
from tests.support.kernels.attention_cases import (
    Case,
    attend,
    cut_at_random,
    decode,
    every_token,
    make_case,
    prefill,
    share,
)
from tests.support.kernels.comparison import FLOATS, each_case, pairwise
from tests.support.kernels.interpreter import compute_rows_alike

TILING = Tiling(32, 32, 4, 2)
SPLITS = SplitRule(32, 3)
CASES = sorted(
    pairwise(
        dtype=FLOATS,
        head_dim=(64, 80, 128),
        group=(1, 3, 4, 16),
        window=(None, 21, 70),
        softcap=(None, 4.0),
        has_sinks=(False, True),
        is_fp8=(False, True),
    ),
    key=lambda case: case["group"],
)


@pytest.fixture(autouse=True)
def _rows_are_computed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_rows_alike(monkeypatch)


def check(case: Case, tiling: Tiling, splits: SplitRule) -> None:
    whole = prefill(case, tiling, splits)
    case.check(whole)
    assert torch.equal(prefill(case.of(cut_at_random(case.ranges)), tiling, splits), whole)
    decoded = case.of(every_token(case))
    assert torch.equal(decode(decoded, tiling, splits), whole)
    assert torch.equal(decode(case.of(cut_at_random(case.ranges)), tiling, splits), whole)
    token = int(torch.randint(len(whole), ()))
    alone = decoded.of(decoded.ranges[token : token + 1])
    for compute in (prefill, decode):
        assert torch.equal(compute(alone, tiling, splits)[token], whole[token])


@each_case(CASES, num_quick=3)
def test_deterministic_attention_is_same_in_decode_and_chunks(case: dict) -> None:
    check(make_case((0, 92), (19, 7), num_kv_heads=1, **case), TILING, SPLITS)


@pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_deterministic_attention_is_same_with_chosen_tiling(head_dim: int) -> None:
    bf16 = torch.bfloat16
    tiling = choose_tiling(head_dim, bf16, bf16, 1, deterministic=True)
    assert tiling.decode == tiling.shared == tiling.prefill
    assert tiling.prefill_splits == tiling.splits
    case = make_case((505, 3), (12, 2), bf16, head_dim, group=4, num_kv_heads=1)
    check(case, tiling.prefill, tiling.splits)


def test_deterministic_attention_is_same_with_shared_prefix() -> None:
    bf16 = torch.bfloat16
    tiling = choose_tiling(64, bf16, bf16, 1, deterministic=True)
    case = make_case((600, 5, 530), (1, 1, 3), bf16, group=4, num_kv_heads=1)
    prefix = share(case, [0, 2], tiling.splits.least)
    out = attend(case, tiling)
    case.check(out)
    assert torch.equal(attend(case, tiling, [prefix]), out)
