"""The matrix products of experts: right, and bitwise the same in any batch."""

import pytest
import torch

from baton_kernels.rows.experts import (
    BLOCK_ROWS,
    combine_experts,
    expert_linear,
    reference_combine_experts,
    reference_expert_linear,
    route,
)
from tests.support.kernels.comparison import (
    FLOATS,
    assert_close,
    each_case,
    on_poisoned_memory,
    pairwise,
    random,
)

CASES = pairwise(
    num_tokens=(1, 3, 70),
    num_experts=(1, 4, 9),
    choices=(1, 2, 4),
    num_columns=(1, 80, 200),
    depth=(8, 72, 130),
    has_own_rows=(False, True),
    has_bias=(False, True),
    dtype=FLOATS,
)


def choose(num_tokens: int, num_experts: int, choices: int) -> torch.Tensor:
    """Different experts for each token, the last of all for none."""
    some = max(num_experts - 1, 1)
    return torch.rand(num_tokens, some).argsort(-1)[:, : min(choices, some)]


@each_case(CASES, num_quick=6)
def test_expert_linear_matches_float64(case: dict) -> None:
    dtype = case["dtype"]
    chosen = choose(case["num_tokens"], case["num_experts"], case["choices"])
    num_rows = chosen.numel() if case["has_own_rows"] else case["num_tokens"]
    x = random(num_rows, case["depth"], dtype=dtype)
    shape = (case["num_experts"], case["num_columns"], case["depth"])
    weight = random(*shape, dtype=dtype)
    bias = random(*shape[:2], dtype=dtype) if case["has_bias"] else None
    out = on_poisoned_memory(expert_linear, x, weight, route(chosen, case["num_experts"]), bias)
    exact = None if bias is None else bias.double()
    assert_close(out, reference_expert_linear(x.double(), weight.double(), chosen, exact))


def test_expert_linear_is_batch_invariant() -> None:
    x, weight = torch.randn(70, 100), torch.randn(4, 60, 100)
    chosen = choose(70, 4, 2)
    together = expert_linear(x, weight, route(chosen, 4)).unflatten(0, (70, 2))
    for rows in ([0], [69], [5, 64, 3]):
        alone = expert_linear(x[rows], weight, route(chosen[rows], 4)).unflatten(0, (-1, 2))
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "choices"), [(1, 1, 1), (5, 8, 2), (300, 3, 2)]
)
def test_routing_tiles_have_one_expert_and_every_pair_once(
    num_tokens: int, num_experts: int, choices: int
) -> None:
    chosen = choose(num_tokens, num_experts, choices)
    routing = route(chosen, num_experts)
    tiles = routing.pairs.unflatten(0, (-1, BLOCK_ROWS))
    assert len(tiles) == len(routing.experts)
    found = []
    for pairs, expert in zip(tiles, routing.experts.tolist(), strict=True):
        real = pairs[pairs < routing.num_pairs]
        assert expert < num_experts or not len(real)
        assert (chosen.flatten()[real.long()] == expert).all()
        found += real.tolist()
    assert sorted(found) == list(range(chosen.numel()))


@each_case(pairwise(num_tokens=(1, 4), choices=(1, 3, 8), width=(1, 100, 1100), dtype=FLOATS))
def test_combine_experts_matches_float64(case: dict) -> None:
    num_pairs = case["num_tokens"] * case["choices"]
    x = random(num_pairs, case["width"], dtype=case["dtype"])
    weights = torch.rand(case["num_tokens"], case["choices"]).to(case["dtype"])
    out = on_poisoned_memory(combine_experts, x, weights)
    assert_close(out, reference_combine_experts(x.double(), weights.double()))


def test_expert_linear_refuses_wrong_shape() -> None:
    weight, routing = torch.randn(4, 6, 8), route(torch.tensor([[0, 1], [2, 1], [3, 0]]), 4)
    with pytest.raises(ValueError, match="x has 4 rows; must have one for each of 3 tokens"):
        expert_linear(torch.randn(4, 8), weight, routing)
    with pytest.raises(ValueError, match=r"x has shape \(3, 7\); must have \(3, 8\)"):
        expert_linear(torch.randn(3, 7), weight, routing)
    with pytest.raises(ValueError, match=r"bias has shape \(4, 5\); must have \(4, 6\)"):
        expert_linear(torch.randn(3, 8), weight, routing, torch.randn(4, 5))
