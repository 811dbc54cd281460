"""Sampling against transformers' own generation, Random123's vectors and plain statistics."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, GenerationMixin

from baton.engine.executor.sampling.batch_state import SamplingColumns
from baton.engine.executor.sampling.draw import draw, largest
from baton.engine.executor.sampling.random import philox, uniform
from baton.engine.executor.sampling.sampler import Sampled, Sampler, score
from baton.sampling import SamplingParams

CPU = torch.device("cpu")
EOS = 2
Row = tuple[SamplingParams, int]  # with its output position
NUM_PROMPT_TOKENS = 5


def logits_of(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def histories_of(num_batch_slots: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Few different tokens, so that they repeat."""
    tokens = np.random.default_rng(seed).integers(0, min(vocab_size, 12), (num_batch_slots, 40))
    return tokens.astype(np.int32)


def bitmask_of(is_allowed: np.ndarray) -> np.ndarray:
    num_rows, vocab_size = is_allowed.shape
    padded = np.zeros((num_rows, -(-vocab_size // 32) * 32), np.uint8)
    padded[:, :vocab_size] = is_allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def sample(
    logits: torch.Tensor,
    rows: Sequence[Row],
    histories: np.ndarray | None = None,
    sequence_indices: Sequence[int] | None = None,
    is_allowed: np.ndarray | None = None,
) -> Sampled:
    """Row i on slot i."""
    sampler = Sampler(len(rows), logits.shape[-1], logits.device, frozenset({EOS}))
    for batch_slot, (params, _) in enumerate(rows):
        sampler.assign(batch_slot, params, NUM_PROMPT_TOKENS)
    batch_slots = np.arange(len(rows))
    return sampler.choose(
        logits,
        batch_slots,
        np.array(sequence_indices or [0] * len(rows)),
        NUM_PROMPT_TOKENS + np.array([position for _, position in rows], np.int64),
        histories_of(len(rows), logits.shape[-1]) if histories is None else histories,
        None if is_allowed is None else (batch_slots, bitmask_of(is_allowed)),
    ).fetch()


def chosen(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    return sample(logits, rows).token_ids.tolist()


def same(num_rows: int, **params: object) -> list[Row]:
    return [(SamplingParams(**params), i) for i in range(num_rows)]  # type: ignore[arg-type]


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
def test_philox_matches_random123_vectors(counter, key, expected):
    def words(text: str) -> np.ndarray:
        return np.array([[int(word, 16)] * 2 for word in text.split()], np.uint64)

    assert np.array_equal(philox(words(counter), words(key)), words(expected))


def numbers_of(places: Sequence[tuple[int, int, int]]) -> list[float]:
    seeds, indices, positions = zip(*places, strict=True)
    return uniform(np.array(seeds, np.uint64), np.array(indices), np.array(positions)).tolist()


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(0, 2**40)),
        min_size=1,
        max_size=20,
    )
)
def test_random_numbers_depend_on_seed_sequence_and_position(places):
    together = numbers_of(places)
    assert all(0 <= number < 1 for number in together)
    assert together == [numbers_of([place])[0] for place in places]


def test_random_numbers_change_with_each_part_of_the_place():
    places = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**32)]
    assert len(set(numbers_of(places))) == len(places)


def test_random_numbers_equal_those_of_the_first_release():
    """A request that another version goes on with has to draw what this one would have drawn."""
    places = [(0, 0, 0), (42, 1, 7), (2**64 - 1, 15, 2**33)]
    assert numbers_of(places) == [0.39904647231489565, 0.02225327171579694, 0.44956929242309607]


class Generation(GenerationMixin):
    """As much of a transformers model as its choice and order of processors needs."""

    config = SimpleNamespace(is_encoder_decoder=False, get_text_config=lambda: None)


def processed_by_transformers(
    logits: torch.Tensor,
    params: SamplingParams,
    history: Sequence[int],
    is_allowed: np.ndarray | None = None,
) -> torch.Tensor:
    """`[1, vocab_size]`: what `generate` of transformers would draw from, or take the largest of.

    Presence and frequency penalties, which transformers has not, are not applied.
    """
    config = GenerationConfig(
        do_sample=not params.is_greedy,
        num_beams=1,
        num_return_sequences=1,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty,
        sequence_bias=[[[i], bias] for i, bias in params.logit_bias] or None,
        bad_words_ids=[list(ids) for ids in params.bad_token_ids] or None,
        min_new_tokens=params.min_tokens or None,
    )
    config._eos_token_tensor = torch.tensor([EOS, *params.stop_token_ids])
    constraint = None
    if is_allowed is not None:
        constraint = lambda *_: np.flatnonzero(is_allowed).tolist()  # noqa: E731
    processors = Generation()._get_logits_processor(
        config,
        input_ids_seq_length=NUM_PROMPT_TOKENS,
        prefix_allowed_tokens_fn=constraint,
        device="cpu",
    )
    return processors(torch.tensor([history]), logits.float())


def expected_of_transformers(
    logits: torch.Tensor, row: Row, history: np.ndarray, is_allowed: np.ndarray | None = None
) -> int:
    params, position = row
    past = history[: NUM_PROMPT_TOKENS + position].tolist()
    scores = processed_by_transformers(logits, params, past, is_allowed)[0]
    if params.is_greedy:
        return int(scores.argmax())
    cumulative = scores.double().softmax(-1).cumsum(-1)
    number = numbers_of([(params.seed or 0, 0, position)])[0]
    return int((cumulative > number * cumulative[-1]).nonzero()[0])


VARIETY = {
    "plain": {},
    "bias": {"logit_bias": ((3, 9.5), (7, -100.0), (1, 0.1))},
    "repetition": {"repetition_penalty": 1.7},
    "encouragement": {"repetition_penalty": 0.6},
    "bad words": {"bad_token_ids": ((4,), (EOS,), (1, 5), (3, 2, 9), tuple(range(32)))},
    "minimum": {"min_tokens": 9, "stop_token_ids": (5, 6)},
    "everything": {
        "logit_bias": ((3, 6.0), (EOS, 50.0), (5, 40.0)),
        "repetition_penalty": 1.3,
        "bad_token_ids": ((3,), (4, 4)),
        "min_tokens": 9,
        "stop_token_ids": (5,),
    },
}
DRAWS = {
    "greedy": {},
    "hot": {"temperature": 2.5},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.2},
    "all three": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    "more than there are": {"temperature": 1.0, "top_k": 10_000, "top_p": 0.999},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_grammar", [False, True])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("variety", VARIETY.values(), ids=VARIETY)
def test_sampler_chooses_as_transformers(variety, draw, with_grammar, dtype, seed):
    random = np.random.default_rng(seed)
    # Equal logits are ordered by us and not by transformers: so none are equal, penalised or not.
    permutations = np.stack([random.permutation(70) for _ in range(9)])
    logits = (torch.from_numpy(permutations) / 8 - 4 + 1 / 32).to(dtype)
    rows = [(SamplingParams(**variety, **draw, seed=i), 3 * i) for i in range(9)]
    histories = histories_of(9, 70, seed)
    is_allowed = random.random((9, 70)) < 0.5 if with_grammar else None
    got = sample(logits, rows, histories, is_allowed=is_allowed).token_ids.tolist()
    assert got == [
        expected_of_transformers(
            logits[i : i + 1], row, histories[i], None if is_allowed is None else is_allowed[i]
        )
        for i, row in enumerate(rows)
    ]


def params_strategy() -> st.SearchStrategy[SamplingParams]:
    token = st.integers(0, 39)
    return st.just(SamplingParams()) | st.builds(
        SamplingParams,
        max_tokens=st.just(100),
        temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0, 30.0]),
        top_k=st.sampled_from([0, 0, 1, 3, 20, 1000]),
        top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        seed=st.integers(0, 2**64 - 1),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 0.5]),
        presence_penalty=st.sampled_from([0.0, 0.0, 2.0, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.2]),
        logit_bias=st.dictionaries(token, st.floats(-100, 100), max_size=4).map(
            lambda biases: tuple(biases.items())
        ),
        bad_token_ids=st.lists(
            st.lists(st.integers(0, 11), min_size=1, max_size=3).map(tuple), max_size=5
        ).map(tuple),
        min_tokens=st.sampled_from([0, 0, 3, 50]),
        stop_token_ids=st.sampled_from([(), (7, 8), (2**40,)]),
        logprobs=st.booleans(),
    )


@given(
    st.lists(st.tuples(params_strategy(), st.integers(0, 30)), min_size=1, max_size=8),
    st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.floats(0, 1),
)
@settings(max_examples=200)
def test_sampler_rows_are_independent(batch_slots, seed, dtype, density):
    """Nor that its slot has other rows, at other lengths, as the drafts of a sequence do."""
    num_rows = 2 * len(batch_slots) + 1
    # Rounded, so that many are equal.
    logits = logits_of(num_rows, 40, seed).round().to(dtype)
    sampler = Sampler(len(batch_slots), 40, CPU, frozenset({EOS}))
    for batch_slot, (params, _) in enumerate(batch_slots):
        sampler.assign(batch_slot, params, NUM_PROMPT_TOKENS)
    random = np.random.default_rng(seed)
    histories = histories_of(len(batch_slots), 40, seed)
    owners = random.integers(0, len(batch_slots), num_rows)
    indices = random.integers(0, 3, num_rows)
    lengths = NUM_PROMPT_TOKENS + random.integers(0, 30, num_rows)
    masked = np.flatnonzero(random.random(num_rows) < 0.5)
    bitmask = bitmask_of(random.random((len(masked), 40)) < density)
    together = sampler.choose(
        logits, owners, indices, lengths, histories, (masked, bitmask)
    ).fetch()
    for i in range(num_rows):
        one = slice(i, i + 1)
        at = np.flatnonzero(masked == i)
        allowed = (np.zeros(1, np.int64), bitmask[at]) if at.size else None
        past = histories.copy()
        past[owners[i], lengths[i] :] = 39
        alone = sampler.choose(
            logits[one], owners[one], indices[one], lengths[one], past, allowed
        ).fetch()
        assert alone.token_ids[0] == together.token_ids[i]
        assert 0 <= alone.token_ids[0] < 40
        if alone.logprobs is not None:
            assert together.logprobs is not None
            assert alone.logprobs[0] == together.logprobs[i]


def test_sampler_slot_keeps_nothing_of_its_former_sequence():
    sampler = Sampler(1, 9, CPU, frozenset({EOS}))
    full = SamplingParams(
        max_tokens=99, min_tokens=99, temperature=3.0, logit_bias=((4, 90.0),),
        bad_token_ids=((5,), (6,)), stop_token_ids=(7,), logprobs=True, presence_penalty=2.0,
    )  # fmt: skip
    sampler.assign(0, full, 1)
    sampler.assign(0, SamplingParams(bad_token_ids=((1,),)), 1)
    zero = np.zeros(1, np.int64)
    for best in (EOS, 4, 5, 6, 7):
        logits = torch.zeros(1, 9)
        logits[0, [best, 1]] = torch.tensor([1.0, 2.0])
        got = sampler.choose(logits, zero, zero, zero + 1, np.full((1, 3), 7, np.int32)).fetch()
        assert got.token_ids.tolist() == [best]
        assert got.logprobs is None


def test_sampler_slot_keeps_its_lists_beside_a_larger_one():
    rows = [
        (SamplingParams(logit_bias=((8, 50.0),), bad_token_ids=((0,), (1,))), 0),
        (
            SamplingParams(
                logit_bias=tuple((i, 1.0) for i in range(3, 203)),
                bad_token_ids=tuple((i,) for i in range(3, 203)),
            ),
            0,
        ),
    ]
    assert chosen(torch.zeros(2, 300), rows) == [8, 0]


@pytest.mark.parametrize("vocab_size", [30, 1000])
def test_top_k_keeps_k_tokens_even_among_equals(vocab_size):
    for k in (1, 3):
        got = chosen(torch.zeros(99, vocab_size), same(99, temperature=5.0, top_k=k))
        assert set(got) == set(range(k))


def test_min_p_of_one_keeps_all_most_likely_tokens():
    logits = torch.tensor([0.0, 2.0, 1.999, 2.0]).expand(200, -1)
    assert set(chosen(logits, same(200, temperature=50.0, min_p=1.0))) == {1, 3}


def test_sampler_row_without_filters_draws_from_all_tokens():
    rows = same(2000, temperature=100.0)
    for i in range(0, 2000, 2):
        rows[i] = (SamplingParams(temperature=100.0, top_p=0.5, top_k=3), i)
    got = chosen(torch.arange(12.0).expand(2000, -1), rows)
    assert set(got[0::2]) == {10, 11}
    assert set(got[1::2]) == set(range(12))


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the p-value of Pearson's chi-square test."""
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0].double(), expected[expected > 0]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), chi_square / 2)
    )


NUM_DRAWS = 120_000


@pytest.mark.parametrize("draw", list(DRAWS.values())[1:], ids=list(DRAWS)[1:])
@pytest.mark.parametrize("over", ["positions", "sequences"])
def test_draws_follow_the_softmax(draw, over):
    logits = logits_of(1, 24, seed=1, scale=1.0)
    params = SamplingParams(**draw, seed=42)
    sampler = Sampler(1, 24, CPU, frozenset())
    sampler.assign(0, params, 1)
    zeros, counter = np.zeros(NUM_DRAWS, np.int64), np.arange(NUM_DRAWS)
    indices, positions = (zeros, counter) if over == "positions" else (counter, zeros)
    got = sampler.choose(
        logits.expand(NUM_DRAWS, -1), zeros, indices, 1 + positions, np.zeros((1, 1), np.int32)
    ).fetch()
    expected = processed_by_transformers(logits, params, [0]).double().softmax(-1)[0] * NUM_DRAWS
    counts = torch.bincount(torch.from_numpy(got.token_ids), minlength=24)
    assert p_value(counts, expected) > 1e-4


def test_draws_under_grammar_and_penalties_follow_their_softmax():
    logits = logits_of(1, 24, seed=2, scale=1.0)
    params = SamplingParams(
        temperature=1.3, seed=7, presence_penalty=0.5, frequency_penalty=0.25,
        repetition_penalty=1.2, logit_bias=((1, 1.0),),
    )  # fmt: skip
    sampler = Sampler(1, 24, CPU, frozenset())
    sampler.assign(0, params, 2)
    history = np.array([[9, 9, 3, 3, 3, 5, 1]], np.int32)
    is_allowed = np.arange(24) % 4 != 2
    expected = processed_by_transformers(
        logits, dataclasses.replace(params, temperature=1.0), history[0].tolist()
    )[0]
    expected[[3, 5, 1]] -= torch.tensor([0.5 + 3 * 0.25, 0.75, 0.75])
    expected[~torch.from_numpy(is_allowed)] = -torch.inf
    zeros = np.zeros(NUM_DRAWS, np.int64)
    got = sampler.choose(
        logits.expand(NUM_DRAWS, -1), zeros, np.arange(NUM_DRAWS), zeros + 7, history,
        (np.arange(NUM_DRAWS), bitmask_of(is_allowed[None]).repeat(NUM_DRAWS, 0)),
    ).fetch()  # fmt: skip
    counts = torch.bincount(torch.from_numpy(got.token_ids), minlength=24)
    assert p_value(counts, (expected / 1.3).double().softmax(-1) * NUM_DRAWS) > 1e-4


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1e-3, 1.0), (1e-30, 1.0), (1e-40, 1.0), (1e-300, 1.0), (1.0, 1e-9)]
)
def test_tiny_temperatures_equal_greedy(temperature, top_p):
    logits = logits_of(50, 60)
    got = chosen(logits, same(50, temperature=temperature, top_p=top_p, seed=3))
    assert got == logits.argmax(-1).tolist()


BROKEN = {
    "greedy": {},
    "random": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.5, "min_p": 0.5},
    "top_k": {"temperature": 1.0, "top_k": 2},
    "penalties": {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "logit_bias": ((0, 1.0),)},
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", BROKEN.values(), ids=BROKEN)
def test_nan_or_infinite_logits_yield_a_token_and_spare_others(bad, params):
    logits = logits_of(4, 30)
    logits[1] = bad
    logits[3, 7] = bad
    got = chosen(logits, same(4, **params))
    assert all(0 <= token < 30 for token in got)
    assert [got[0], got[2]] == [
        sample(logits[i : i + 1], [same(4, **params)[i]], histories_of(4, 30)[i : i + 1]).token_ids
        for i in (0, 2)
    ]


@pytest.mark.parametrize("params", BROKEN.values(), ids=BROKEN)
def test_sampler_row_with_nothing_allowed_yields_a_token(params):
    got = sample(logits_of(2, 33), same(2, **params), is_allowed=np.zeros((2, 33), bool))
    assert all(0 <= token < 33 for token in got.token_ids)
    everything = tuple((i,) for i in range(33))
    got = sample(logits_of(2, 33), same(2, **params, bad_token_ids=everything))
    assert all(0 <= token < 33 for token in got.token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammar_overrides_banned_tokens(temperature):
    """A token that breaks the grammar could not be taken back. Older transformers end with nothing
    to choose from there."""
    params = SamplingParams(
        temperature=temperature, min_tokens=9, bad_token_ids=((5,), (6,)), stop_token_ids=(9,)
    )
    is_allowed = np.zeros((4, 40), bool)
    is_allowed[0, EOS] = is_allowed[1, 9] = is_allowed[2, [5, 8]] = is_allowed[3, [5, 6, 9]] = True
    logits, rows, histories = logits_of(4, 40), [(params, 1)] * 4, histories_of(4, 40)
    got = sample(logits, rows, histories, is_allowed=is_allowed).token_ids.tolist()
    assert got[:3] == [EOS, 9, 8]
    comparable = range(4) if Version(transformers.__version__) >= Version("5.23") else [2]
    for i in comparable:
        assert got[i] == expected_of_transformers(
            logits[i : i + 1], rows[i], histories[i], is_allowed[i]
        )


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64, 100])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_bitmask_bits_map_to_their_tokens(vocab_size, as_tensor):
    sampler = Sampler(1, vocab_size, CPU, frozenset())
    sampler.assign(0, SamplingParams(), 1)
    bitmask = bitmask_of(np.eye(vocab_size, dtype=bool))
    bitmask.flags.writeable = False
    mask = torch.from_numpy(bitmask.copy()) if as_tensor else bitmask
    zeros = np.zeros(vocab_size, np.int64)
    got = sampler.choose(
        torch.zeros(vocab_size, vocab_size), zeros, zeros, zeros + 1, np.zeros((1, 9), np.int32),
        (np.arange(vocab_size)[::-1], mask),
    ).fetch()  # fmt: skip
    assert got.token_ids.tolist() == list(range(vocab_size))[::-1]


def test_ignore_eos_does_not_forbid_the_end_token():
    logits = torch.zeros(1, 9)
    logits[0, EOS] = 1.0
    assert chosen(logits, same(1, ignore_eos=True)) == [EOS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_log_softmax_of_unprocessed_logits(dtype):
    logits = logits_of(8, 50).to(dtype)
    rows = [
        (
            SamplingParams(
                temperature=float(i % 3), top_k=i, logit_bias=((3, 4.0),), repetition_penalty=1.5,
                logprobs=i % 2 == 0, top_logprobs=i // 2 if i % 2 == 0 else 0,
            ),
            i,
        )
        for i in range(8)
    ]  # fmt: skip
    before = logits.clone()
    got = sample(logits, rows)
    assert torch.equal(logits, before), "the logits were changed"
    assert got.logprobs is not None
    assert got.top_ids is not None
    assert got.top_logprobs is not None
    assert got.logprobs.dtype == got.top_logprobs.dtype == np.float32
    assert got.top_ids.shape == got.top_logprobs.shape == (8, 3)
    assert got.logprobs[1::2].tolist() == [0.0] * 4
    all_logprobs = logits.double().log_softmax(-1).numpy()
    for i in range(0, 8, 2):
        k = i // 2
        expected = all_logprobs[i]
        np.testing.assert_allclose(got.logprobs[i], expected[got.token_ids[i]], atol=1e-5)
        assert got.top_ids[i, :k].tolist() == np.argsort(-expected, stable=True)[:k].tolist()
        np.testing.assert_allclose(
            got.top_logprobs[i, :k], expected[got.top_ids[i, :k]], rtol=0, atol=1e-5
        )


def test_logprobs_are_not_computed_unless_requested():
    for params in ({}, {"temperature": 1.0}):
        got = sample(logits_of(2, 9), same(2, **params))
        assert got.logprobs is got.top_ids is got.top_logprobs is None
    assert sample(logits_of(2, 9), same(2, logprobs=True)).top_ids is None


def test_top_logprobs_are_capped_at_the_vocabulary():
    got = sample(logits_of(2, 9), same(2, logprobs=True, top_logprobs=20))
    assert got.top_ids is not None
    assert np.sort(got.top_ids).tolist() == [list(range(9))] * 2


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returns meanwhile, other than a view."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.num_elements = max(self.num_elements, out.numel())
        return out


def test_score_takes_memory_for_few_rows_at_once():
    logits, targets = logits_of(1000, 300), np.arange(1000) % 300
    with Largest() as largest:
        score(logits, targets, 5)
    assert largest.num_elements <= 64 * 300


@pytest.mark.parametrize("k", [0, 1, 5, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_score_returns_log_probabilities(k, dtype):
    """Covers more rows than are scored at once, too."""
    logits = logits_of(150, 30).to(dtype)
    targets = np.arange(150) * 4 % 30
    scores = score(logits, targets, k).fetch()
    expected = logits.double().log_softmax(-1)
    np.testing.assert_allclose(scores.logprobs, expected[range(150), targets], rtol=0, atol=1e-5)
    assert scores.top_ids.shape == scores.top_logprobs.shape == (150, min(k, 30))
    top = expected.sort(dim=-1, descending=True, stable=True)
    assert scores.top_ids.tolist() == top.indices[:, :k].tolist()
    np.testing.assert_allclose(scores.top_logprobs, top.values[:, :k], rtol=0, atol=1e-5)


@pytest.mark.parametrize("variety", VARIETY.values(), ids=VARIETY)
def test_beam_candidates_equal_those_of_transformers(variety):
    logits = logits_of(6, 70, seed=5).bfloat16()
    params = SamplingParams(beam_width=3, **variety)
    sampler = Sampler(6, 70, CPU, frozenset({EOS}))
    for batch_slot in range(6):
        sampler.assign(batch_slot, params, NUM_PROMPT_TOKENS)
    histories = histories_of(6, 70)
    lengths = NUM_PROMPT_TOKENS + 2 * np.arange(6)
    ids, scores = sampler.beam_candidates(logits, np.arange(6), lengths, histories, 8)
    assert scores.dtype == torch.float32
    for i in range(6):
        logprobs = logits[i : i + 1].float().log_softmax(-1)
        past = histories[i, : lengths[i]].tolist()
        expected = processed_by_transformers(logprobs, params, past)[0]
        top = expected.sort(descending=True, stable=True)
        assert ids[i].tolist() == top.indices[:8].tolist()
        assert scores[i].tolist() == top.values[:8].tolist()


@pytest.mark.parametrize(
    ("presence", "frequency"), [(0.5, 0.0), (0.0, 0.3), (1.7, -1.1), (-2.0, 2.0)]
)
@pytest.mark.parametrize("repetition", [1.0, 1.4])
def test_penalties_count_each_row_by_its_own_history(presence, frequency, repetition, seed):
    """As OpenAI defines them, over the output; tokens that have no score are passed over."""
    vocab_size, num_prompt_tokens = 20, [5, 0, 11]
    params = SamplingParams(
        beam_width=2, presence_penalty=presence, frequency_penalty=frequency,
        repetition_penalty=repetition,
    )  # fmt: skip
    sampler = Sampler(3, vocab_size, CPU, frozenset({EOS}))
    for batch_slot, number in enumerate(num_prompt_tokens):
        sampler.assign(batch_slot, params, number)
    histories = np.random.default_rng(seed).integers(0, vocab_size + 4, (3, 60)).astype(np.int32)
    batch_slots, lengths = np.array([0, 1, 1, 2, 0, 2]), np.array([5, 1, 60, 33, 17, 11])
    logits = logits_of(6, vocab_size)
    ids, scores = sampler.beam_candidates(logits, batch_slots, lengths, histories, vocab_size)
    for row, (batch_slot, length) in enumerate(zip(batch_slots, lengths, strict=True)):
        expected = logits[row].log_softmax(-1).numpy().copy()
        everything = histories[batch_slot, :length].tolist()
        output = everything[num_prompt_tokens[batch_slot] :]
        for token in range(vocab_size):
            if token in everything:
                expected[token] *= np.float32(repetition)
            count = output.count(token)
            expected[token] -= np.float32(frequency) * np.float32(count)
            expected[token] -= np.float32(presence) * np.float32(count > 0)
        assert scores[row].tolist() == expected[ids[row]].tolist()
        assert sorted(ids[row]) == list(range(vocab_size))


def test_beam_candidates_are_padded_with_minus_infinity():
    sampler = Sampler(1, 6, CPU, frozenset({EOS}))
    banned = ((0,), (1,), (3,))
    sampler.assign(0, SamplingParams(beam_width=4, min_tokens=3, bad_token_ids=banned), 1)
    one = np.ones(1, np.int64)
    ids, scores = sampler.beam_candidates(
        torch.arange(6.0)[None], one - 1, one, np.zeros((1, 3), np.int32), 9
    )
    assert ids[0, :2].tolist() == [5, 4]
    assert scores[0].isfinite().tolist() == [True, True, False, False, False, False]


@given(
    st.lists(
        st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=40
    ).filter(lambda values: not any(np.isnan(values))),
    st.data(),
)
def test_largest_is_the_head_of_a_stable_sort(values, data):
    k = data.draw(st.integers(0, len(values)))
    expected = sorted(range(len(values)), key=lambda i: -values[i])[:k]
    scores = torch.tensor([values, values], dtype=torch.float32)
    assert largest(scores, k).tolist() == [expected] * 2
    assert torch.equal(scores, torch.tensor([values, values], dtype=torch.float32))


def test_sampler_takes_inference_mode_and_strided_logits():
    rows = [
        (SamplingParams(temperature=i / 3, logprobs=True, repetition_penalty=2.0), i)
        for i in range(4)
    ]
    with torch.inference_mode():
        logits = logits_of(4, 30)
    expected = sample(logits.clone(), rows)
    for view in (logits, logits.t().contiguous().t(), torch.stack([logits, logits], -1)[..., 1]):
        got = sample(view, rows)
        assert got.token_ids.tolist() == expected.token_ids.tolist()


def test_sampler_returns_nothing_for_an_empty_batch():
    assert sample(torch.zeros(0, 30), []).token_ids.shape == (0,)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [2, 6]),
        ({"top_k": 3}, [2, 6]),
        ({"top_p": 0.999}, [2, 6]),
        ({"min_p": 0.01}, [2, 6]),
        ({"top_k": 1, "top_p": 5e-324}, [6, 6]),
    ],
)
def test_draw_at_either_extreme_yields_a_possible_token(params, expected):
    columns = SamplingColumns(1, 9, frozenset())
    columns.assign(0, SamplingParams(temperature=1.0, **params), 1)
    zeros = np.zeros(2, np.int64)
    rows = columns.rows(zeros, zeros + 1, columns.uses[zeros])
    scores = torch.full((2, 9), -torch.inf)
    scores[:, [2, 5, 6]] = torch.tensor([0.0, 0.1, 0.2])
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw(scores, rows, ends).tolist() == expected


def test_bad_tokens_longer_than_the_history_do_not_match():
    sampler = Sampler(1, 9, CPU, frozenset())
    sampler.assign(0, SamplingParams(bad_token_ids=((4, 4, 7), (1, 4, 7), (4, 6))), 1)
    zero, logits = np.zeros(1, np.int64), torch.arange(9.0)[None].clamp_max(7)
    history = np.array([[4, 4, 4]], np.int32)
    assert sampler.choose(logits, zero, zero, zero + 1, history).fetch().token_ids.tolist() == [7]
    assert sampler.choose(logits, zero, zero, zero + 2, history).fetch().token_ids.tolist() == [8]


def test_sampler_ignores_token_ids_beyond_the_vocabulary():
    far = 2**40
    params = SamplingParams(
        max_tokens=9, min_tokens=9, logit_bias=((far, 9.0), (30, 9.0), (3, 9.0)),
        bad_token_ids=((far,), (30,), (3, far), (far, 3), (1, 1)), stop_token_ids=(far, 30, -1, 29),
    )  # fmt: skip
    assert chosen(torch.zeros(1, 30), [(params, 0)]) == [3]
