"""The choice of experts: right, of one order among equals, and bitwise the same in any batch."""

import pytest
import torch

from baton_kernels.rows.expert_choice import choose_experts, reference_choose_experts
from tests.support.kernels.comparison import (
    FLOATS,
    apart,
    assert_close,
    each_case,
    pairwise,
    random,
)


@each_case(
    pairwise(
        num_tokens=(1, 5),
        num_experts=(1, 2, 8, 60, 128),
        choices=(1, 2, 4, 10),
        is_share_of_chosen=(False, True),
        is_apart=(False, True),
        dtype=FLOATS,
    )
)
def test_expert_choice_takes_most_likely_with_weights(case: dict) -> None:
    num_experts, is_share = case["num_experts"], case["is_share_of_chosen"]
    choices = min(case["choices"], num_experts)
    logits = 3 * random(case["num_tokens"], num_experts, dtype=case["dtype"])
    given = apart(logits) if case["is_apart"] else logits
    chosen, weights = choose_experts(given, choices, is_share_of_chosen=is_share)
    expected = reference_choose_experts(logits.double(), choices, is_share_of_chosen=is_share)
    assert torch.equal(chosen, expected[0])
    assert_close(weights, expected[1])


def test_expert_choice_orders_ties_by_number() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0], [0.0] * 6])
    chosen, weights = choose_experts(logits, 4, is_share_of_chosen=True)
    assert chosen.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert weights[1].tolist() == [0.25] * 4


def test_expert_choice_is_batch_invariant() -> None:
    logits = torch.randn(20, 48)
    together = choose_experts(logits, 6, is_share_of_chosen=False)
    for rows in ([0], [19], [7, 3]):
        alone = choose_experts(logits[rows], 6, is_share_of_chosen=False)
        assert all(torch.equal(a, t[rows]) for a, t in zip(alone, together, strict=True))


@pytest.mark.parametrize("logit", [-torch.inf, torch.nan, torch.inf])
def test_expert_choice_stays_in_range_for_non_finite_logits(logit: float) -> None:
    chosen, _ = choose_experts(torch.full((3, 5), logit), 2, is_share_of_chosen=True)
    assert ((chosen >= 0) & (chosen < 5)).all()


def test_expert_choice_is_empty_without_tokens() -> None:
    chosen, weights = choose_experts(torch.empty(0, 4), 2, is_share_of_chosen=True)
    assert chosen.shape == weights.shape == (0, 2)


def test_expert_choice_refuses_more_choices_than_experts() -> None:
    with pytest.raises(ValueError, match="5 of 4 experts are to be chosen; must be at least 1"):
        choose_experts(torch.zeros(2, 4), 5, is_share_of_chosen=True)
