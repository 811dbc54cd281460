"""Layers with a window keep only the blocks that the next token sees, and say the same."""

import pytest

from baton.engine.llm import LLM
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import EngineLimitError
from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import MAX_LEN
from tests.support.engine.engines import assert_idle, load, mostly_slow, output_of, request, tokens
from tests.support.engine.prompts import NUM_TOKENS, awkward_prompts, random_prompt, sharing_prompts
from tests.support.grids import grid, nightly

HYBRID = {"gemma3": 9, "gpt_oss": 20, "qwen2_hybrid": 21, "gemma2": 24, "cohere2": 9, "gemma3n": 9}
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
BLOCK = 4
BUDGET = 8


def most_needed(window: int, budget: int = BUDGET, block_size: int = BLOCK) -> int:
    """Blocks that a window before a step's tokens, and these, can lie in."""
    return -(-(window - 1 + budget) // block_size) + 1


def load_tight(path: str, **changes: object) -> LLM:
    """Room for one sequence of any length in the full layers, and for its window in the others."""
    settings = {"block_size": BLOCK, "max_num_batched_tokens": BUDGET, "max_num_seqs": 2}
    roomy = load(path, **settings, num_blocks=1)
    full, *windowed = roomy.core.cache.layouts
    assert full.window is None or not windowed
    settings |= changes
    num_bytes = sum(
        layout.block_bytes
        * (MAX_LEN // BLOCK if layout.window is None else 2 * 2 * most_needed(layout.window))
        for layout in roomy.core.cache.layouts
    )
    return load(path, **settings, num_blocks=None, kv_cache_bytes=num_bytes)


def peaks(engine: LLM, prompt: tuple[int, ...]) -> list[int]:
    """Runs a request to its end; the most blocks it ever held of each group."""
    engine.core.add(request("x", prompt, GREEDY))
    most = [0] * len(engine.core.cache.pools)
    while engine.core.has_work:
        engine.core.step()
        engine.core.scheduler.check_integrity()
        requests = engine.core.scheduler.requests
        if "x" in requests:
            tables = requests["x"].sequences[0].block_ids
            held = [sum(b != NULL_BLOCK for b in table) for table in tables]
            most = [max(pair) for pair in zip(most, held, strict=True)]
    return most


@pytest.mark.parametrize("family", HYBRID)
def test_long_prompt_holds_only_the_blocks_of_its_window(checkpoints, oracle, family):
    path, prompt, window = checkpoints[family], awkward_prompts()[-1], HYBRID[family]
    engine = load_tight(path, async_scheduling=False)
    full, windowed = engine.core.cache.pools
    assert (full.layout.window, windowed.layout.window) == (None, window)
    assert full.num_blocks >= MAX_LEN // BLOCK > windowed.num_blocks
    assert tokens(engine.generate([prompt], GREEDY)) == [oracle(path, prompt, NUM_TOKENS)]
    engine.core.scheduler.flush_cache()
    most_full, most_windowed = peaks(engine, prompt)
    assert most_full == -(-(MAX_LEN - 1) // BLOCK)
    # Once more than the bound it would hold the whole prompt.
    assert -(-window // BLOCK) <= most_windowed <= most_needed(window)
    assert_idle(engine)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("family", mostly_slow(HYBRID, "gemma3", "gpt_oss"))
def test_batch_runs_in_a_pool_sized_for_windows(checkpoints, oracle, family, caching):
    path = checkpoints[family]
    engine = load_tight(path, prefix_caching=caching)
    prompts = [*awkward_prompts(), *sharing_prompts()[:4]]
    expected = [oracle(path, p, NUM_TOKENS) for p in prompts]
    for _ in range(2):
        assert tokens(engine.generate(prompts, GREEDY)) == expected
    assert_idle(engine)


@grid(
    block_size=mostly_slow([1, 3, 4, 16], 1, 4),
    budget=mostly_slow([1, 3, 8, 32], 3, 8),
    caching=[True, False],
)
def test_windowed_prompt_may_exceed_the_pool(checkpoints, oracle, block_size, budget, caching):
    path, prompt = checkpoints["mistral_short"], awkward_prompts()[-1]
    num_blocks = most_needed(11, budget, block_size)
    assert num_blocks * block_size < len(prompt) / 2
    engine = load(
        path, block_size=block_size, num_blocks=num_blocks, max_num_batched_tokens=budget,
        max_num_seqs=1, prefix_caching=caching,
    )  # fmt: skip
    expected = oracle(path, prompt, NUM_TOKENS)
    assert tokens(engine.generate([prompt, prompt], GREEDY)) == [expected] * 2
    assert_idle(engine)
    needed, room = num_blocks * block_size, (num_blocks - 1) * block_size
    named = f"need {needed} tokens of KV, .* the KV pool has room for {room}\\."
    with pytest.raises(EngineLimitError, match=named):
        load(
            path, block_size=block_size, num_blocks=num_blocks - 1, max_num_seqs=1,
            max_num_batched_tokens=budget,
        ).generate([prompt], GREEDY)  # fmt: skip


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral_short"])
def test_windowed_prefix_is_hit_without_its_beginning(checkpoints, oracle, family):
    path, prompt = checkpoints[family], random_prompt(75)
    engine = load(path, block_size=BLOCK, num_blocks=200, max_num_batched_tokens=8, max_num_seqs=4)
    engine.generate([prompt], GREEDY)
    for length in (75, 73, 72, 71, 68, 40):
        (result,) = engine.generate([prompt[:length]], GREEDY)
        assert result.token_ids == oracle(path, prompt[:length], NUM_TOKENS)
        assert result.num_cached_tokens == min(length // BLOCK * BLOCK, length - 1)
    assert_idle(engine)


@pytest.mark.parametrize("family", ["gemma3", "mistral_short", *nightly(["gpt_oss"])])
def test_windowed_prefix_hit_shrinks_when_blocks_are_evicted(checkpoints, oracle, family):
    """The engine finds no more than every group can continue from."""
    path, prompt = checkpoints[family], random_prompt(75)
    for victim in range(1, 30, 3):
        engine = load(
            path, block_size=BLOCK, num_blocks=60, max_num_batched_tokens=8, max_num_seqs=4
        )
        engine.generate([prompt], GREEDY)
        group = len(engine.core.cache.pools) - 1
        engine.core.scheduler._kv.groups[group].pool.evict([victim])
        (result,) = engine.generate([prompt], GREEDY)
        assert result.token_ids == oracle(path, prompt, NUM_TOKENS)
        assert result.num_cached_tokens <= 72
        assert_idle(engine)


def test_windows_leave_the_memory_of_pools_unchanged(checkpoints):
    """The pools together take what was asked for, each at least a block of it."""
    for family in (*HYBRID, "llama", "mistral_short"):
        for num_bytes in (2**17, 2**20, 2**24):
            engine = load(checkpoints[family], num_blocks=None, kv_cache_bytes=num_bytes)
            used = sum(p.num_blocks * p.layout.block_bytes for p in engine.core.cache.pools)
            assert used <= num_bytes
            unbounded = [p for p in engine.core.cache.pools if p.layout.window is None]
            assert not unbounded or used > num_bytes - sum(
                p.layout.block_bytes for p in engine.core.cache.pools
            )
            assert min(p.num_blocks for p in engine.core.cache.pools) >= 1


@pytest.mark.parametrize("family", ["gemma3", "mistral_short"])
def test_windowed_output_frees_passed_blocks(checkpoints, oracle, family):
    path, prompt = checkpoints[family], random_prompt(3)
    window = 9 if family == "gemma3" else 11
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    engine = load(path, block_size=BLOCK, max_num_batched_tokens=BUDGET, max_num_seqs=2)
    engine.core.add(request("x", prompt, params))
    updates = []
    while engine.core.has_work:
        updates += engine.core.step().updates
        requests = engine.core.scheduler.requests
        if "x" in requests:
            table = requests["x"].sequences[0].block_ids[-1]
            assert sum(b != NULL_BLOCK for b in table) <= -(-window // BLOCK) + 2
    assert output_of(updates)[0] == oracle(path, prompt, 120)
    assert_idle(engine)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_windowed_prompt_is_cached_before_its_blocks_are_freed(checkpoints, async_scheduling):
    """Its last token sees the first block; the first decode, which may be launched before the
    prompt is committed, does not."""
    prompt = random_prompt(15, seed=3)
    engine = load(checkpoints["mistral_short"], block_size=5, async_scheduling=async_scheduling)
    hits = [engine.generate([prompt], GREEDY)[0].num_cached_tokens for _ in range(2)]
    assert hits == [0, 14]
