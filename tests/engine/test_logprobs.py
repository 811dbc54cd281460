"""Reported log-probabilities against one dense forward of transformers over all tokens."""

from dataclasses import replace

import pytest
import torch

from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest, Purpose
from baton.engine.scheduler.plan import TokenLogprobs
from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import BLOCK_SIZE, VOCAB_SIZE
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
from tests.support.engine.prompts import NUM_TOKENS, random_prompt
from tests.support.grids import grid, nightly

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=True, top_logprobs=5)
RANDOM = replace(GREEDY, temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, seed=4)
LENGTHS = (1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 61)
PROMPTS = [random_prompt(length, seed=8) for length in LENGTHS]
TIGHT = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 6}
SWAP = {"preemption": "swap", "swap_bytes": 2**20}
MODES = {"recompute": {"preemption": "recompute"}, "swap": SWAP}


def dense(oracle: Oracle, path: str, token_ids: tuple[int, ...]) -> torch.Tensor:
    """`[num_tokens, vocab_size]`, what follows each token, in nats."""
    with torch.inference_mode():
        logits = oracle.model(path)(torch.tensor([token_ids])).logits[0]
    return logits.log_softmax(-1)


def assert_right(
    got: list[TokenLogprobs], rows: torch.Tensor, targets: tuple[int, ...], num_top: int
) -> None:
    """Each of `got` is what its row of log-probabilities says of its target."""
    assert len(got) == len(targets) == len(rows)
    for mine, row, target in zip(got, rows, targets, strict=True):
        assert mine.logprob == pytest.approx(float(row[target]), abs=2e-4)
        best = row.topk(num_top)
        assert mine.top_logprobs == pytest.approx(best.values.tolist(), abs=2e-4)
        # Where two are as good as equal, either may come first.
        assert row[list(mine.top_token_ids)].tolist() == pytest.approx(
            best.values.tolist(), abs=2e-4
        )
        assert len(set(mine.top_token_ids)) == num_top


def check_output(
    oracle: Oracle, path: str, prompt: tuple[int, ...], updates: list[SequenceUpdate], num_top: int
) -> None:
    for index, said in output_of(updates).items():
        got = [u.logprobs for u in updates if u.index == index and u.token_id is not None]
        rows = dense(oracle, path, prompt + said[:-1])[len(prompt) - 1 :]
        assert_right(got, rows, said, num_top)


def check_prompt(
    oracle: Oracle, path: str, prompt: tuple[int, ...], updates: list[SequenceUpdate], num_top: int
) -> None:
    got = [scores for u in updates for scores in u.prompt_logprobs]
    assert_right(got, dense(oracle, path, prompt)[:-1], prompt[1:], num_top)


@grid(
    family=["llama", "gemma3", "gpt2"],
    params=[GREEDY, RANDOM],
    num_top=mostly_slow([0, 1, 20], 20),
)
def test_output_logprobs_are_those_of_the_model(checkpoints, oracle, family, params, num_top):
    path = checkpoints[family]
    params = replace(
        params, top_logprobs=num_top, repetition_penalty=1.2, logit_bias=((9, 3.0),),
        presence_penalty=0.3,
    )  # fmt: skip
    engine = load(path, max_num_batched_tokens=20, max_num_seqs=4)
    updates = answers(engine, PROMPTS, params)
    for i, prompt in enumerate(PROMPTS):
        check_output(oracle, path, prompt, updates[i], num_top)


@grid(
    family=mostly_slow(["llama", "gemma3", "mistral_short", "gpt2"], "llama", "mistral_short"),
    budget=[*mostly_slow([1, 3, 16, 17], 3, 16), *nightly([2, 5, 64])],
    caching=[True, False],
)
def test_prompt_logprobs_come_once_with_any_chunking(checkpoints, oracle, family, budget, caching):
    path = checkpoints[family]
    engine = load(
        path, max_num_batched_tokens=budget, max_num_seqs=min(budget, 4), prefix_caching=caching
    )
    params = replace(GREEDY, prompt_logprobs=4, max_tokens=2)
    for _ in range(2):
        updates = answers(engine, PROMPTS, params)
        for i, prompt in enumerate(PROMPTS):
            check_prompt(oracle, path, prompt, updates[i], 4)
            check_output(oracle, path, prompt, updates[i], 5)
    assert_idle(engine)


def test_generate_returns_prompt_logprobs_of_a_batch(checkpoints, oracle):
    path = checkpoints["llama"]
    engine = load(path)
    params = [replace(GREEDY, prompt_logprobs=k) for k in (None, 0, 1, 2, 3, 4, 20)]
    for result, p in zip(engine.generate(PROMPTS, params), params, strict=True):
        k = p.prompt_logprobs
        if k is None:
            assert result.prompt_logprobs == ()
            continue
        rows = dense(oracle, path, result.prompt_token_ids)[:-1]
        assert_right(list(result.prompt_logprobs), rows, result.prompt_token_ids[1:], k)


def test_top_logprobs_are_as_many_as_each_request_asked_for(checkpoints, oracle):
    path = checkpoints["llama"]
    counts = (0, 20, 3, 0, 1, 7, 2)
    params = [
        replace(GREEDY, top_logprobs=k, logprobs=k > 0 or i == 0) for i, k in enumerate(counts)
    ]
    engine = load(path)
    updates = answers(engine, PROMPTS, params)
    for i, prompt in enumerate(PROMPTS):
        if params[i].logprobs:
            check_output(oracle, path, prompt, updates[i], counts[i])
        else:
            assert all(u.logprobs is None for u in updates[i])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_blocks", [24, 96])
def test_prompt_logprobs_come_once_for_several_sequences(checkpoints, oracle, num_blocks, mode):
    """Also when a sibling is preempted, and computes the prompt once more."""
    path = checkpoints["llama"]
    engine = load(path, **{**TIGHT, **MODES[mode], "num_blocks": num_blocks})
    params = replace(RANDOM, prompt_logprobs=2, n=4)
    updates = answers(engine, PROMPTS, params)
    for i, prompt in enumerate(PROMPTS):
        check_prompt(oracle, path, prompt, updates[i], 2)
        check_output(oracle, path, prompt, updates[i], 5)
    assert (engine.core.scheduler.stats().num_preemptions > 0) == (num_blocks == 24)
    assert_idle(engine)


@pytest.mark.parametrize("num_blocks", [54, 96])
@pytest.mark.parametrize("budget", [6, 64])
def test_prompt_logprobs_come_once_for_beams(checkpoints, oracle, budget, num_blocks):
    path = checkpoints["llama"]
    settings = {**TIGHT, "num_blocks": num_blocks, "max_num_batched_tokens": budget}
    engine = load(path, **settings, prefix_caching=False)
    params = SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, beam_width=3, n=2, prompt_logprobs=2, logprobs=True
    )
    results = engine.generate(PROMPTS, params)
    for prompt, result in zip(PROMPTS, results, strict=True):
        rows = dense(oracle, path, prompt)[:-1]
        assert_right(list(result.prompt_logprobs), rows, prompt[1:], 2)
        for completion in result.completions:
            rows = dense(oracle, path, prompt + completion.token_ids[:-1])[len(prompt) - 1 :]
            assert_right(list(completion.logprobs), rows, completion.token_ids, 0)
    assert_idle(engine)


def test_prompt_logprobs_exclude_given_output(checkpoints, oracle):
    path, prompt = checkpoints["llama"], random_prompt(20)
    engine = load(path, max_num_batched_tokens=7, max_num_seqs=4)
    params = replace(GREEDY, prompt_logprobs=3)
    engine.core.add(EngineRequest("x", prompt, params, 12))
    updates = drain(engine)["x"]
    got = [scores for u in updates for scores in u.prompt_logprobs]
    assert_right(got, dense(oracle, path, prompt)[:11], prompt[1:12], 3)


def test_prefill_reports_prompt_logprobs(checkpoints, oracle):
    path, prompt = checkpoints["llama"], random_prompt(40)
    engine = load(path, max_num_batched_tokens=16, max_num_seqs=4)
    params = replace(GREEDY, prompt_logprobs=3)
    engine.core.add(EngineRequest("x", prompt, params, 40, Purpose.PREFILL))
    updates = drain(engine)["x"]
    check_prompt(oracle, path, prompt, updates, 3)
    engine.core.scheduler.release("x")
    drain(engine)
    assert_idle(engine)


def test_top_logprobs_are_capped_at_the_vocabulary_size(checkpoints, oracle):
    path = checkpoints["llama_few_words"]
    prompt = tuple(t % 12 for t in random_prompt(9))
    params = replace(GREEDY, top_logprobs=20, prompt_logprobs=20)
    engine = load(path)
    engine.core.add(request("x", prompt, params))
    updates = drain(engine)["x"]
    assert VOCAB_SIZE > 12
    check_output(oracle, path, prompt, updates, 12)
    check_prompt(oracle, path, prompt, updates, 12)
