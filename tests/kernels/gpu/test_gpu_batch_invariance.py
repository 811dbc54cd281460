"""The batch-invariant matrix products on a GPU: right, and bitwise the same in any batch."""

import pytest
import torch

from baton_kernels.rows.expert_choice import choose_experts, reference_choose_experts
from baton_kernels.rows.experts import (
    combine_experts,
    expert_linear,
    reference_combine_experts,
    reference_expert_linear,
    route,
)
from baton_kernels.rows.linear import linear, reference_linear
from tests.support.kernels.comparison import FLOATS, assert_close, random

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
BATCHES = (1, 2, 7, 64, 129, 1024)
# Of an 8B-shaped Llama (QKV, output, down, head), and one in which nothing is a round number.
WEIGHTS = pytest.mark.parametrize(
    ("num_columns", "depth"), [(6144, 4096), (4096, 14336), (128256, 512), (1000, 777)]
)


@DTYPES
@WEIGHTS
def test_linear_matches_float64_and_is_batch_invariant(
    gpu: torch.device, num_columns: int, depth: int, dtype: torch.dtype
) -> None:
    x = random(max(BATCHES), depth, dtype=dtype, device=gpu)
    weight = random(num_columns, depth, dtype=dtype, device=gpu)
    bias = random(num_columns, dtype=dtype, device=gpu)
    together = linear(x, weight, bias)
    # Products of float32 sums of so many terms lose a few units in the last place.
    expected = reference_linear(x[:200].double(), weight.double(), bias.double())
    assert_close(together[:200], expected, slack=2.0)
    for num_rows in BATCHES:
        begin = max(BATCHES) - num_rows
        assert torch.equal(linear(x[begin:], weight, bias), together[begin:])
        assert torch.equal(linear(x[:num_rows], weight, bias), together[:num_rows])


@DTYPES
def test_expert_linear_matches_float64_and_is_batch_invariant(
    gpu: torch.device, dtype: torch.dtype
) -> None:
    x = random(1024, 2048, dtype=dtype, device=gpu)
    weight = random(16, 1536, 2048, dtype=dtype, device=gpu)
    chosen = torch.rand(1024, 16, device=gpu).argsort(-1)[:, :4]
    bias = random(16, 1536, dtype=dtype, device=gpu)
    together = expert_linear(x, weight, route(chosen, 16), bias)
    exact = (weight.double(), chosen[:8], bias.double())
    expected = reference_expert_linear(x[:8].double(), *exact)
    assert_close(together[:32], expected, slack=2.0)
    for num_rows in (1, 3, 65, 500):
        alone = expert_linear(x[:num_rows], weight, route(chosen[:num_rows], 16), bias)
        assert torch.equal(alone, together[: 4 * num_rows])


@DTYPES
@pytest.mark.parametrize("is_share_of_chosen", [False, True])
def test_expert_choice_matches_float64_and_is_batch_invariant(
    gpu: torch.device, is_share_of_chosen: bool, dtype: torch.dtype
) -> None:
    logits = random(1024, 128, dtype=dtype, device=gpu)  # of which in bf16 many are equal
    kind = {"is_share_of_chosen": is_share_of_chosen}
    chosen, weights = choose_experts(logits, 8, **kind)
    expected = reference_choose_experts(logits.double(), 8, **kind)
    assert torch.equal(chosen, expected[0])
    assert_close(weights, expected[1])
    for num_rows in (1, 3, 65, 500):
        alone = choose_experts(logits[-num_rows:], 8, **kind)
        assert torch.equal(alone[0], chosen[-num_rows:])
        assert torch.equal(alone[1], weights[-num_rows:])


@DTYPES
def test_combine_experts_matches_float64(gpu: torch.device, dtype: torch.dtype) -> None:
    x = random(4 * 999, 2048, dtype=dtype, device=gpu)
    weights = torch.rand(999, 4, device=gpu).to(dtype)
    expected = reference_combine_experts(x.double(), weights.double())
    assert_close(combine_experts(x, weights), expected)
