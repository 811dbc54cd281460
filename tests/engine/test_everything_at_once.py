"""Requests of every kind in one batch, each of which gets what it gets alone; and what the engine
says of itself meanwhile."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest, FinishReason
from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.sampling import SamplingParams
from tests.engine.conftest import Checkpoints
from tests.support.engine.checkpoints import BLOCK_SIZE
from tests.support.engine.engines import assert_idle, drain, load, mostly_slow, request
from tests.support.engine.kinds import GREEDY, KINDS, transcript
from tests.support.engine.prompts import random_prompt, sharing_prompts
from tests.support.grids import nightly

ROOM = {"num_blocks": 200, "max_num_seqs": 16, "max_num_batched_tokens": 64}
TIGHT = {"block_size": 4, "num_blocks": 32, "max_num_seqs": 8, "max_num_batched_tokens": 20}
WAYS: dict[str, dict[str, Any]] = {
    "roomy": ROOM,
    "guessing": {**ROOM, "max_drafts": 3},
    "recomputing": {**TIGHT, "preemption": "recompute"},
    "recomputing without a cache": {**TIGHT, "preemption": "recompute", "prefix_caching": False},
    "swapping": {**TIGHT, "preemption": "swap", "swap_bytes": 2**21},
    "swapping and guessing": {**TIGHT, "preemption": "swap", "swap_bytes": 2**21, "max_drafts": 4},
    "weighing": {**TIGHT, "preemption": "auto", "swap_bytes": 2**21, "max_drafts": 2},
    "hardly swapping": {**TIGHT, "preemption": "swap", "swap_bytes": 2**16},
    "few reads": {**TIGHT, "max_cache_reads": 90},
    "short prefills": {**TIGHT, "long_prefill_threshold": 5},
    "a margin": {**TIGHT, "free_block_margin": 0.3},
    "fitting prompts": {**TIGHT, "full_sequence_must_fit": True},
    "single tokens": {**TIGHT, "max_num_batched_tokens": 8, "long_prefill_threshold": 1},
    "blocks of one": {**TIGHT, "block_size": 1, "num_blocks": 128, "preemption": "recompute"},
}  # fmt: skip


def prompts() -> dict[str, tuple[int, ...]]:
    """One for each kind; some share a beginning, some repeat themselves."""
    shared = sharing_prompts()
    phrase = random_prompt(6, seed=21)
    found = {}
    for i, kind in enumerate(KINDS):
        options = (random_prompt(3 + 5 * i % 41, seed=i), shared[i % 5][:50], phrase * (1 + i % 5))
        found[kind] = options[i % 3]
    return found


def numbers(updates: list[SequenceUpdate]) -> list[float]:
    """Log-probabilities and scores, in an order that does not depend on the steps."""
    by_place = sorted(updates, key=lambda u: (u.index, u.position))
    out = [u.logprobs.logprob for u in by_place if u.logprobs is not None]
    out += [scores.logprob for u in updates for scores in u.prompt_logprobs]
    return out + [u.score for u in by_place if u.score is not None]


@pytest.fixture(scope="module")
def alone(checkpoints: Checkpoints) -> dict[str, dict[str, list[SequenceUpdate]]]:
    """Returns what each kind gets by itself, by family; `expected_of` adds the families."""
    return {}


def expected_of(
    alone: dict[str, dict[str, list[SequenceUpdate]]], path: str
) -> dict[str, list[SequenceUpdate]]:
    if path not in alone:
        alone[path] = {}
        engine = load(path, prefix_caching=False)
        for kind, prompt in prompts().items():
            engine.core.add(request(kind, prompt, KINDS[kind]))
            alone[path] |= drain(engine)
    return alone[path]


def assert_each_as_alone(
    engine: LLM, alone: dict[str, dict[str, list[SequenceUpdate]]], path: str
) -> None:
    expected = expected_of(alone, path)
    for i, (kind, prompt) in enumerate(prompts().items()):
        engine.core.add(
            EngineRequest(
                kind,
                prompt,
                KINDS[kind],
                len(prompt),
                priority=i % 3,
                arrival_time=float(i),
                first_token_deadline=20.0 - i if i % 2 else None,
            )
        )
    updates = drain(engine)
    for kind in KINDS:
        assert transcript(updates[kind]) == transcript(expected[kind]), kind
        assert numbers(updates[kind]) == pytest.approx(numbers(expected[kind]), abs=3e-4), kind
    assert_idle(engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", *nightly(["gemma3", "mistral_short"])])
def test_mixed_requests_equal_requests_run_alone(checkpoints, alone, family, way):
    path = checkpoints[family]
    engine = load(path, **WAYS[way])
    for _ in range(2):
        assert_each_as_alone(engine, alone, path)
    stats = engine.core.scheduler.stats()
    if family == "llama" and WAYS[way].get("num_blocks") == 32:
        assert stats.num_preemptions > 0
    if "guessing" in way:
        assert stats.num_drafted_tokens > 0
    if way.startswith("swapping") and family == "llama":
        assert stats.num_swaps > 0


POLICY_WAYS = ("guessing", "swapping and guessing", "recomputing", "few reads")
FAMILIES = ("gpt_oss", "qwen2_hybrid", "mistral_short", "gemma3", "gpt2")


@pytest.mark.parametrize(
    ("way", "policy", "family"),
    [
        *((way, "priority", "llama") for way in POLICY_WAYS),
        *(  # any two of them meet
            pytest.param(way, policy, FAMILIES[(i + j) % len(FAMILIES)], marks=pytest.mark.slow)
            for i, way in enumerate(WAYS)
            for j, policy in enumerate(POLICIES)
        ),
    ],
)
def test_mixed_requests_equal_single_ones_under_any_policy(checkpoints, alone, way, policy, family):
    path = checkpoints[family]
    assert_each_as_alone(load(path, **WAYS[way], policy=policy), alone, path)


def test_stats_count_each_step_and_lifetime_totals(checkpoints):
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "num_blocks": 40}
    engine = load(checkpoints["llama"], async_scheduling=False, **settings)
    long, short = random_prompt(40), random_prompt(4)
    engine.core.add(request("long", long, replace(GREEDY, max_tokens=5)))
    engine.core.add(request("short", short, replace(GREEDY, max_tokens=5)))
    engine.core.add(request("late", long, replace(GREEDY, max_tokens=5)))
    stats = engine.core.scheduler.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_blocks) == (3, 0, 40)
    engine.core.step()
    stats = engine.core.scheduler.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_step_tokens) == (2, 1, 16)
    assert (stats.num_held_blocks, stats.num_cached_blocks) == (1, 0)
    assert stats.num_prompt_tokens == 40
    engine.core.step()
    engine.core.step()
    stats = engine.core.scheduler.stats()
    # The rest of the long prompt, and the short one.
    assert (stats.num_waiting, stats.num_running, stats.num_step_tokens) == (1, 2, 8 + 4)
    assert stats.num_held_blocks == 3 + 1
    drain(engine)
    stats = engine.core.scheduler.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_held_blocks) == (0, 0, 0)
    assert (stats.num_swapped, stats.num_kept, stats.num_cached_blocks) == (0, 0, 2)
    assert stats.num_prompt_tokens == 40 + 4 + 40
    assert stats.num_hit_tokens == 2 * BLOCK_SIZE
    assert (stats.num_preemptions, stats.num_swaps, stats.num_drafted_tokens) == (0, 0, 0)
    assert engine.core.scheduler.flush_cache() == 2
    assert engine.core.scheduler.stats().num_cached_blocks == 0
    assert engine.core.step().cache_events.cleared


def test_stats_count_blocks_of_all_groups(checkpoints):
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 2}
    engine = load(checkpoints["gemma3"], async_scheduling=False, **settings)
    assert engine.core.scheduler.stats().num_blocks == 2 * 96
    engine.core.add(request("x", random_prompt(40), GREEDY))
    for _ in range(3):
        engine.core.step()
    engine.core.scheduler.check_integrity()
    # The third chunk sees 8 tokens before it, so that the window has left the first block behind.
    assert engine.core.scheduler.stats().num_held_blocks == 3 + 2
    report = engine.core.scheduler.memory_report()
    assert (report.num_logical_blocks, report.num_physical_blocks) == (5, 5)
    assert (report.num_saved_blocks, report.num_wasted_slots) == (0, 2 * (48 - 40))
    engine.core.scheduler.abort("x")
    report = engine.core.scheduler.memory_report()
    assert (report.num_logical_blocks, report.num_physical_blocks) == (0, 0)
    assert (report.num_saved_blocks, report.num_wasted_slots) == (0, 0)


def test_memory_report_counts_shared_prefixes_as_saved(checkpoints):
    engine = load(checkpoints["llama"], max_num_batched_tokens=64, max_num_seqs=4)
    prompt = random_prompt(2 * BLOCK_SIZE)
    engine.generate([prompt], replace(GREEDY, max_tokens=1))
    for i in range(3):
        engine.core.add(request(str(i), (*prompt, i), GREEDY))
    engine.core.step()
    report = engine.core.scheduler.memory_report()
    assert (report.num_logical_blocks, report.num_physical_blocks) == (9, 5)
    assert report.num_saved_blocks == 4
    assert report.num_wasted_slots == 3 * (BLOCK_SIZE - 1)
    drain(engine)


def test_stats_count_accepted_and_rejected_drafts(checkpoints):
    engine = load(checkpoints["tiny"], max_drafts=4)
    text = "Once upon a time, there was a little dog. " * 3
    (result,) = engine.generate([text], SamplingParams(max_tokens=60, ignore_eos=True))
    assert len(result.token_ids) == 60
    assert result.finish_reason is FinishReason.LENGTH
    stats = engine.core.scheduler.stats()
    assert 0 < stats.num_accepted_tokens <= stats.num_drafted_tokens
    assert stats.num_accepted_tokens < 60


def test_stats_count_swapped_sequences(checkpoints):
    engine = load(
        checkpoints["llama"], block_size=4, num_blocks=16, max_num_seqs=4, preemption="swap",
        swap_bytes=2**20, max_num_batched_tokens=64,
    )  # fmt: skip
    for i in range(3):
        engine.core.add(request(str(i), random_prompt(15 + i, seed=i), GREEDY))
    most_swapped = 0
    while engine.core.has_work:
        engine.core.step()
        stats = engine.core.scheduler.stats()
        most_swapped = max(most_swapped, stats.num_swapped)
        assert stats.num_held_blocks <= 16
        assert stats.num_running + stats.num_swapped + stats.num_waiting <= 3
    assert most_swapped > 0
    assert engine.core.scheduler.stats().num_swapped == 0
    assert_idle(engine)


def some_settings(chosen: random.Random, family: str) -> dict[str, Any]:
    """An engine that can serve each of the kinds by itself, and little more."""
    block_size = chosen.choice([1, 2, 3, 4, 5, 8, 16])
    budget = chosen.choice([8, 9, 11, 16, 20, 33, 64])
    window = {"mistral_short": 11}.get(family)
    most = 0
    for kind, prompt in prompts().items():
        num_tokens = len(prompt) + KINDS[kind].max_tokens - 1
        if window is not None:
            num_tokens = min(num_tokens, window - 1 + budget + block_size)
        most = max(most, -(-num_tokens // block_size) * max(1, KINDS[kind].beam_width))
    return {
        "block_size": block_size,
        "num_blocks": most + chosen.choice([0, 1, 2, 5, 10, 40]),
        "max_num_batched_tokens": budget,
        "max_num_seqs": chosen.choice([4, 5, 6, 8]),
        "prefix_caching": chosen.random() < 0.7,
        "policy": chosen.choice(list(POLICIES)),
        "preemption": chosen.choice(["recompute", "swap", "auto"]),
        "swap_bytes": chosen.choice([0, 2**15, 2**17, 2**21]),
        "max_drafts": chosen.choice([0, 0, 1, 3, 6]),
        "max_cache_reads": chosen.choice([None, None, 40, 150]),
        "long_prefill_threshold": chosen.choice([None, None, 3, 10]),
        "free_block_margin": chosen.choice([0.0, 0.0, 0.05, 0.3]),
        "full_sequence_must_fit": chosen.random() < 0.3,
        "async_scheduling": chosen.random() < 0.5,
    }


@pytest.mark.parametrize("turn", [*mostly_slow(range(6), 0, 1), *nightly(range(6, 80))])
def test_random_engine_settings_and_arrivals_change_no_output(checkpoints, alone, turn, rng):
    """Requests come while others run, some end early by themselves, some are aborted and come
    again, and the cache is flushed now and then."""
    family = rng.choice(["llama", "gemma3", "mistral_short", "gpt_oss", "gpt2"])
    path = checkpoints[family]
    expected = expected_of(alone, path)
    settings = some_settings(rng, family)
    engine = load(path, **settings)
    texts = prompts()
    to_come = [kind for kind in KINDS for _ in range(2)]
    rng.shuffle(to_come)
    updates: dict[str, list[SequenceUpdate]] = {}
    here: dict[str, str] = {}
    for number in itertools.count():
        assert number < 4000, f"still not done: {engine.core.scheduler.stats()} {settings}"
        while to_come and (not engine.core.has_work or rng.random() < 0.3):
            kind, name = to_come.pop(), f"request {number} {len(to_come)}"
            here[name] = kind
            engine.core.add(
                EngineRequest(
                    name,
                    texts[kind],
                    KINDS[kind],
                    len(texts[kind]),
                    priority=rng.randrange(3),
                    arrival_time=float(number),
                    first_token_deadline=rng.choice([None, number + 5.0]),
                )
            )
        for update in engine.core.step().updates:
            updates.setdefault(update.request_id, []).append(update)
        engine.core.scheduler.check_integrity()
        if here and rng.random() < 0.02:
            name = rng.choice(list(here))
            engine.core.scheduler.abort(name)
            to_come.append(here.pop(name))
            engine.core.scheduler.check_integrity()
        if rng.random() < 0.01:
            engine.core.scheduler.flush_cache()
        if not to_come and not engine.core.has_work:
            break
    for name, kind in here.items():
        assert transcript(updates[name]) == transcript(expected[kind]), (kind, settings)
        assert numbers(updates[name]) == pytest.approx(numbers(expected[kind]), abs=3e-4), kind
    assert_idle(engine)
