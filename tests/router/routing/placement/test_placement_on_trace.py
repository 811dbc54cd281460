"""Placement policies on a recorded workload: eight prefill workers whose caches never evict."""

from pathlib import Path

import pytest

from baton_simulator.traces import TraceRow, read_mooncake
from bench.router.replay import replay

NUM_WORKERS = 8
# Of the whole trace, and of its first 2,000 requests.
NUM_BLOCKS = {12_031: 288_500, 2_000: 54_559}
NUM_REUSABLE = {12_031: 105_710, 2_000: 15_771}
# Tokens per second of one worker. All eight together have to compute 26,500 a second.
BUSY, EASY, INSTANT = 4_000.0, 20_000.0, 1e9
WHOLE = [pytest.param(12_031, speed, marks=pytest.mark.slow) for speed in (BUSY, EASY, INSTANT)]


@pytest.fixture(scope="module")
def rows(conversation_trace: Path) -> list[TraceRow]:
    return list(read_mooncake(conversation_trace))


@pytest.mark.parametrize(("num_requests", "tokens_per_second"), [(2_000, BUSY), *WHOLE])
def test_baton_keeps_reusable_blocks_and_even_load(rows, num_requests, tokens_per_second):
    replayed = replay(rows[:num_requests], "baton", NUM_WORKERS, tokens_per_second)
    num_computed = sum(replayed.num_computed_blocks)
    assert replayed.num_reused_blocks + num_computed == NUM_BLOCKS[num_requests]
    assert replayed.num_reused_blocks >= 0.99 * NUM_REUSABLE[num_requests]
    assert replayed.imbalance <= 1.05


@pytest.mark.slow
def test_round_robin_keeps_a_third_of_reusable_blocks(rows):
    replayed = replay(rows, "round-robin", NUM_WORKERS, EASY)
    assert round(replayed.num_reused_blocks / NUM_REUSABLE[len(rows)], 2) == 0.37


@pytest.mark.slow
def test_prefix_only_sends_every_prompt_to_one_worker(rows):
    replayed = replay(rows, "prefix-only", NUM_WORKERS, EASY)
    assert replayed.num_reused_blocks == NUM_REUSABLE[len(rows)]
    assert sorted(map(bool, replayed.num_computed_blocks)) == [False] * 7 + [True]


@pytest.mark.slow
def test_reuse_halves_p90_ttft_close_to_saturation(rows):
    p90 = {}
    for policy in ("baton", "least-loaded"):
        first_tokens = sorted(replay(rows, policy, NUM_WORKERS, BUSY).first_tokens)
        p90[policy] = first_tokens[len(first_tokens) * 9 // 10]
    assert p90["baton"] < p90["least-loaded"] / 2
