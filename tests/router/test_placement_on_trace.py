"""Policies on a recorded workload with eight prefill workers whose caches never evict."""

from pathlib import Path

import pytest

from bench.replay import replay
from bench.traces import TraceRow, read_mooncake

NUM_WORKERS = 8
NUM_REUSABLE = 105_710
NUM_BLOCKS = 288_500
# Tokens per second of one worker; together they are given 26,500 a second to compute.
BUSY, EASY, INSTANT = 4_000.0, 20_000.0, 1e9


@pytest.fixture(scope="module")
def rows(conversation_trace: Path) -> list[TraceRow]:
    return list(read_mooncake(conversation_trace))


@pytest.mark.parametrize("tokens_per_second", [BUSY, EASY, INSTANT])
def test_baton_keeps_what_is_reusable_and_the_load_even(rows, tokens_per_second):
    replayed = replay(rows, "baton", NUM_WORKERS, tokens_per_second)
    assert replayed.num_reused_blocks + sum(replayed.num_computed_blocks) == NUM_BLOCKS
    assert replayed.num_reused_blocks >= 0.99 * NUM_REUSABLE
    assert replayed.imbalance <= 1.05


def test_round_robin_loses_most_of_it(rows):
    replayed = replay(rows, "round-robin", NUM_WORKERS, EASY)
    assert round(replayed.num_reused_blocks / NUM_REUSABLE, 2) == 0.37


def test_prefix_only_keeps_all_of_it_and_sends_all_to_one_worker(rows):
    replayed = replay(rows, "prefix-only", NUM_WORKERS, EASY)
    assert replayed.num_reused_blocks == NUM_REUSABLE
    assert sorted(map(bool, replayed.num_computed_blocks)) == [False] * 7 + [True]


def test_close_to_saturation_reuse_shortens_the_wait_for_the_first_token(rows):
    """90% of the first tokens come within half of what it takes where load alone decides."""
    p90 = {}
    for policy in ("baton", "least-loaded"):
        first_tokens = sorted(replay(rows, policy, NUM_WORKERS, BUSY).first_tokens)
        p90[policy] = first_tokens[len(first_tokens) * 9 // 10]
    assert p90["baton"] < p90["least-loaded"] / 2
