"""Biases and bans of single tokens against torch, bit by bit."""

import pytest
import torch

from baton_kernels.sampling.penalties import History
from baton_kernels.sampling.token_rules import (
    Bans,
    Biases,
    add_biases,
    ban,
    reference_add_biases,
    reference_ban,
)
from tests.support.kernels.comparison import apart, each_case, pairwise


def cells(num_rows: int, vocab_size: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different ones, in no order."""
    chosen = torch.randperm(num_rows * vocab_size)[:count]
    return chosen // vocab_size, chosen % vocab_size


@each_case(
    pairwise(num_rows=(1, 5), vocab_size=(3, 70), count=(0, 1, 3, 200), is_apart=(False, True))
)
def test_add_biases_changes_only_given_tokens(case: dict) -> None:
    num_rows, vocab_size = case["num_rows"], case["vocab_size"]
    count = min(case["count"], num_rows * vocab_size)
    scores = torch.randn(num_rows, vocab_size)
    expected = scores.clone()
    given = apart(scores) if case["is_apart"] else scores
    biases = Biases(*cells(num_rows, vocab_size, count), 5 * torch.randn(count))
    add_biases(given, biases)
    reference_add_biases(expected, biases)
    assert torch.equal(given, expected)


def history_of(num_rows: int, num_tokens: int) -> History:
    """Few different tokens, so that endings recur; some rows have no history."""
    tokens = torch.randint(2, (num_rows + 3, 40), dtype=torch.int32)
    lengths = torch.randint(num_tokens + 1, (num_rows,))
    batch_slots = torch.randperm(num_rows + 3)[:num_rows]
    return History(tokens, batch_slots, lengths, torch.zeros_like(lengths), num_tokens)


@each_case(
    pairwise(
        num_rows=(1, 6), num_tokens=(0, 1, 3, 40), width=(0, 1, 2, 5, 32),
        count=(0, 1, 70), is_apart=(False, True),
    )
)  # fmt: skip
def test_ban_applies_where_history_ends_with_prefix(case: dict) -> None:
    num_rows, count, width = case["num_rows"], case["count"], case["width"]
    history = history_of(num_rows, case["num_tokens"])
    rows = torch.randint(num_rows, (count,))
    bans = Bans(
        rows,
        torch.randint(90, (count,)),
        torch.randint(width + 1, (count,)),
        torch.randint(2, (count, width), dtype=torch.int32),
    )
    for i in range(0, count, 3):  # some long endings that are there
        num = min(int(history.lengths[rows[i]]), width)
        ending = history.token_ids[history.batch_slots[rows[i]], : history.lengths[rows[i]]]
        bans.prefixes[i, :num] = ending.flip(0)[:num]
        bans.prefix_lengths[i] = num
    scores = torch.randn(num_rows, 90)
    expected = scores.clone()
    given = apart(scores) if case["is_apart"] else scores
    ban(given, bans, history if width else None)
    reference_ban(expected, bans, history)
    assert torch.equal(given, expected)


def test_token_rules_refuse_wrong_shape_or_dtype() -> None:
    scores, none = torch.zeros(2, 9), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="scores is float16; must be float32"):
        add_biases(scores.half(), Biases(none, none, torch.zeros(1)))
    with pytest.raises(ValueError, match=r"values has shape \(2,\); must have \(1,\)"):
        add_biases(scores, Biases(none, none, torch.zeros(2)))
    prefixes = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="prefixes are given without the history"):
        ban(scores, Bans(none, none, none, prefixes))
    with pytest.raises(ValueError, match="prefixes have 33 tokens; may have at most 32"):
        ban(scores, Bans(none, none, none, torch.zeros(1, 33, dtype=torch.int32)))
