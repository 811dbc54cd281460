"""Drawn tokens against the sampler of the CPU, and what the kernels' ways have to agree on."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from baton.engine.executor.sampling.random import uniform as uniform_of_the_cpu
from baton.sampling import SamplingParams
from baton_kernels.sampling.philox import uniform
from baton_kernels.sampling.row_summary import Tiling, logprobs_of, reference_logprobs, summarise
from baton_kernels.sampling.sampling import MOST_TOKENS, Plan, sample
from tests.support.kernels.comparison import FLOATS, assert_close, each_case, pairwise
from tests.support.kernels.sampling_cases import (
    KINDS,
    chosen_by_the_cpu,
    kinds_of,
    params_of,
    places,
    rows_of,
)

# Small enough that a few thousand tokens are many tiles, and that rows are left over.
PLAN = Plan(Tiling(tile=512, strip=16), capacity=64, wanted=16)


@triton.jit
def _uniform_kernel(seeds, indices, positions, out):
    row = tl.program_id(0)
    number = uniform(tl.load(seeds + row), tl.load(indices + row), tl.load(positions + row))
    tl.store(out + row, number)


def test_random_numbers_are_bitwise_those_of_the_cpu(seed: int) -> None:
    seeds = np.random.default_rng(seed).integers(0, 2**64, 50, np.uint64)
    indices, positions = places(50)
    out = torch.empty(50, dtype=torch.float64)
    _uniform_kernel[(50,)](torch.from_numpy(seeds.view(np.int64)), indices, positions, out)
    expected = uniform_of_the_cpu(seeds, indices.numpy(), positions.numpy())
    assert np.array_equal(out.numpy(), expected)


def check(logits: torch.Tensor, params: list[SamplingParams], plan: Plan = PLAN) -> None:
    indices, positions = places(len(logits))
    rows = rows_of(params, indices, positions, logits.shape[1])
    drawn = sample(logits, rows, plan=plan)
    assert drawn.tolist() == chosen_by_the_cpu(logits, params, indices, positions).tolist()


CASES = sorted(
    pairwise(
        vocab_size=(1, 2, 37, 512, 1500, 4000),
        scale=(0.1, 1.0, 5.0, 40.0),
        dtype=FLOATS,
        first_kind=(0, 5, 9),
    ),
    key=lambda case: case["vocab_size"] > 512,
)


@each_case(CASES, num_quick=5)
def test_sampler_draws_tokens_of_cpu_sampler(case: dict) -> None:
    logits = case["scale"] * torch.randn(5, case["vocab_size"])
    check(logits.to(case["dtype"]), params_of(kinds_of(5, case["first_kind"])))


def test_sampler_draws_tokens_of_cpu_sampler_with_default_plan() -> None:
    check(4 * torch.randn(7, 9000), params_of(KINDS[1:8]), Plan())


@pytest.mark.parametrize(("num_values", "vocab_size"), [(1, 50), (2, 120), (7, 200)])
def test_sampler_orders_ties_by_token_id(num_values: int, vocab_size: int) -> None:
    """Logits of few values, so that thresholds lie within ties, of which there may be too many."""
    logits = torch.randint(num_values, (len(KINDS), vocab_size)).float()
    check(logits, params_of(KINDS))


def test_sampler_counts_scores_equal_after_temperature_as_ties() -> None:
    """Neighbouring floats whose quotients by the temperature are one."""
    logits = torch.full((4, 120), 1.0)
    for step in range(1, 4):
        logits[:, step::4] = torch.nextafter(logits[:, step - 1 :: 4][:, :30], torch.tensor(2.0))
    logits[:, 0] = 1.7
    kinds = [{"temperature": t, "top_k": k} for t in (1.9, 3.0) for k in (3, 50)]
    check(logits, params_of(kinds))


def test_sampler_draws_tokens_of_cpu_sampler_under_grammar() -> None:
    logits = torch.full((len(KINDS), 1000), -torch.inf)
    for row in logits:
        row[torch.randperm(1000)[:9]] = torch.randn(9)
    check(logits, params_of(KINDS))


@pytest.mark.parametrize("logit", [-torch.inf, torch.nan, torch.inf])
def test_sampler_draws_valid_token_from_non_finite_logits(logit: float) -> None:
    rows = rows_of(params_of(KINDS[:6]), *places(6), 90)
    drawn = sample(torch.full((6, 90), logit), rows, plan=PLAN)
    assert ((drawn >= 0) & (drawn < 90)).all()


def test_sampler_draws_same_token_in_any_batch() -> None:
    logits, params = 3 * torch.randn(4, 700), params_of([KINDS[i] for i in (1, 4, 5, 9)])
    indices, positions = places(4)
    together = sample(logits, rows_of(params, indices, positions, 700), plan=PLAN)
    for row in range(4):
        only = slice(row, row + 1)
        rows = rows_of(params[only], indices[only], positions[only], 700)
        assert sample(logits[only], rows, plan=PLAN) == together[row]


@pytest.mark.slow
def test_sampler_draws_tokens_by_their_probabilities() -> None:
    """Each row draws once; that of a token is within four deviations of its chance."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5]).expand(1200, 5)
    params = [SamplingParams(temperature=1.0, seed=int(torch.randint(2**62, ())))] * 1200
    rows = rows_of(params, torch.zeros(1200).long(), torch.arange(1200), 5)
    counts = torch.bincount(sample(logits, rows, plan=Plan(Tiling(8, 4))), minlength=5)
    chances = logits[0].double().softmax(-1)
    deviations = (1200 * chances * (1 - chances)).sqrt()
    assert ((counts - 1200 * chances).abs() < 4.5 * deviations).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 37, 1500])
def test_token_logprobs_ignore_temperature(vocab_size: int, dtype: torch.dtype) -> None:
    logits = (6 * torch.randn(3, vocab_size)).to(dtype)
    rows = rows_of(params_of(KINDS[:3]), *places(3), vocab_size)
    logprobs = torch.full((3,), torch.nan)
    drawn = sample(logits, rows, logprobs=logprobs, plan=PLAN)
    expected = reference_logprobs(logits.double(), drawn)
    assert_close(logprobs, expected, rounded=1.0)  # the sum whose logarithm it is: 1 at least


def test_token_logprobs_are_exact_when_most_logits_are_infinite() -> None:
    logits = torch.full((1, 2000), -torch.inf)
    logits[0, 1700:1702] = torch.tensor([1.0, 2.0])
    summary, token = summarise(logits, torch.zeros(1), PLAN.tiling), torch.tensor([1701])
    found = logprobs_of(logits, token, summary, torch.empty(1))
    assert_close(found, reference_logprobs(logits.double(), token))


def test_sampler_refuses_wrong_shape_or_too_large_vocabulary() -> None:
    rows = rows_of(params_of(KINDS[:2]), *places(2), 9)
    with pytest.raises(ValueError, match=r"temperature has shape \(2,\); must have \(3,\)"):
        sample(torch.zeros(3, 9), rows)
    with pytest.raises(ValueError, match=f"must have 1 to {MOST_TOKENS}"):
        sample(torch.zeros(2, 1).expand(2, MOST_TOKENS + 1), rows)
