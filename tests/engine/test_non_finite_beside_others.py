"""Requests that overflow beside others: each of the others gets what it gets alone."""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest

from baton.engine.core.engine_core import EngineCore
from baton.engine.llm import LLM
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest
from baton.errors import NonFiniteError
from tests.support.engine.deferred_stream import DeferredStream
from tests.support.engine.engines import assert_idle, load_parts, request
from tests.support.engine.kinds import KINDS, transcript
from tests.support.engine.oracle import Oracle
from tests.support.engine.overflow import OVERFLOWING, BrokenDrafter, save_overflowing
from tests.support.engine.prompts import random_prompt, sharing_prompts
from tests.support.engine.quantized import fp8
from tests.support.engine.quantized.written import save_quantized
from tests.support.engine.toss_ups import differ_by_toss_ups
from tests.support.grids import nightly

TIGHT = {"block_size": 4, "num_blocks": 96, "max_num_seqs": 8, "max_num_batched_tokens": 20}
WAYS = {
    "roomy": {"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64},
    "without C": {**TIGHT, "kernels": "torch"},
    "recomputing": {**TIGHT, "preemption": "recompute"},
    "swapping": {**TIGHT, "preemption": "swap", "swap_bytes": 2**21, "max_drafts": 4},
}
# All have layers without a window, after which an overflow cannot be hidden.
FAMILIES = ("gpt_oss", "mixtral", "qwen3_moe", "gemma2", "gpt2", "deepseek_v3")
IN_FP8, BFLOAT16, FP8 = " in fp8", {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_e4m3"}
WHOLE = {"num_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
# Family and settings. In an fp8 cache what overflows is saturated, and NaN, as of gpt2, is not.
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "bfloat16": ("llama", BFLOAT16),
    "bfloat16 without C": ("llama", {**BFLOAT16, "kernels": "torch"}),
    "codes of 4 bits": ("llama", {"quantization": "int4"}),
    "codes of 8 bits in bfloat16": ("llama", {**BFLOAT16, "quantization": "int8"}),
    "codes of a checkpoint": ("llama in fp8", {}),
    "fp8 cache": ("gpt2", FP8),
    "fp8 cache in bfloat16": ("gpt2", {**FP8, **BFLOAT16}),
}
NOISE = {"float32": 1e-5, "bfloat16": 0.1}  # above what batches change of a small model's logits
# Of so many requests one has a copy that overflows.
EACH_BROKEN = 6


def without_overflow(prompt) -> tuple[int, ...]:
    return tuple(token + (token == OVERFLOWING) for token in prompt)


def innocent(count: int, seed: int) -> list[EngineRequest]:
    """Requests of every kind; most share a beginning with others, none overflows."""
    dice, shared = Random(seed), sharing_prompts()
    out = []
    for i in range(count):
        kind = dice.choice([*KINDS])
        start = dice.choice(shared)[: dice.randrange(50)]
        prompt = without_overflow((*start, *random_prompt(dice.randrange(1, 30), seed=i)))
        out.append(request(f"{kind} {i}", prompt, KINDS[kind]))
    return out


def with_broken(requests: list[EngineRequest], seed: int) -> Iterator[EngineRequest]:
    """Yields the requests, and among them copies of some that overflow at a place."""
    dice = Random(seed)
    for each in requests:
        yield each
        if dice.randrange(EACH_BROKEN) == 0:
            prompt = [*each.token_ids, *random_prompt(4, seed=1)]
            prompt[dice.randrange(len(prompt))] = OVERFLOWING
            kind = dice.choice([*KINDS])
            yield request(f"broken {each.request_id}", prompt, KINDS[kind])


def run(core: EngineCore, requests) -> tuple[dict[str, list[SequenceUpdate]], dict]:
    """Adds a request every other step; returns the updates, and the errors of those that fail."""
    updates: dict[str, list[SequenceUpdate]] = {}
    failed, left, count = {}, list(reversed(list(requests))), 0
    while core.has_work or left:
        count += 1
        if left and (count % 2 or not core.has_work):
            core.add(left.pop())
        output = core.step()
        failed |= output.failed
        for update in output.updates:
            updates.setdefault(update.request_id, []).append(update)
        core.scheduler.check_integrity()
    return updates, failed


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    made: dict[str, str] = {}

    def get(family: str) -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp("overflowing")
            made[family] = save_overflowing(family.removesuffix(IN_FP8), folder / "plain")
            if family.endswith(IN_FP8):
                kind = fp8.FORMATS["fp8 in blocks"]
                save_quantized(kind, folder / "plain", folder / "packed")
                made[family] = str(folder / "packed")
        return made[family]

    return get


@pytest.mark.parametrize("count", [36, *nightly([700])])
@pytest.mark.parametrize(
    ("way", "is_late"),
    [
        pytest.param(
            way,
            is_late,
            id=f"{way}-{'late' if is_late else 'at once'}",
            marks=() if i % 2 == is_late else pytest.mark.nightly,
        )
        for i, way in enumerate(WAYS)
        for is_late in (False, True)
    ],
)
@pytest.mark.parametrize("family", ["llama", *nightly(FAMILIES)])
def test_others_are_answered_as_without_broken_ones(
    overflowing, oracle, family, way, is_late, count, seed
):
    stream = DeferredStream(Random(seed)) if is_late else None
    assert_others_unchanged(oracle, overflowing(family), WAYS[way], count, seed, stream)


@pytest.mark.system  # a C compiler: weights stay in codes
@pytest.mark.parametrize("count", [36, *nightly([700])])
@pytest.mark.parametrize("form", FORMS)
def test_others_are_answered_alike_in_every_form_of_numbers(overflowing, oracle, form, count, seed):
    """Steps have room for whole prompts, so that few roundings depend on the others."""
    family, settings = FORMS[form]
    assert_others_unchanged(oracle, overflowing(family), {**WHOLE, **settings}, count, seed)


def assert_others_unchanged(
    oracle: Oracle,
    path: str,
    settings: Mapping[str, Any],
    count: int,
    seed: int,
    stream: DeferredStream | None = None,
) -> None:
    """A sampled answer may choose what overflows by itself, and fails without others, too."""
    requests, noise = innocent(count, seed), NOISE[settings.get("dtype", "float32")]
    config, loaded = load_parts(path, **settings)
    alone, by_themselves = run(EngineCore(*load_parts(path, **settings)), requests)
    core = EngineCore(config, loaded, stream)
    core.drafter = BrokenDrafter()
    updates, failed = run(core, with_broken(requests, seed))
    broken = {r.request_id for r in with_broken(requests, seed)} - {r.request_id for r in requests}
    assert broken
    assert failed.keys() == broken | by_themselves.keys()
    assert {type(error) for error in failed.values()} == {NonFiniteError}
    assert core.scheduler.stats().num_non_finite_requests == len(failed)
    for each in requests:
        if each.request_id not in failed:
            found, expected = (transcript(of[each.request_id]) for of in (updates, alone))
            if found != expected:  # one of thousands of draws, where batches are cut otherwise
                one = each.request_id
                assert differ_by_toss_ups(oracle, path, each, found, expected, noise), one
    assert_idle(LLM(core))
