"""Sampling on a GPU at the size of a real vocabulary, against the sampler of the CPU."""

import numpy as np
import pytest
import torch
from kernel_checks import FLOATS, assert_close
from sampling_cases import KINDS, chosen_by_the_cpu, params_of, places, rows_of

from kernels.penalties import History, Penalties, penalise, reference_penalise
from kernels.row_summary import reference_token_logprobs
from kernels.sampling import sample

pytestmark = pytest.mark.gpu
VOCAB_SIZE = 128256
NUM_ROWS = 256


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [0.2, 2.0, 8.0])
def test_tokens_are_those_of_the_cpus_sampler(
    gpu: torch.device, scale: float, dtype: torch.dtype
) -> None:
    """Chances are rounded otherwise, so that a draw in a million may differ: one may here."""
    logits = (scale * torch.randn(NUM_ROWS, VOCAB_SIZE, device=gpu)).to(dtype)
    params = params_of([KINDS[row % len(KINDS)] for row in range(NUM_ROWS)])
    indices, positions = places(NUM_ROWS)
    logprobs = torch.full((NUM_ROWS,), torch.nan, device=gpu)
    rows = rows_of(params, indices, positions, VOCAB_SIZE, gpu)
    drawn = sample(logits, rows, logprobs=logprobs)
    expected = chosen_by_the_cpu(logits, params, indices, positions)
    assert (drawn.cpu() != expected).sum() <= 1
    assert_close(logprobs, reference_token_logprobs(logits.double(), drawn))


def test_a_row_has_the_same_token_alone_and_in_any_batch(gpu: torch.device) -> None:
    logits = 3 * torch.randn(NUM_ROWS, VOCAB_SIZE, device=gpu)
    params = params_of([KINDS[row % len(KINDS)] for row in range(NUM_ROWS)])
    indices, positions = places(NUM_ROWS)
    together = sample(logits, rows_of(params, indices, positions, VOCAB_SIZE, gpu))
    for row in range(0, NUM_ROWS, 5):
        only = slice(row, row + 1)
        rows = rows_of(params[only], indices[only], positions[only], VOCAB_SIZE, gpu)
        assert sample(logits[only], rows) == together[row]


def test_penalised_scores_are_bitwise_those_of_the_reference(gpu: torch.device) -> None:
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
