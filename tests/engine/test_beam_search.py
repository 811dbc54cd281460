"""Beams are those of transformers' `generate(num_beams=...)`, in whatever steps they are made."""

from dataclasses import dataclass, replace

import pytest
import torch

from baton.engine.llm import LLM
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest, FinishReason, KvSource
from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.sampling import EarlyStopping, SamplingParams
from tests.support.engine.checkpoints import BLOCK_SIZE
from tests.support.engine.engines import (
    answers,
    assert_idle,
    drain,
    load,
    mostly_slow,
    output_of,
    request,
)
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import random_prompt
from tests.support.grids import grid

NUM_TOKENS = 12
# So many that some beam ends early, and so few that not all do.
ENDS = tuple(range(100, 412, 6))
STOPPING = {
    EarlyStopping.HEURISTIC: False, EarlyStopping.FIRST: True, EarlyStopping.NEVER: "never",
}  # fmt: skip
BEAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, beam_width=3, n=3)
PROMPTS = [random_prompt(length, seed=5) for length in (1, 15, 16, 17, 40)]
TIGHT = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 9}
SWAP = {"preemption": "swap", "swap_bytes": 2**20}
MODES = {"recompute": {"preemption": "recompute"}, "swap": SWAP}


@dataclass(frozen=True)
class Beam:
    """One result, with the score that transformers gives it."""

    token_ids: tuple[int, ...]
    score: float


class BeamOracle:
    """Beams that transformers finds, remembered."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._known: dict[object, list[Beam]] = {}

    def __call__(
        self, path: str, prompt: tuple[int, ...], params: SamplingParams, **processors: object
    ) -> list[Beam]:
        key = (path, prompt, params, str(processors))
        if key not in self._known:
            self._known[key] = self._search(path, prompt, params, processors)
        return self._known[key]

    def _search(
        self,
        path: str,
        prompt: tuple[int, ...],
        params: SamplingParams,
        processors: dict[str, object],
    ) -> list[Beam]:
        out = self._oracle.generate(
            path,
            prompt,
            params.max_tokens,
            list(params.stop_token_ids) or None,
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=STOPPING[params.early_stopping],
            output_scores=True,
            **processors,
        )
        scores = out.sequences_scores.tolist()
        rows = out.sequences[:, len(prompt) :].tolist()
        return [Beam(_cut(r, params), score) for r, score in zip(rows, scores, strict=True)]


def _cut(row: list[int], params: SamplingParams) -> tuple[int, ...]:
    """Without the padding behind an end."""
    for i, token_id in enumerate(row):
        if token_id in params.stop_token_ids:
            return tuple(row[: i + 1])
    return tuple(row)


@pytest.fixture(scope="session")
def beam_oracle(oracle: Oracle) -> BeamOracle:
    return BeamOracle(oracle)


def found(updates: list[SequenceUpdate]) -> list[Beam]:
    """The beams, best first. Asserts that each ends once and that positions count up."""
    beams: dict[int, list[SequenceUpdate]] = {}
    for update in updates:
        if update.token_id is None:
            assert update.finish_reason is None, "a beam without a token"
            continue
        of_one = beams.setdefault(update.index, [])
        assert update.position == len(of_one)
        assert not of_one or of_one[-1].finish_reason is None
        of_one.append(update)
    assert sorted(beams) == list(range(len(beams)))
    return [
        Beam(tuple(u.token_id for u in beams[i]), beams[i][-1].score) for i in range(len(beams))
    ]


def run(engine: LLM, prompts: list[tuple[int, ...]], params: list[SamplingParams]) -> list:
    return [found(updates) for updates in answers(engine, prompts, params)]


def assert_same(got: list[list[Beam]], expected: list[list[Beam]]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert [b.token_ids for b in mine] == [b.token_ids for b in theirs]
        assert [b.score for b in mine] == pytest.approx([b.score for b in theirs], abs=1e-4)


@pytest.mark.parametrize("width", mostly_slow([2, 3, 4], 3))
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2_hybrid", "mistral_short", "gpt2", "gemma3", "gpt_oss", "qwen3", "deepseek_v3"],
)
def test_beams_equal_those_of_transformers(checkpoints, beam_oracle, family, width):
    path = checkpoints[family]
    params = replace(BEAMS, beam_width=width, n=width)
    engine = load(path)
    for _ in range(2):
        got = run(engine, PROMPTS, [params] * len(PROMPTS))
        assert_same(got, [beam_oracle(path, p, params) for p in PROMPTS])
    assert engine.core.scheduler.stats().num_hit_tokens > 0
    assert_idle(engine)


@grid(
    stopping=list(EarlyStopping),
    penalty=mostly_slow([-1.0, 0.0, 0.6, 1.0, 2.0], 0.6),
    n=mostly_slow([1, 2, 4], 4),
)
def test_beams_with_penalties_and_stops_equal_transformers(
    checkpoints, beam_oracle, stopping, penalty, n
):
    path = checkpoints["llama"]
    params = replace(
        BEAMS, beam_width=4, n=n, length_penalty=penalty, early_stopping=stopping,
        stop_token_ids=ENDS, max_tokens=10,
    )  # fmt: skip
    expected = [beam_oracle(path, p, params) for p in PROMPTS]
    endless = [beam_oracle(path, p, replace(params, stop_token_ids=())) for p in PROMPTS]
    assert expected != endless, "none ends early"
    engine = load(path)
    assert_same(run(engine, PROMPTS, [params] * len(PROMPTS)), expected)
    assert_idle(engine)


def test_beams_end_at_the_model_end_tokens(checkpoints, beam_oracle, oracle):
    path = checkpoints["llama_eos"]
    params = SamplingParams(max_tokens=30, beam_width=4, n=4)
    prompts = [random_prompt(4, seed=i) for i in range(8)]
    as_stops = replace(params, stop_token_ids=(384, 330))
    expected = [beam_oracle(path, p, as_stops) for p in prompts]
    assert any(len(b.token_ids) < 30 for beams in expected for b in beams), "none ends early"
    engine = load(path, num_blocks=200)
    results = engine.generate(prompts, params)
    assert [[c.token_ids for c in r.completions] for r in results] == [
        [b.token_ids for b in beams] for beams in expected
    ]
    for completion in (c for r in results for c in r.completions):
        ended = completion.token_ids[-1] in (384, 330)
        reason = FinishReason.END_OF_SEQUENCE if ended else FinishReason.LENGTH
        assert completion.finish_reason is reason


@grid(
    family=["llama", "gemma3"],
    budget=mostly_slow([4, 5, 7, 16, 17, 64], 7),
    caching=[True, False],
)
def test_concurrent_chunked_beam_searches_equal_single_ones(
    checkpoints, beam_oracle, family, budget, caching
):
    path = checkpoints[family]
    params = [replace(BEAMS, beam_width=w, n=w) for w in (4, 2, 3, 4, 2)]
    engine = load(
        path, max_num_batched_tokens=budget, max_num_seqs=min(budget, 9), prefix_caching=caching
    )
    expected = [beam_oracle(path, p, q) for p, q in zip(PROMPTS, params, strict=True)]
    for _ in range(2):
        assert_same(run(engine, PROMPTS, params), expected)
        assert_idle(engine)


LONG = replace(BEAMS, max_tokens=24)
LONG_GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
# Some that come before the beams, and so make them give way.
BEFORE = [random_prompt(length, seed=7) for length in (5, 6, 7)]
CROWDS = {
    "even": [random_prompt(length, seed=6) for length in (20, 8, 17, 1, 12, 16)],
    "odd": [random_prompt(length, seed=6) for length in (18, 9, 20, 1, 12, 16)],
}


def run_crowd(engine: LLM, oracle: Oracle, path: str, crowd: str) -> list[list[Beam]]:
    """Returns what each search finds after some greedy requests, which are checked here."""
    for i, prompt in enumerate(BEFORE):
        engine.core.add(request(f"before {i}", prompt, LONG_GREEDY))
    for i, prompt in enumerate(CROWDS[crowd]):
        engine.core.add(request(str(i), prompt, LONG))
    updates = drain(engine)
    for i, prompt in enumerate(BEFORE):
        assert output_of(updates[f"before {i}"])[0] == oracle(path, prompt, 24)
    return [found(updates[str(i)]) for i in range(len(CROWDS[crowd]))]


@grid(
    budget=mostly_slow([9, 24, 64], 24),
    policy=mostly_slow(POLICIES, "decode-first"),
    crowd=CROWDS,
    mode=MODES,
    caching=[True, False],
)
def test_preempted_beam_searches_find_equal_beams(
    checkpoints, beam_oracle, oracle, budget, policy, crowd, mode, caching
):
    path = checkpoints["llama"]
    needed = 3 * -(-(20 + 24 - 1) // 4)
    settings = {**TIGHT, **MODES[mode], "num_blocks": needed, "max_num_batched_tokens": budget}
    engine = load(path, **settings, policy=policy, prefix_caching=caching)
    expected = [beam_oracle(path, p, LONG) for p in CROWDS[crowd]]
    assert_same(run_crowd(engine, oracle, path, crowd), expected)
    assert engine.core.scheduler.stats().num_preemptions > 0
    if mode == "recompute":
        assert engine.core.scheduler.stats().num_swaps == 0
    elif crowd == "even" and budget > 9:  # elsewhere they may only make room for themselves
        assert engine.core.scheduler.stats().num_swaps > 0
    assert_idle(engine)


@grid(crowd=CROWDS, num_blocks=mostly_slow([33, 36, 40, 44], 33), caching=[True, False])
def test_beam_searches_that_preempt_each_other_finish(
    checkpoints, beam_oracle, crowd, num_blocks, caching
):
    path = checkpoints["llama"]
    settings = {**TIGHT, "num_blocks": num_blocks, "max_num_batched_tokens": 64}
    engine = load(path, **settings, prefix_caching=caching)
    expected = [beam_oracle(path, p, LONG) for p in CROWDS[crowd]]
    assert_same(run(engine, CROWDS[crowd], [LONG] * 6), expected)
    assert engine.core.scheduler.stats().num_preemptions > 0 or num_blocks > 33
    assert_idle(engine)


WINDOWED = {"gemma3": (None, 9), "gpt_oss": (None, 16), "mistral_short": (11, 9)}


@grid(family=WINDOWED, mode=MODES, caching=[True, False])
def test_windowed_beam_searches_find_equal_beams_if_preempted(
    checkpoints, beam_oracle, oracle, family, mode, caching
):
    window, budget = WINDOWED[family]
    path = checkpoints[family]
    per_beam = -(-(20 + 24 - 1) // 4) if window is None else -(-(window - 1 + budget) // 4) + 1
    settings = {**TIGHT, **MODES[mode], "num_blocks": 3 * per_beam}
    engine = load(path, **{**settings, "max_num_batched_tokens": budget}, prefix_caching=caching)
    expected = [beam_oracle(path, p, LONG) for p in CROWDS["even"]]
    assert_same(run_crowd(engine, oracle, path, "even"), expected)
    assert engine.core.scheduler.stats().num_preemptions > 0
    assert (engine.core.scheduler.stats().num_swaps > 0) == (mode == "swap")
    assert_idle(engine)


PROCESSORS = {
    "repetition": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    "bad tokens": (
        {"bad_token_ids": ((300,), (7, 8), (311,))}, {"bad_words_ids": [[300], [7, 8], [311]]},
    ),
    "bias": (
        {"logit_bias": ((5, 4.0), (300, -3.0))},
        {"sequence_bias": [[[5], 4.0], [[300], -3.0]]},
    ),
    "minimum": (
        {"min_tokens": 6, "stop_token_ids": ENDS},
        {"min_new_tokens": 6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_logit_processors_change_beams_as_in_transformers(checkpoints, beam_oracle, name):
    ours, theirs = PROCESSORS[name]
    path = checkpoints["llama"]
    params = replace(BEAMS, **ours)
    expected = [beam_oracle(path, p, params, **theirs) for p in PROMPTS]
    plain = [beam_oracle(path, p, replace(BEAMS, stop_token_ids=ENDS)) for p in PROMPTS]
    assert expected != plain, "a processor that changes nothing"
    assert_same(run(load(path), PROMPTS, [params] * len(PROMPTS)), expected)


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_beam_logprobs_are_those_of_the_model(checkpoints, oracle, penalty):
    path = checkpoints["llama"]
    params = replace(BEAMS, logprobs=True, repetition_penalty=penalty)
    for prompt in PROMPTS:
        (result,) = load(path).generate([prompt], params)
        for completion in result.completions:
            with torch.inference_mode():
                ids = torch.tensor([prompt + completion.token_ids[:-1]])
                logits = oracle.model(path)(ids).logits[0, len(prompt) - 1 :]
            logprobs = logits.log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            got = [p.logprob for p in completion.logprobs]
            assert got == pytest.approx(expected.tolist(), abs=1e-4)


def test_beam_search_of_one_token_returns_the_best_tokens(checkpoints, beam_oracle):
    path = checkpoints["llama"]
    params = replace(BEAMS, max_tokens=1, beam_width=4, n=4)
    got = run(load(path), PROMPTS, [params] * len(PROMPTS))
    assert_same(got, [beam_oracle(path, p, params) for p in PROMPTS])


def test_beam_search_keeps_fewer_beams_when_tokens_are_banned(checkpoints):
    """All but three of twelve tokens are banned: three beams go on, and nine continuations."""
    path, prompt = checkpoints["llama_few_words"], (1, 2, 3, 4, 5)
    banned = tuple((t,) for t in range(12) if t not in (3, 5, 8))
    params = replace(BEAMS, beam_width=4, n=4, bad_token_ids=banned)
    engine = load(path)
    (one,) = engine.generate([prompt], replace(params, max_tokens=1))
    assert {c.token_ids for c in one.completions} == {(3,), (5,), (8,), ()}
    assert one.completions[-1].token_ids == ()
    assert one.completions[-1].finish_reason is FinishReason.LENGTH
    (four,) = engine.generate([prompt], replace(params, max_tokens=4))
    assert [len(c.token_ids) for c in four.completions] == [4] * 4
    assert {t for c in four.completions for t in c.token_ids} <= {3, 5, 8}
    assert len({c.token_ids for c in four.completions}) == 4
    assert_idle(engine)


def test_fewer_beams_keep_batch_slots_for_their_forks(checkpoints):
    """Only token 3 is allowed as second token of a pair, so few beams of four are left at first."""
    engine = load(checkpoints["llama_few_words"], max_num_seqs=6)
    banned = tuple((1, t) for t in range(12) if t != 3)
    params = SamplingParams(max_tokens=8, beam_width=4, bad_token_ids=banned, ignore_eos=True)
    engine.core.add(request("beams", (5, 2, 1), params))
    for i in range(6):
        one = SamplingParams(max_tokens=20, ignore_eos=True)
        engine.core.add(request(str(i), (5, 2, 6, i), one))
    updates = drain(engine)
    alone = run(load(checkpoints["llama_few_words"]), [(5, 2, 1)], [params])
    assert_same([found(updates["beams"])], alone)
    assert all(len(updates[str(i)]) == 20 for i in range(6))
    assert_idle(engine)


def test_beam_search_starts_at_the_last_token_of_a_cached_prompt(checkpoints, beam_oracle):
    path, prompt = checkpoints["llama"], random_prompt(2 * BLOCK_SIZE, seed=5)
    engine = load(path)
    engine.generate([prompt], SamplingParams(max_tokens=1))
    for _ in range(2):
        engine.core.add(request("x", prompt, BEAMS))
        updates = drain(engine)["x"]
        assert updates[0].num_cached_tokens == len(prompt) - 1
        assert_same([found(updates)], [beam_oracle(path, prompt, BEAMS)])


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_beam_search_over_external_kv_finds_equal_beams(checkpoints, beam_oracle, length):
    path, prompt = checkpoints["llama"], random_prompt(length, seed=5)
    source, engine = load(path), load(path)
    source.core.add(request("x", prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
    source.core.step()
    for _ in range(2):
        engine.core.add(EngineRequest("x", prompt, BEAMS, length, kv_source=KvSource.EXTERNAL))
        (allocation,) = engine.core.step().external
        table = source.core.scheduler.requests["x"].sequences[0].block_ids[0]
        pairs = list(zip(table, allocation.block_ids[0], strict=False))
        for origin, target in pairs[allocation.num_hit_blocks :]:
            engine.core.cache.pools[0].write_block(
                target, source.core.cache.pools[0].read_block(origin)
            )
        engine.core.scheduler.commit_external("x", None)
        assert_same([found(drain(engine)["x"])], [beam_oracle(path, prompt, BEAMS)])
        assert_idle(engine)
