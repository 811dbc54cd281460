"""Guessing ahead changes no token, only the number of steps."""

from dataclasses import replace

import pytest

from baton.engine.llm import LLM
from baton.engine.request import EngineRequest, KvSource, Purpose
from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.sampling import SamplingParams
from tests.support.engine.drafts import OracleDrafter
from tests.support.engine.engines import (
    assert_idle,
    drain,
    load,
    mostly_slow,
    output_of,
    request,
    tokens,
)
from tests.support.engine.prompts import random_prompt
from tests.support.grids import grid

NUM_TOKENS = 40
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.4, seed=77)
PHRASE = random_prompt(9, seed=2)
REPETITIVE = [PHRASE * 5, PHRASE * 3 + PHRASE[:4], random_prompt(17), (7,) * 12, (5, 6)]
DRAFTS = [1, 4, 8]
Prompts = dict[str, tuple[int, ...]]


def guess(engine: LLM, expected: dict[str, tuple[int, ...]], prompts: Prompts) -> None:
    """Lets the engine's drafts come true, two of three."""
    engine.core.drafter = OracleDrafter(expected, {i: len(p) for i, p in prompts.items()})


@pytest.mark.parametrize("max_drafts", mostly_slow(DRAFTS, 4))
@pytest.mark.parametrize(
    "family",
    mostly_slow(
        ["llama", "mistral_short", "gemma3", "gpt_oss", "gpt2", "qwen2_hybrid"],
        "llama", "mistral_short", "gemma3",
    ),
)  # fmt: skip
def test_speculated_greedy_tokens_equal_transformers(checkpoints, oracle, family, max_drafts):
    path = checkpoints[family]
    expected = [oracle(path, p, NUM_TOKENS) for p in REPETITIVE]
    engine = load(path, max_drafts=max_drafts)
    for _ in range(2):
        assert tokens(engine.generate(REPETITIVE, GREEDY)) == expected
    assert (
        engine.core.scheduler.stats().num_drafted_tokens
        > engine.core.scheduler.stats().num_accepted_tokens
        > 0
    )
    assert_idle(engine)


@pytest.mark.parametrize("max_drafts", DRAFTS)
def test_speculation_takes_fewer_steps_on_repetitive_text(checkpoints, max_drafts):
    text = "Once upon a time, there was a little dog. The little dog was sad. "
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain, guessing = load(checkpoints["tiny"]), load(checkpoints["tiny"], max_drafts=max_drafts)
    steps = []
    for engine in (plain, guessing):
        ids = engine.tokenizer.encode(text * 3)
        engine.core.add(request("x", ids, params))
        count = 0
        said = []
        while engine.core.has_work:
            said += [u.token_id for u in engine.core.step().updates]
            count += 1
        steps.append((count, said))
    assert steps[0][1] == steps[1][1]
    stats = guessing.core.scheduler.stats()
    assert stats.num_accepted_tokens > 0
    # Each step makes a token of its own beside the drafts it accepts.
    assert steps[1][0] <= steps[0][0] - stats.num_accepted_tokens + 1


@grid(
    family=["llama", "gemma3", "mistral_short"],
    mode=["recompute", "swap"],
    block_size=mostly_slow([1, 4], 4),
    budget=mostly_slow([5, 9, 33], 9),
)
def test_speculation_amid_preemption_changes_no_token(
    checkpoints, oracle, family, mode, block_size, budget
):
    path = checkpoints[family]
    prompts = [*REPETITIVE, random_prompt(30)]
    expected = {str(i): oracle(path, p, NUM_TOKENS) for i, p in enumerate(prompts)}
    # Of a window a sequence holds no more than it and what a step adds.
    num_tokens = 100 if family != "mistral_short" else {5: 24, 9: 28, 33: 48}[budget]
    num_blocks = num_tokens // block_size
    engine = load(
        path, block_size=block_size, num_blocks=num_blocks, max_drafts=4, preemption=mode,
        swap_bytes=2**20, max_num_batched_tokens=budget, max_num_seqs=min(budget, 8),
    )  # fmt: skip
    guess(engine, expected, {str(i): p for i, p in enumerate(prompts)})
    for i, prompt in enumerate(prompts):
        engine.core.add(request(str(i), prompt, GREEDY))
    updates = drain(engine)
    assert {i: output_of(updates[i])[0] for i in expected} == expected
    stats = engine.core.scheduler.stats()
    assert stats.num_drafted_tokens > stats.num_accepted_tokens > 0
    assert stats.num_preemptions > 0
    assert_idle(engine)


@pytest.mark.parametrize("policy", mostly_slow(POLICIES, "decode-first"))
@pytest.mark.parametrize("max_drafts", DRAFTS)
def test_speculation_changes_no_seeded_sample(checkpoints, max_drafts, policy):
    path = checkpoints["llama"]
    params = [RANDOM, replace(RANDOM, temperature=0.8, top_k=20, top_p=0.9), RANDOM, RANDOM, RANDOM]
    said = tokens(load(path).generate(REPETITIVE, params))
    prompts = {f"generate-{i}": p for i, p in enumerate(REPETITIVE)}
    engine = load(path, max_drafts=max_drafts, policy=policy)
    guess(engine, dict(zip(prompts, said, strict=True)), prompts)
    assert tokens(engine.generate(REPETITIVE, params)) == said
    assert engine.core.scheduler.stats().num_accepted_tokens > 0
    assert_idle(engine)


@pytest.mark.parametrize("budget", mostly_slow([3, 10, 64], 10))
def test_logit_processors_count_earlier_drafts_as_history(checkpoints, budget):
    path = checkpoints["llama"]
    expected_greedy = load(path).generate(REPETITIVE, GREEDY)
    common = tuple(sorted({t for r in expected_greedy for t in r.token_ids}))[:20]
    params = [
        replace(RANDOM, repetition_penalty=1.3),
        replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.7),
        replace(GREEDY, bad_token_ids=(*((t, t) for t in common), (5, 6))),
        replace(GREEDY, min_tokens=20, stop_token_ids=common),
        replace(GREEDY, logit_bias=((7, 3.0), (9, -50.0)), frequency_penalty=0.1),
    ]
    params = [replace(p, logprobs=True, top_logprobs=3) for p in params]
    plain = load(path).generate(REPETITIVE, params)
    expected = {f"{i}": r.token_ids for i, r in enumerate(plain)}
    engine = load(path, max_drafts=4, max_num_batched_tokens=budget, max_num_seqs=min(8, budget))
    guess(engine, expected, {str(i): p for i, p in enumerate(REPETITIVE)})
    for i, (prompt, p) in enumerate(zip(REPETITIVE, params, strict=True)):
        engine.core.add(request(str(i), prompt, p))
    updates = drain(engine)
    assert {i: output_of(updates[i])[0] for i in expected} == expected
    for i, result in enumerate(plain):
        got = [u.logprobs for u in updates[str(i)] if u.token_id is not None]
        for mine, theirs in zip(got, result.completions[0].logprobs, strict=True):
            assert mine.top_token_ids == theirs.top_token_ids
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)
    assert engine.core.scheduler.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("budget", mostly_slow([4, 8, 9, 16, 64], 8))
@pytest.mark.parametrize("length", [9, 17, 33, 36])
def test_sequences_fork_though_the_prompt_end_could_be_drafted(checkpoints, length, budget):
    """A chunk may leave one token of the prompt, which looks like a decode that can be guessed."""
    path = checkpoints["llama"]
    prompt = (PHRASE * 4)[:length]
    params = replace(RANDOM, n=4)
    (expected,) = load(path).generate([prompt], params)
    engine = load(path, max_drafts=4, max_num_batched_tokens=budget, max_num_seqs=4)
    first = "generate-0"  # whose drafts all come true
    engine.core.drafter = OracleDrafter({first: expected.token_ids}, {first: length}, 1000)
    (result,) = engine.generate([prompt], params)
    assert [c.token_ids for c in result.completions] == [c.token_ids for c in expected.completions]
    assert_idle(engine)


@pytest.mark.parametrize("num_blocks", [3, 96])
@pytest.mark.parametrize(("length", "budget"), [(33, 4), (33, 8), (33, 16), (33, 64), (47, 23)])
def test_prefill_does_not_speculate(checkpoints, oracle, length, budget, num_blocks):
    path, prompt = checkpoints["llama"], (PHRASE * 6)[:length]
    whole = oracle(path, prompt, NUM_TOKENS)
    engine = load(
        path, max_drafts=4, max_num_batched_tokens=budget, max_num_seqs=4, num_blocks=num_blocks
    )
    guess(engine, {"x": whole}, {"x": prompt})
    engine.core.add(EngineRequest("x", prompt, GREEDY, length, Purpose.PREFILL))
    updates = drain(engine)["x"]
    assert output_of(updates)[0] == whole[:1]
    assert updates[-1].num_computed_tokens == length
    assert len(updates[-1].block_ids[0]) == 3
    engine.core.scheduler.release("x")
    drain(engine)
    assert_idle(engine)


def test_speculation_starts_correctly_after_a_handoff(checkpoints):
    path, prompt = checkpoints["llama"], (PHRASE * 4)[:33]
    params = replace(RANDOM, n=3)
    (expected,) = load(path).generate([prompt], params)
    engine = load(path, max_drafts=4)
    engine.generate([prompt], SamplingParams(max_tokens=1))  # so that the KV is here
    engine.core.drafter = OracleDrafter({"x": expected.token_ids}, {"x": len(prompt)}, 1000)
    engine.core.add(EngineRequest("x", prompt, params, 33, kv_source=KvSource.EXTERNAL))
    (allocation,) = engine.core.step().external
    assert allocation.num_hit_blocks == 2
    # The last token's KV is computed here in any case.
    engine.core.scheduler.commit_external("x", None)
    said = output_of(drain(engine)["x"])
    assert [said[i] for i in range(3)] == [c.token_ids for c in expected.completions]


@pytest.mark.parametrize("speculate", [True, False, None])
@pytest.mark.parametrize("default", [True, False])
def test_request_overrides_the_default_of_speculate(checkpoints, default, speculate):
    engine = load(checkpoints["llama"], max_drafts=4, speculate=default)
    engine.generate([PHRASE * 5], replace(GREEDY, speculate=speculate))
    expects = default if speculate is None else speculate
    assert (engine.core.scheduler.stats().num_drafted_tokens > 0) == expects


def test_drafts_are_limited_by_model_length_and_max_tokens(checkpoints, oracle):
    path = checkpoints["llama"]
    long = (PHRASE * 30)[:250]
    for prompt, max_tokens in ((long, 6), (PHRASE * 3, 1), (PHRASE * 3, 2), (PHRASE * 3, 3)):
        engine = load(path, max_drafts=8)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        (result,) = engine.generate([prompt], params)
        assert result.token_ids == oracle(path, prompt, max_tokens)
        assert engine.core.scheduler.stats().num_drafted_tokens <= max(0, max_tokens - 2)


def test_drafts_behind_a_stop_token_are_dropped(checkpoints, oracle):
    path, prompt = checkpoints["llama"], PHRASE * 3
    whole = oracle(path, prompt, NUM_TOKENS)
    for end in range(1, 12):
        stop = whole[end - 1]
        first = whole.index(stop) + 1
        engine = load(path, max_drafts=8)
        guess(engine, {"x": whole}, {"x": prompt})
        engine.core.add(request("x", prompt, replace(GREEDY, stop_token_ids=(stop,))))
        assert output_of(drain(engine)["x"])[0] == whole[:first]
        assert_idle(engine)


def test_drafts_never_reach_the_prefix_cache(checkpoints, oracle):
    """Rejected drafts filled the ends of blocks; the same prompt and output come again."""
    path, prompt = checkpoints["llama"], PHRASE * 3
    whole = oracle(path, prompt, NUM_TOKENS)
    engine = load(path, max_drafts=8, block_size=4)
    guess(engine, {"x": whole}, {"x": prompt})
    engine.core.add(request("x", prompt, GREEDY))
    drain(engine)
    for given in range(0, NUM_TOKENS, 3):
        longer = prompt + whole[:given]
        params = replace(GREEDY, max_tokens=NUM_TOKENS - given, speculate=False)
        (result,) = engine.generate([longer], params)
        assert result.token_ids == whole[given:]
        assert result.num_cached_tokens >= len(longer) - 8
