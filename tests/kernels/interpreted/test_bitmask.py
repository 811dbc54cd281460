"""Masks of allowed tokens against torch and against the sampler of the CPU, bit by bit."""

import pytest
import torch

from baton.engine.executor.sampling.logits_processors import restrict as restrict_by_the_cpu
from baton_kernels.sampling.bitmask import reference_restrict, restrict
from tests.support.kernels.comparison import apart, each_case, pairwise


@each_case(
    pairwise(
        vocab_size=(1, 31, 32, 33, 1000, 4096, 9001),
        num_masks=(0, 1, 4),
        allowed=("few", "half", "all", "none"),
        banned=(0.0, 0.9, 1.0),
        is_apart=(False, True),
    )
)
def test_bitmask_is_bitwise_that_of_cpu_sampler(case: dict) -> None:
    vocab_size, num_masks = case["vocab_size"], case["num_masks"]
    scores = torch.randn(5, vocab_size)
    scores[torch.rand_like(scores) < case["banned"]] = -torch.inf
    rows = torch.randperm(5)[:num_masks]
    words = torch.randint(-(2**31), 2**31, (num_masks, -(-vocab_size // 32)), dtype=torch.int32)
    if case["allowed"] == "few":
        words[torch.rand(words.shape) < 0.99] = 0
    elif case["allowed"] != "half":
        words.fill_(-1 if case["allowed"] == "all" else 0)
    expected, by_reference = scores.clone(), scores.clone()
    given = (apart(scores), apart(words)) if case["is_apart"] and num_masks else (scores, words)
    restrict(given[0], rows, given[1])
    if num_masks:
        restrict_by_the_cpu(expected, rows.numpy(), words.numpy())
        reference_restrict(by_reference, rows, words)
    assert torch.equal(given[0], expected)
    assert torch.equal(by_reference, expected)


def test_bitmask_applies_when_only_nan_score_is_left() -> None:
    scores = torch.tensor([[torch.nan, -torch.inf, 1.0]])
    restrict(scores, torch.tensor([0]), torch.tensor([[3]], dtype=torch.int32))
    assert scores[0, 0].isnan()
    assert scores[0, 1:].tolist() == [-torch.inf, -torch.inf]


def test_bitmask_refuses_wrong_shape_or_dtype() -> None:
    rows, words = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"bitmask has shape \(1, 2\); must have \(1, 1\)"):
        restrict(torch.zeros(1, 32), rows, words)
    with pytest.raises(ValueError, match="bitmask is int64; must be int32"):
        restrict(torch.zeros(1, 64), rows, words.long())
