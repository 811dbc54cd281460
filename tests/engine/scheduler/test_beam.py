"""Beam search against transformers' own, and against what must hold whatever the scores are."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, event, example, given, settings
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from baton.engine.scheduler.sequences.beam import BeamSearch, BeamStep, Hypothesis
from baton.sampling import EarlyStopping
from tests.support.engine.engines import mostly_slow
from tests.support.grids import grid, nightly

Logprobs = Callable[[tuple[int, ...]], npt.NDArray[np.float32]]

THEIR_EARLY_STOPPING: dict[EarlyStopping, bool | str] = {
    EarlyStopping.HEURISTIC: False,
    EarlyStopping.FIRST: True,
    EarlyStopping.NEVER: "never",
}


def top(row: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    return np.argsort(-row, kind="stable")[:k]


@dataclass(frozen=True)
class Driven:
    """A search at its end, and the least distance between two sums that it had to order."""

    steps: list[BeamStep]
    gap: float


def drive(search: BeamSearch, prompt: tuple[int, ...], logprobs: Logprobs) -> Driven:
    """Runs a search as an engine would: by forking what `advance` says."""
    beams, sums = [prompt], np.zeros(1, np.float32)
    steps: list[BeamStep] = []
    gap = np.inf
    while not search.is_done:
        rows = np.stack([logprobs(beam) for beam in beams])
        totals = rows + sums[:, None]
        ordered = np.sort(totals, axis=None)[::-1][: search.num_candidates + 1]
        gap = min(gap, float(np.min(ordered[:-1] - ordered[1:])))
        token_ids = np.stack([top(row, search.num_candidates) for row in rows])
        step = search.advance(token_ids, np.take_along_axis(rows, token_ids, axis=1))
        sums = np.array([totals[b.parent, b.token_id] for b in step.beams], np.float32)
        beams = [(*beams[b.parent], b.token_id) for b in step.beams]
        steps.append(step)
    return Driven(steps, gap)


class Theirs:
    """Output of `generate`, and the model's own log-probabilities from full forwards."""

    def __init__(self, model: PreTrainedModel, *, uses_cache: bool) -> None:
        self._model = model
        self._uses_cache = uses_cache
        self._known: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}

    def logprobs(self, token_ids: tuple[int, ...]) -> npt.NDArray[np.float32]:
        if token_ids not in self._known:
            with torch.no_grad():
                logits = self._model(input_ids=torch.tensor([token_ids])).logits[0, -1].float()
            self._known[token_ids] = torch.log_softmax(logits, dim=-1).numpy()
        return self._known[token_ids]

    def generate(
        self,
        prompt: tuple[int, ...],
        *,
        width: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        eos: Sequence[int],
        max_tokens: int,
        n: int,
    ) -> list[tuple[tuple[int, ...], float]]:
        """Outputs, cut behind their end-of-sequence token, and their scores."""
        out: Any = self._model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=GenerationConfig(
                num_beams=width,
                num_return_sequences=n,
                length_penalty=length_penalty,
                early_stopping=THEIR_EARLY_STOPPING[early_stopping],
                eos_token_id=list(eos) or None,
                pad_token_id=0,
                max_new_tokens=max_tokens,
                do_sample=False,
                use_cache=self._uses_cache,
                output_scores=True,
                return_dict_in_generate=True,
            ),
        )
        outputs = [cut(row[len(prompt) :].tolist(), eos, max_tokens) for row in out.sequences]
        return list(zip(outputs, out.sequences_scores.tolist(), strict=True))


def cut(output: list[int], eos: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    ends = [i + 1 for i, token_id in enumerate(output) if token_id in eos]
    return tuple(output[: min([*ends, max_tokens])])


@pytest.fixture(scope="module")
def llama(checkpoints: Mapping[str, str]) -> Theirs:
    model = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32)
    return Theirs(model.eval(), uses_cache=True)


PROMPT = (1, 2, 3)
PROMPTS = [(5, 17, 200, 33, 8), (401, 3, 77)]
MAX_TOKENS = 9


def likely_ends(theirs: Theirs, prompt: tuple[int, ...], width: int) -> list[int]:
    """Tokens that good outputs contain early, in the middle and late."""
    search = BeamSearch(
        width=width, length_penalty=1.0, early_stopping=EarlyStopping.NEVER,
        eos_token_ids=(), max_tokens=MAX_TOKENS,
    )  # fmt: skip
    drive(search, prompt, theirs.logprobs)
    best = search.results(width)
    return [best[-1].token_ids[2], best[0].token_ids[4], best[1].token_ids[6]]


def check_equal(
    ours: tuple[Hypothesis, ...], theirs: list[tuple[tuple[int, ...], float]], eos: Sequence[int]
) -> None:
    assert [h.token_ids for h in ours] == [token_ids for token_ids, _ in theirs]
    np.testing.assert_allclose([h.score for h in ours], [s for _, s in theirs], rtol=1e-4)
    for hypothesis in ours:
        assert hypothesis.was_cut == (hypothesis.token_ids[-1] not in eos)


@grid(
    width=[*mostly_slow([2, 3, 5], 3), *nightly([4])],
    length_penalty=[-1.0, 0.0, 0.5, 1.0, 2.0],
    early_stopping=EarlyStopping,
)
def test_beam_search_equals_transformers_on_a_llama(llama, width, length_penalty, early_stopping):
    num_early = 0
    for prompt in PROMPTS:
        ends = likely_ends(llama, prompt, width)
        for eos in ([], ends[:1], ends[1:], ends):
            params: dict[str, Any] = {
                "width": width, "length_penalty": length_penalty, "early_stopping": early_stopping,
                "max_tokens": MAX_TOKENS,
            }  # fmt: skip
            search = BeamSearch(**params, eos_token_ids=eos)
            driven = drive(search, prompt, llama.logprobs)
            assert driven.gap > 1e-5, "a toss-up: take another prompt"
            num_early += sum(len(step.finished) for step in driven.steps[: MAX_TOKENS - 1])
            theirs = llama.generate(prompt, **params, eos=eos, n=width)
            check_equal(search.results(width), theirs, eos)
    assert num_early > 3, "hardly a hypothesis ended early: choose other ends"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_beam_search_returns_the_best_n_of_transformers(llama, n):
    prompt = PROMPTS[0]
    eos = likely_ends(llama, prompt, 4)
    params: dict[str, Any] = {
        "width": 4, "length_penalty": 1.0, "early_stopping": EarlyStopping.HEURISTIC,
        "max_tokens": MAX_TOKENS,
    }  # fmt: skip
    search = BeamSearch(**params, eos_token_ids=eos)
    drive(search, prompt, llama.logprobs)
    check_equal(search.results(n), llama.generate(prompt, **params, eos=eos, n=n), eos)


class TableModel(PreTrainedModel, GenerationMixin):
    """Its logits are a random function of the whole input: no arithmetic, so floats are equal.

    Tokens below `num_eos` are more likely than the others by `eos_bias` nats.
    """

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(
        self, vocab_size: int, seed: int, spread: float, num_eos: int, eos_bias: float
    ) -> None:
        super().__init__(PretrainedConfig(vocab_size=vocab_size))
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.seed = seed
        self.spread = spread
        self.num_eos = num_eos
        self.eos_bias = eos_bias

    def row(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        key = zlib.crc32(np.array([self.seed, *token_ids], np.int64).tobytes())
        logits = np.random.default_rng(key).normal(scale=self.spread, size=self.config.vocab_size)
        logits[: self.num_eos] += self.eos_bias
        return logits.astype(np.float32)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> CausalLMOutput:
        rows = np.stack([self.row(row) for row in input_ids.tolist()])
        return CausalLMOutput(logits=torch.from_numpy(rows)[:, None])

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids}


@settings(max_examples=200)
@given(
    width=st.integers(2, 5),
    length_penalty=st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 1.3, 2.0]),
    early_stopping=st.sampled_from(EarlyStopping),
    num_eos=st.integers(0, 3),
    eos_bias=st.sampled_from([0.0, 1.0, 3.0]),
    max_tokens=st.integers(1, 16),
    vocab_size=st.integers(20, 40),
    spread=st.sampled_from([0.3, 1.0, 3.0]),
    seed=st.integers(0, 2**16),
)
@example(  # of a long hypothesis worth waiting for, although the penalty is on length
    width=3, length_penalty=-1.0, early_stopping=EarlyStopping.NEVER, num_eos=1, eos_bias=3.0,
    max_tokens=9, vocab_size=20, spread=3.0, seed=57,
)  # fmt: skip
@example(
    width=2, length_penalty=-2.0, early_stopping=EarlyStopping.NEVER, num_eos=1, eos_bias=3.0,
    max_tokens=11, vocab_size=20, spread=3.0, seed=0,
)  # fmt: skip
def test_beam_search_ends_as_in_transformers(
    width, length_penalty, early_stopping, num_eos, eos_bias, max_tokens, vocab_size, spread, seed
):
    model = TableModel(vocab_size, seed, spread, num_eos, eos_bias).eval()
    theirs = Theirs(model, uses_cache=False)
    eos = list(range(num_eos))
    params: dict[str, Any] = {
        "width": width, "length_penalty": length_penalty, "early_stopping": early_stopping,
        "max_tokens": max_tokens,
    }  # fmt: skip
    search = BeamSearch(**params, eos_token_ids=eos)
    driven = drive(search, PROMPT, theirs.logprobs)
    assume(driven.gap > 0.0)
    event(f"stopped before max_tokens: {len(driven.steps) < max_tokens}")
    expected = theirs.generate(PROMPT, **params, eos=eos, n=width)
    assert [(h.token_ids, h.score) for h in search.results(width)] == expected


def random_rows(seed: int, vocab_size: int, forbidden: float, rounding: int) -> Logprobs:
    """Log-probabilities of which some are -inf, and many are equal where `rounding` is small."""

    def logprobs(token_ids: tuple[int, ...]) -> npt.NDArray[np.float32]:
        key = zlib.crc32(np.array([seed, *token_ids], np.int64).tobytes())
        rng = np.random.default_rng(key)
        row = -np.abs(rng.normal(scale=2.0, size=vocab_size)).round(rounding)
        row[rng.random(vocab_size) < forbidden] = -np.inf
        return row.astype(np.float32)

    return logprobs


@settings(max_examples=200)
@given(
    width=st.integers(1, 6),
    length_penalty=st.floats(-10.0, 10.0),
    early_stopping=st.sampled_from(EarlyStopping),
    num_eos=st.integers(0, 3),
    max_tokens=st.integers(1, 10),
    vocab_size=st.integers(1, 30),
    forbidden=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    rounding=st.integers(0, 6),
    seed=st.integers(0, 2**16),
)
def test_beam_search_loses_no_hypothesis_and_terminates(
    width,
    length_penalty,
    early_stopping,
    num_eos,
    max_tokens,
    vocab_size,
    forbidden,
    rounding,
    seed,
):
    search = BeamSearch(
        width=width, length_penalty=length_penalty, early_stopping=early_stopping,
        eos_token_ids=range(num_eos), max_tokens=max_tokens,
    )  # fmt: skip
    logprobs = random_rows(seed, vocab_size, forbidden, rounding)
    beams, ended = [PROMPT], []
    for num_tokens in range(1, max_tokens + 1):
        assert search.num_running == len(beams)
        rows = np.stack([logprobs(beam) for beam in beams])
        token_ids = np.stack([top(row, search.num_candidates) for row in rows])
        step = search.advance(token_ids, np.take_along_axis(rows, token_ids, axis=1))

        continued = [(*beams[b.parent], b.token_id) for b in step.beams]
        num_open = int(np.count_nonzero(rows[:, num_eos:] > -np.inf))
        assert len(set(continued)) == len(continued)
        assert step.is_done or len(continued) == min(width, num_open)
        for finished in step.finished:
            assert rows[finished.parent, finished.token_id] > -np.inf
            assert finished.token_id < num_eos or num_tokens == max_tokens
            output = (*beams[finished.parent], finished.token_id)[len(PROMPT) :]
            ended.append((output, finished.score))
        assert all(b.token_id >= num_eos for b in step.beams)
        assert bool(step.beams) != step.is_done
        beams = continued
        if step.is_done:
            break
    assert search.is_done, "went on past max_tokens"

    results = search.results(width)
    assert len(results) == min(width, len(ended)), "a hypothesis was lost"
    ended.sort(key=lambda hypothesis: hypothesis[1], reverse=True)
    assert [(h.token_ids, h.score) for h in results] == ended[:width]
    for hypothesis in results:
        check_score(hypothesis, logprobs, length_penalty)


def check_score(hypothesis: Hypothesis, logprobs: Logprobs, length_penalty: float) -> None:
    """Reports the log-probabilities it was given, and a score that follows from them."""
    context, total = PROMPT, np.float32(0.0)
    for token_id, logprob in zip(hypothesis.token_ids, hypothesis.logprobs, strict=True):
        assert logprobs(context)[token_id] == logprob
        total += np.float32(logprob)
        context = (*context, token_id)
    expected = float(total) / len(hypothesis.token_ids) ** length_penalty
    assert hypothesis.score == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("num_eos", "expected"), [(0, 6), (1, 6), (2, 9), (3, 12)])
def test_num_candidates_lets_width_beams_continue(num_eos, expected):
    search = BeamSearch(
        width=3, length_penalty=1.0, early_stopping=EarlyStopping.HEURISTIC,
        eos_token_ids=range(num_eos), max_tokens=9,
    )  # fmt: skip
    assert search.num_candidates == expected


def test_beam_search_reports_the_logprobs_given_to_it():
    search = BeamSearch(
        width=1, length_penalty=1.0, early_stopping=EarlyStopping.HEURISTIC,
        eos_token_ids=(), max_tokens=1,
    )  # fmt: skip
    scores = np.array([[-2.0, -1.0]], np.float32)
    search.advance(np.array([[7, 9]]), scores, np.array([[-5.0, -6.0]], np.float32))
    (hypothesis,) = search.results(1)
    assert hypothesis == Hypothesis((9,), (-6.0,), -1.0, was_cut=True)


def test_beam_search_breaks_ties_by_beam_then_token():
    search = BeamSearch(
        width=2, length_penalty=0.0, early_stopping=EarlyStopping.NEVER,
        eos_token_ids=(), max_tokens=3,
    )  # fmt: skip
    same = np.full((1, 4), -1.0, np.float32)
    first = search.advance(np.array([[8, 3, 5, 4]]), same)
    assert [b.token_id for b in first.beams] == [3, 4]
    second = search.advance(np.array([[8, 3, 5, 4], [2, 1, 0, 6]]), np.repeat(same, 2, axis=0))
    assert [(b.parent, b.token_id) for b in second.beams] == [(0, 3), (0, 4)]


def test_beam_search_keeps_scores_beyond_float32():
    search = BeamSearch(
        width=2, length_penalty=-10.0, early_stopping=EarlyStopping.HEURISTIC,
        eos_token_ids=(), max_tokens=10,
    )  # fmt: skip
    drive(search, PROMPT, random_rows(3, 20, 0.0, 6))
    results = search.results(2)
    assert len(results) == 2
    assert results[1].score < results[0].score < -1e9
