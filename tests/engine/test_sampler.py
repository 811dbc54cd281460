"""Sampling against transformers' logits processors, Random123's vectors and plain statistics."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from baton.engine.random import philox, uniform
from baton.engine.sampler import SamplingRow, _truncate, sample
from baton.sampling import SamplingParams

CPU = torch.device("cpu")


def rows(num_rows: int, **params: object) -> list[SamplingRow]:
    return [SamplingRow(SamplingParams(**params), i) for i in range(num_rows)]  # type: ignore[arg-type]


def logits_of(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> list[torch.Tensor]:
        return [torch.tensor([int(word, 16)] * 2) for word in text.split()]

    assert [w.tolist() for w in philox(words(counter), words(key))] == [
        w.tolist() for w in words(expected)
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(0, 2**40)),
        min_size=1,
        max_size=20,
    )
)
def test_a_random_number_depends_on_nothing_but_seed_sequence_and_position(
    places: list[tuple[int, int, int]],
) -> None:
    seeds, indices, positions = map(list, zip(*places, strict=True))
    together = uniform(seeds, indices, positions, CPU)
    assert together.dtype == torch.float64
    assert bool(((together >= 0) & (together < 1)).all())
    single = [uniform([s], [i], [p], CPU).item() for s, i, p in places]
    assert together.tolist() == single


def test_each_part_of_a_place_changes_the_number() -> None:
    places = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**32)]
    numbers = uniform(*map(list, zip(*places, strict=True)), CPU)
    assert len(set(numbers.tolist())) == len(places)


def kept_by_transformers(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    logits = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.top_k:
        logits = TopKLogitsWarper(params.top_k)(ids, logits)
    if params.top_p < 1.0:
        logits = TopPLogitsWarper(params.top_p)(ids, logits)
    return logits


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 2, 7, 1000])
@pytest.mark.parametrize("top_p", [0.999, 0.95, 0.5, 0.01])
def test_the_tokens_that_stay_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = logits_of(16, 300)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = kept_by_transformers(logits, params)
    got = _truncate(
        logits / temperature, rows(16, temperature=temperature, top_k=top_k, top_p=top_p)
    )
    assert torch.equal(got.isfinite(), expected.isfinite())
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_rows_of_one_batch_are_cut_each_by_its_own_parameters() -> None:
    logits = logits_of(4, 300)
    every = [
        SamplingParams(temperature=1.0, top_k=3, top_p=0.99),
        SamplingParams(temperature=1.0, top_p=0.4),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=9, top_p=0.7),
    ]
    got = _truncate(logits, [SamplingRow(p, 0) for p in every])
    for row, params in enumerate(every):
        expected = kept_by_transformers(logits[row : row + 1], params)
        assert torch.equal(got[row : row + 1], expected)


def test_a_tiny_top_p_leaves_the_most_likely_token() -> None:
    logits = logits_of(50, 40)
    tokens, _ = sample(logits, rows(50, temperature=1.0, top_p=1e-9))
    assert tokens == logits.argmax(-1).tolist()


def test_top_k_of_one_is_greedy_even_among_equals() -> None:
    tokens, _ = sample(torch.zeros(9, 30), rows(9, temperature=5.0, top_k=1))
    assert len(set(tokens)) == 1


def test_greedy_rows_do_not_notice_random_ones() -> None:
    logits = logits_of(20, 100)
    mixed = [
        SamplingRow(SamplingParams(temperature=2.0 * (i % 2), seed=i, top_k=5 * (i % 4)), i)
        for i in range(20)
    ]
    tokens, _ = sample(logits, mixed)
    assert tokens[::2] == logits.argmax(-1)[::2].tolist()


@given(st.integers(0, 2**32), st.permutations(range(6)))
@settings(deadline=None)
def test_a_random_row_does_not_notice_its_neighbours(seed: int, order: list[int]) -> None:
    logits = logits_of(6, 64, seed=seed % 1000)
    every = [
        SamplingRow(SamplingParams(temperature=1.0, seed=seed), 3),
        SamplingRow(SamplingParams(temperature=9.0, top_k=4, seed=seed), 4),
        SamplingRow(SamplingParams(), 5),
        SamplingRow(SamplingParams(temperature=1.0, top_p=0.3, seed=1), 3),
        SamplingRow(SamplingParams(temperature=0.7, seed=2), 0),
        SamplingRow(SamplingParams(temperature=1.0, seed=2), 1),
    ]
    alone = [sample(logits[i : i + 1], [row])[0][0] for i, row in enumerate(every)]
    together, _ = sample(logits[order], [every[i] for i in order])
    assert together == [alone[i] for i in order]


def test_a_row_that_wants_every_token_keeps_every_token_beside_rows_that_do_not() -> None:
    logits = logits_of(2, 300)
    every = [
        SamplingRow(SamplingParams(temperature=1.0), 0),
        SamplingRow(SamplingParams(temperature=1.0, top_p=0.5), 0),
    ]
    assert bool(_truncate(logits, every)[0].isfinite().all())


def test_top_k_without_top_p_keeps_k_tokens() -> None:
    logits = logits_of(16, 300) / 0.3
    kept = _truncate(logits, rows(16, temperature=1.0, top_k=7)).isfinite().sum(-1)
    assert kept.tolist() == [7] * 16


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 2.0}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9}],
)
def test_draws_are_distributed_as_the_softmax_says(params: dict[str, float]) -> None:
    num_draws, vocab_size = 20_000, 10
    full = SamplingParams(**{"temperature": 1.0, "seed": 42, **params})  # type: ignore[arg-type]
    logits = logits_of(1, vocab_size, seed=1, scale=1.0)
    expected = kept_by_transformers(logits, full).softmax(-1)[0].double() * num_draws
    tokens, _ = sample(
        logits.expand(num_draws, -1), [SamplingRow(full, i) for i in range(num_draws)]
    )
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab_size).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected) ** 2 / expected)[possible].sum().item()
    # The 99.9 % point of chi-square with 9 degrees of freedom; fewer degrees have a lower one.
    assert chi_square < 27.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_log_softmax_of_the_untouched_logits(dtype: torch.dtype) -> None:
    logits = logits_of(8, 50).to(dtype)
    every = [
        SamplingRow(SamplingParams(temperature=float(i % 3), top_k=i, logprobs=i == 0), i)
        for i in range(8)
    ]
    before = logits.clone()
    tokens, logprobs = sample(logits, every)
    assert torch.equal(logits, before), "the logits were changed"
    expected = logits.double().log_softmax(-1)[range(8), tokens]
    torch.testing.assert_close(torch.tensor(logprobs).double(), expected, rtol=0, atol=1e-5)


def test_no_logprobs_are_computed_when_nobody_asks() -> None:
    assert sample(logits_of(2, 9), rows(2))[1] == [0.0, 0.0]


@pytest.mark.parametrize(
    "temperature",
    [
        1e-3,
        1e-30,
        1e-40,
        1e-300,
    ],
)
def test_the_smallest_temperatures_are_as_good_as_greedy(temperature: float) -> None:
    logits = logits_of(5, 60)
    tokens, _ = sample(logits, rows(5, temperature=temperature, seed=3))
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.5},
    ],
)
def test_broken_logits_still_give_a_token_of_the_vocabulary(
    bad: float, params: dict[str, float]
) -> None:
    tokens, _ = sample(torch.full((2, 30), bad), rows(2, **params))
    assert all(0 <= token < 30 for token in tokens)


@pytest.mark.parametrize("bits", [0, 2**53 - 1])
def test_the_extreme_draws_choose_possible_tokens(bits: int) -> None:
    cumulative = torch.tensor([[0.0, 0.25, 0.25, 0.9999999, 0.9999999]], dtype=torch.float64)
    target = torch.tensor([[bits * 2.0**-53]], dtype=torch.float64) * cumulative[:, -1:]
    assert torch.searchsorted(cumulative, target, right=True).item() in (1, 3)
