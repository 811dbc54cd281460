"""Sampling on a GPU at the size of a real vocabulary, against the sampler of the CPU."""

import numpy as np
import pytest
import torch

from baton_kernels.sampling.bitmask import reference_restrict, restrict
from baton_kernels.sampling.penalties import History, Penalties, penalise, reference_penalise
from baton_kernels.sampling.row_summary import reference_logprobs
from baton_kernels.sampling.sampling import sample
from baton_kernels.sampling.token_rules import (
    Bans,
    Biases,
    add_biases,
    ban,
    reference_add_biases,
    reference_ban,
)
from tests.support.kernels.comparison import FLOATS, assert_close
from tests.support.kernels.sampling_cases import (
    chosen_by_the_cpu,
    kinds_of,
    params_of,
    places,
    rows_of,
)

pytestmark = pytest.mark.gpu
VOCAB_SIZE = 128256
NUM_ROWS = 256


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [0.2, 2.0, 8.0])
def test_sampler_draws_tokens_of_cpu_sampler(
    gpu: torch.device, scale: float, dtype: torch.dtype
) -> None:
    """Chances are rounded otherwise, so that a draw in a million may differ: one may here."""
    logits = (scale * torch.randn(NUM_ROWS, VOCAB_SIZE, device=gpu)).to(dtype)
    params = params_of(kinds_of(NUM_ROWS))
    indices, positions = places(NUM_ROWS)
    logprobs = torch.full((NUM_ROWS,), torch.nan, device=gpu)
    rows = rows_of(params, indices, positions, VOCAB_SIZE, gpu)
    drawn = sample(logits, rows, logprobs=logprobs)
    expected = chosen_by_the_cpu(logits, params, indices, positions)
    assert (drawn.cpu() != expected).sum() <= 1
    expected = reference_logprobs(logits.double(), drawn)
    assert_close(logprobs, expected, rounded=1.0)  # the sum whose logarithm it is: 1 at least


def test_sampler_draws_same_token_in_any_batch(gpu: torch.device) -> None:
    logits = 3 * torch.randn(NUM_ROWS, VOCAB_SIZE, device=gpu)
    params = params_of(kinds_of(NUM_ROWS))
    indices, positions = places(NUM_ROWS)
    together = sample(logits, rows_of(params, indices, positions, VOCAB_SIZE, gpu))
    for row in range(0, NUM_ROWS, 5):
        only = slice(row, row + 1)
        rows = rows_of(params[only], indices[only], positions[only], VOCAB_SIZE, gpu)
        assert sample(logits[only], rows) == together[row]


def test_penalties_are_bitwise_those_of_reference(gpu: torch.device) -> None:
    tokens = torch.randint(-1, 5000, (NUM_ROWS, 4096), dtype=torch.int32)
    lengths = torch.randint(1, 4097, (NUM_ROWS,))
    history = History(tokens, torch.randperm(NUM_ROWS), lengths, lengths // 3, 4096)
    penalties = Penalties(*(0.5 + torch.rand(3, NUM_ROWS)))
    scores = 5 * torch.randn(NUM_ROWS, VOCAB_SIZE)
    on_gpu, counts = (
        scores.to(gpu),
        torch.zeros(NUM_ROWS, VOCAB_SIZE, dtype=torch.int32, device=gpu),
    )
    penalise(
        on_gpu,
        History(*(getattr(history, n).to(gpu) for n in History.__slots__[:4]), longest=4096),
        Penalties(*(getattr(penalties, name).to(gpu) for name in Penalties.__slots__)),
        counts,
    )
    reference_penalise(scores, history, penalties)
    assert np.array_equal(on_gpu.cpu().numpy(), scores.numpy())
    assert not counts.any()


def test_token_rules_are_bitwise_those_of_reference(gpu: torch.device) -> None:
    num_rules, width = 20_000, 31
    cells = torch.randperm(NUM_ROWS * VOCAB_SIZE, device=gpu)[:num_rules]
    rows, token_ids = cells // VOCAB_SIZE, cells % VOCAB_SIZE
    biases = Biases(rows, token_ids, torch.randn(num_rules, device=gpu))
    lengths = torch.randint(1, 4097, (NUM_ROWS,), device=gpu)
    tokens = torch.randint(2, (NUM_ROWS, 4096), dtype=torch.int32, device=gpu)
    history = History(tokens, torch.randperm(NUM_ROWS, device=gpu), lengths, 0 * lengths, 4096)
    prefix_lengths = torch.randint(width + 1, (num_rules,), device=gpu) ** 2 // width
    prefixes = torch.randint(2, (num_rules, width), dtype=torch.int32, device=gpu)
    bans = Bans(rows.flip(0), token_ids.flip(0) + 0, prefix_lengths, prefixes)
    scores = torch.randn(NUM_ROWS, VOCAB_SIZE, device=gpu)
    expected = scores.clone()
    add_biases(scores, biases)
    reference_add_biases(expected, biases)
    assert torch.equal(scores, expected)
    ban(scores, bans, history)
    on_cpu = expected.cpu()
    reference_ban(
        on_cpu,
        Bans(*(getattr(bans, name).cpu() for name in Bans.__slots__)),
        History(*(getattr(history, name).cpu() for name in History.__slots__[:4]), longest=4096),
    )
    assert torch.equal(scores.cpu(), on_cpu)


def test_bitmask_is_bitwise_that_of_reference(gpu: torch.device) -> None:
    words = torch.randint(-(2**31), 2**31, (200, VOCAB_SIZE // 32), dtype=torch.int32, device=gpu)
    words[::3] &= words.flip(1)[::3]
    words[1::3] = 0
    words[1::3, 77] = 1 << 9
    rows = torch.randperm(NUM_ROWS, device=gpu)[:200]
    scores = torch.randn(NUM_ROWS, VOCAB_SIZE, device=gpu)
    scores[rows[1::6], 77 * 32 + 9] = -torch.inf  # with which nothing is left
    expected = scores.clone()
    restrict(scores, rows, words)
    reference_restrict(expected, rows, words)
    assert torch.equal(scores, expected)
