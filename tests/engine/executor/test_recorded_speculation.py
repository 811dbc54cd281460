"""Speculation in recorded steps: the same tokens, and no decode or draft outside of them."""

from dataclasses import replace
from typing import Any

import pytest

from baton.engine.executor.runner import ModelInputs
from baton.engine.llm import LLM
from baton.engine.scheduler.plan import StepPlan
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
from tests.support.engine.recorded_steps import CountedGraphs
from tests.support.grids import grid

NUM_TOKENS = 24
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
RANDOM = replace(GREEDY, temperature=1.4, seed=77)
PHRASE = random_prompt(9, seed=2)
PROMPTS = [PHRASE * 5, PHRASE * 3 + PHRASE[:4], random_prompt(17), (7,) * 12, (5, 6)]


def generate(engine: LLM, params: list[SamplingParams]) -> list[tuple[int, ...]]:
    """The outputs of prompts that arrive one after the other."""
    updates: dict[str, list[Any]] = {}
    for i, (prompt, each) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.core.add(request(str(i), prompt, each))
        for _ in range(3):
            for update in engine.core.step().updates:
                updates.setdefault(update.request_id, []).append(update)
    for request_id, later in drain(engine).items():
        updates.setdefault(request_id, []).extend(later)
    assert_idle(engine)
    return [output_of(updates[str(i)])[0] for i in range(len(PROMPTS))]


def guess(engine: LLM, outputs: list[tuple[int, ...]]) -> None:
    """Lets the engine's drafts come true, two of three."""
    names = [*map(str, range(len(PROMPTS)))]
    lengths = dict(zip(names, map(len, PROMPTS), strict=True))
    engine.core.drafter = OracleDrafter(dict(zip(names, outputs, strict=True)), lengths)


def record(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[CountedGraphs, list[StepPlan]]:
    """Returns the recorded steps, and the plans that are computed without them."""
    others: list[StepPlan] = []
    inputs = engine.core.runner.inputs

    def noted(plan: StepPlan) -> ModelInputs:
        others.append(plan)
        return inputs(plan)

    monkeypatch.setattr(engine.core.runner, "inputs", noted)
    return CountedGraphs(engine), others


@grid(
    family=mostly_slow(["llama", "mistral_short", "gemma3"], "llama"),
    max_drafts=mostly_slow([1, 4, 8], 4),
    asynchronous=[False, True],
)
def test_recorded_drafts_give_tokens_of_transformers(
    checkpoints: Any,
    oracle: Any,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    max_drafts: int,
    asynchronous: bool,
) -> None:
    """Requests with and without drafts share steps."""
    path = checkpoints[family]
    expected = [oracle(path, prompt, NUM_TOKENS) for prompt in PROMPTS]
    settings = {"max_num_seqs": 4, "async_scheduling": asynchronous}
    engine = load(path, max_drafts=max_drafts, **settings)
    graphs, others = record(engine, monkeypatch)
    guess(engine, expected)
    params = [replace(GREEDY, speculate=bool(i % 2)) for i in range(len(PROMPTS))]
    assert generate(engine, params) == expected
    assert graphs.num_with_drafts > 2
    assert others
    assert not any(plan.samples_every_token for plan in others)
    stats = engine.core.scheduler.stats()
    assert stats.num_drafted_tokens > stats.num_accepted_tokens > 0


def test_recorded_drafts_change_no_seeded_sample(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [
        RANDOM,
        replace(RANDOM, repetition_penalty=1.3),
        replace(RANDOM, top_k=20, top_p=0.9),
        replace(GREEDY, presence_penalty=0.5, frequency_penalty=0.7),
        replace(GREEDY, min_tokens=9, stop_token_ids=(*range(64),)),
    ]
    expected = tokens(load(checkpoints["llama"]).generate(PROMPTS, params))
    engine = load(checkpoints["llama"], max_drafts=4, max_num_seqs=4)
    graphs, _ = record(engine, monkeypatch)
    guess(engine, expected)
    assert generate(engine, params) == expected
    assert graphs.num_with_drafts > 2
    assert engine.core.scheduler.stats().num_accepted_tokens > 0


def test_drafts_beyond_largest_recorded_step_are_verified(
    checkpoints: Any, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a recorded step, all the same."""
    path = checkpoints["llama"]
    expected = [oracle(path, prompt, NUM_TOKENS) for prompt in PROMPTS]
    engine = load(path, max_drafts=4, max_num_seqs=4)
    graphs, others = record(engine, monkeypatch)
    graphs.sizes = graphs.sizes[: graphs.sizes.index(4) + 1]
    graphs.max_tokens = graphs.sizes[-1]
    guess(engine, expected)
    assert generate(engine, [GREEDY] * len(PROMPTS)) == expected
    assert any(plan.samples_every_token for plan in others)
    assert all(plan.num_tokens > 4 for plan in others if plan.samples_every_token)
