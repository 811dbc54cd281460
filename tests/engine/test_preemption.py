"""Making room changes nothing but time, whether KV is dropped and computed again or swapped."""

import pytest

from baton.sampling import SamplingParams
from tests.support.engine.engines import (
    answers,
    assert_idle,
    drain,
    load,
    mostly_slow,
    output_of,
    request,
    tokens,
)
from tests.support.engine.prompts import NUM_TOKENS, random_prompt
from tests.support.grids import grid

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.5, seed=11)
PROMPTS = [random_prompt(length, seed=3) for length in (15, 1, 17, 30, 8, 16, 75, 12)]
TIGHT = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 24, "max_num_seqs": 6}
SWAP = {"preemption": "swap", "swap_bytes": 2**20}
MODES = {"recompute": {"preemption": "recompute"}, "swap": SWAP}


@grid(
    family=mostly_slow(
        ["llama", "qwen3", "gemma3", "gpt_oss", "qwen2_hybrid", "mistral_short", "gemma3n"],
        "llama",
        "gemma3",
    ),
    mode=MODES,
    caching=[True, False],
)
def test_preemption_changes_no_token(checkpoints, oracle, family, mode, caching):
    path = checkpoints[family]
    blocks = 11 if family == "mistral_short" else 24
    settings = {**TIGHT, **MODES[mode], "num_blocks": blocks, "prefix_caching": caching}
    engine = load(path, **settings)
    expected = [oracle(path, p, NUM_TOKENS) for p in PROMPTS]
    said = [output_of(u)[0] for u in answers(engine, PROMPTS, GREEDY)]
    assert said == expected
    stats = engine.core.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swaps > 0) == (mode == "swap")
    assert_idle(engine)


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_preemptions_are_counted_by_mode(checkpoints, mode):
    engine = load(checkpoints["llama"], **{**TIGHT, **SWAP, "preemption": mode})
    engine.generate(PROMPTS, GREEDY)
    stats = engine.core.scheduler.stats()
    if mode == "recompute":
        assert (stats.num_recomputes > 0, stats.num_swaps) == (True, 0)
    if mode == "swap":
        assert stats.num_swaps > 0
    assert stats.num_preemptions == stats.num_recomputes + stats.num_swaps > 0


@pytest.mark.parametrize("num_host_blocks", [1, 3, 7])
def test_preemption_recomputes_when_host_memory_is_full(checkpoints, oracle, num_host_blocks):
    path = checkpoints["llama"]
    block_bytes = load(path, block_size=4).core.cache.layouts[0].block_bytes
    engine = load(path, **{**TIGHT, **SWAP, "swap_bytes": num_host_blocks * block_bytes})
    assert engine.core.cache.host_pools[0].num_blocks == num_host_blocks
    expected = [oracle(path, p, NUM_TOKENS) for p in PROMPTS]
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    stats = engine.core.scheduler.stats()
    assert stats.num_preemptions > stats.num_swaps
    assert_idle(engine)


def test_swap_bytes_below_one_block_disable_swapping(checkpoints, oracle):
    path = checkpoints["llama"]
    engine = load(path, **{**TIGHT, **SWAP, "swap_bytes": 1})
    expected = [oracle(path, p, NUM_TOKENS) for p in PROMPTS]
    assert tokens(engine.generate(PROMPTS, GREEDY)) == expected
    assert engine.core.scheduler.stats().num_preemptions > 0
    assert engine.core.scheduler.stats().num_swaps == 0
    assert_idle(engine)


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_aborted_at_any_step_leak_nothing(checkpoints, oracle, mode):
    """Each victim is somewhere else when it ends: waiting, running, preempted or swapped."""
    path = checkpoints["llama"]
    expected = [oracle(path, p, NUM_TOKENS) for p in PROMPTS]
    engine = load(path, **{**TIGHT, **MODES[mode]})
    for when in range(1, 40, 3):
        engine.core.scheduler.flush_cache()
        for i, prompt in enumerate(PROMPTS):
            engine.core.add(request(str(i), prompt, GREEDY))
        early: dict[str, list] = {}
        for _ in range(when):
            for update in engine.core.step().updates:
                early.setdefault(update.request_id, []).append(update)
        victims = [str(i) for i in range(when % 2, len(PROMPTS), 2)]
        engine.core.scheduler.abort(*victims)
        engine.core.scheduler.check_integrity()
        for request_id, updates in drain(engine).items():
            assert request_id not in victims
            early.setdefault(request_id, []).extend(updates)
        for i in range(len(PROMPTS)):
            if str(i) not in victims:
                assert output_of(early[str(i)])[0] == expected[i]
        assert_idle(engine)
