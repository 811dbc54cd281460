"""Logits processors: as in transformers, in any batch, after any preemption."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from baton.engine.request import FinishReason
from baton.sampling import SamplingParams
from tests.support.engine.engines import assert_idle, drain, load, mostly_slow, output_of, request
from tests.support.engine.oracle import Oracle, decided
from tests.support.engine.prompts import random_prompt

NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [random_prompt(length, seed=12) for length in (1, 15, 16, 17, 40)] + [(7, 8, 9) * 6]
TIGHT = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 6}
SETTINGS: dict[str, dict[str, object]] = {
    "at once": {},
    "in chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 4},
    "recomputed": {**TIGHT, "preemption": "recompute"},
    "swapped": {**TIGHT, "preemption": "swap", "swap_bytes": 2**20},
    "guessing": {"max_drafts": 4},
}
# None of them among the bad tokens below: transformers never bans an end.
ENDS = tuple(range(100, 412, 6))


class CountPenalties(LogitsProcessor):
    """OpenAI's definition: of the output alone."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self._num_prompt, self._presence, self._frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, ids in enumerate(input_ids[:, self._num_prompt :].tolist()):
            for token in set(ids):
                scores[row, token] -= self._presence + self._frequency * ids.count(token)
        return scores


# Ours, and transformers' for the same.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "repetition wanted": ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
    "bias": (
        {"logit_bias": ((5, 6.0), (300, -5.0), (511, 4.5))},
        {"sequence_bias": [[[5], 6.0], [[300], -5.0], [[511], 4.5]]},
    ),
    "presence": ({"presence_penalty": 2.0}, {}),
    "frequency": ({"frequency_penalty": 1.0}, {}),
    "counts wanted": ({"presence_penalty": -1.0, "frequency_penalty": -0.5}, {}),
    "bad tokens": (
        {"bad_token_ids": tuple((t,) for t in range(0, 512, 3))},
        {"bad_words_ids": [[t] for t in range(0, 512, 3)]},
    ),
    "minimum": ({"min_tokens": 7, "stop_token_ids": ENDS}, {"min_new_tokens": 7}),
    "minimum of all": ({"min_tokens": NUM_TOKENS, "stop_token_ids": ENDS}, {"min_new_tokens": 16}),
    "all": (
        {
            "repetition_penalty": 1.2, "logit_bias": ((5, 3.0), (7, 2.0)), "presence_penalty": 0.5,
            "frequency_penalty": 0.25, "min_tokens": 4, "stop_token_ids": ENDS,
            "bad_token_ids": tuple((t,) for t in range(1, 512, 4)),
        },
        {
            "repetition_penalty": 1.2, "sequence_bias": [[[5], 3.0], [[7], 2.0]],
            "min_new_tokens": 4, "bad_words_ids": [[t] for t in range(1, 512, 4)],
        },
    ),
}  # fmt: skip


class ProcessedOracle:
    """Output of transformers under its own processors, remembered."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._known: dict[object, tuple[int, ...]] = {}

    def __call__(
        self, path: str, prompt: tuple[int, ...], params: SamplingParams, theirs: dict[str, Any]
    ) -> tuple[int, ...]:
        key = (path, prompt, params, str(theirs))
        if key not in self._known:
            self._known[key] = self._generate(path, prompt, params, theirs)
        return self._known[key]

    def _generate(
        self, path: str, prompt: tuple[int, ...], params: SamplingParams, theirs: dict[str, Any]
    ) -> tuple[int, ...]:
        counts = CountPenalties(len(prompt), params.presence_penalty, params.frequency_penalty)
        ends = list(params.stop_token_ids) or None
        out = self._oracle.generate(
            path, prompt, params.max_tokens, ends, LogitsProcessorList([counts]),
            output_scores=True, **theirs,
        )  # fmt: skip
        return decided(out.scores, out.sequences[0, len(prompt) :])


@pytest.fixture(scope="session")
def processed_oracle(oracle: Oracle) -> ProcessedOracle:
    return ProcessedOracle(oracle)


def banned_pairs(oracle: Oracle, path: str) -> tuple[tuple[int, ...], ...]:
    """Pairs and triples that the model would say, so that banning them is felt.

    None that a prompt of one token begins: older transformers do not look at a context that short.
    """
    said = [oracle(path, p, NUM_TOKENS) for p in PROMPTS]
    across = [p[-1:] + s[:1] for p, s in zip(PROMPTS, said, strict=True) if len(p) > 1]
    pairs = [ids[i : i + 2] for ids in said for i in (0, 3)]
    return (*pairs, *(ids[5:8] for ids in said), *across)


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("family", mostly_slow(["llama", "gpt2"], "llama"))
def test_logit_processors_in_a_batch_act_as_in_transformers(
    checkpoints, oracle, processed_oracle, family, how
):
    path = checkpoints[family]
    engine = load(path, **SETTINGS[how])
    pairs = banned_pairs(oracle, path)
    cases = {
        **CASES,
        "bad sequences": ({"bad_token_ids": pairs}, {"bad_words_ids": list(map(list, pairs))}),
        "plain": ({}, {}),
    }
    expected = {}
    for name, (ours, theirs) in cases.items():
        params = replace(GREEDY, **ours)
        for i, prompt in enumerate(PROMPTS):
            engine.core.add(request(f"{name} {i}", prompt, params))
            expected[f"{name} {i}"] = processed_oracle(path, prompt, params, theirs)
    updates = drain(engine, checked=False)
    for name in expected:
        assert output_of(updates[name])[0] == expected[name], name
    for name in cases:
        felt = [expected[f"{name} {i}"] != expected[f"plain {i}"] for i in range(len(PROMPTS))]
        assert any(felt) or name == "plain", f"{name} changes nothing"
    assert engine.core.scheduler.stats().num_preemptions > 0 or "preemption" not in SETTINGS[how]
    assert_idle(engine)


def test_min_tokens_defers_the_end_token_even_with_ignore_eos(checkpoints, processed_oracle):
    path = checkpoints["llama_eos"]
    prompts = [random_prompt(4, seed=i) for i in range(12)]
    params = SamplingParams(max_tokens=40, min_tokens=20)
    as_stops = replace(params, stop_token_ids=(384, 330))
    engine = load(path)
    results = engine.generate(prompts, params)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == processed_oracle(path, prompt, as_stops, {"min_new_tokens": 20})
        assert len(result.token_ids) >= 20
    assert any(r.finish_reason is FinishReason.END_OF_SEQUENCE for r in results)
    ignoring = engine.generate(prompts, replace(params, ignore_eos=True))
    for free, result in zip(ignoring, results, strict=True):
        assert not {384, 330} & set(free.token_ids[:20])
        assert free.token_ids[: len(result.token_ids)] == result.token_ids


@pytest.mark.parametrize("how", SETTINGS)
def test_stop_tokens_end_a_sequence_and_set_its_finish_reason(checkpoints, oracle, how):
    path = checkpoints["llama"]
    engine = load(path, **SETTINGS[how])
    for i, prompt in enumerate(PROMPTS):
        whole = oracle(path, prompt, NUM_TOKENS)
        for j, stop in enumerate(whole):
            params = replace(GREEDY, stop_token_ids=(stop, 3))
            engine.core.add(request(f"{i} {j}", prompt, params))
    updates = drain(engine, checked=False)
    for i, prompt in enumerate(PROMPTS):
        whole = oracle(path, prompt, NUM_TOKENS)
        for j, stop in enumerate(whole):
            mine = updates[f"{i} {j}"]
            assert output_of(mine)[0] == whole[: whole.index(stop) + 1]
            assert mine[-1].finish_reason is FinishReason.STOP_TOKEN
    assert_idle(engine)


def test_stop_token_at_max_tokens_is_the_finish_reason(checkpoints, oracle):
    path, prompt = checkpoints["llama"], random_prompt(9)
    whole = oracle(path, prompt, NUM_TOKENS)
    params = SamplingParams(max_tokens=5, stop_token_ids=(whole[4],))
    (result,) = load(path).generate([prompt], params)
    assert result.token_ids == whole[:5]
    assert result.finish_reason is FinishReason.STOP_TOKEN
