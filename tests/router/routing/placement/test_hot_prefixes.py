"""A prefix that many prompts begin with goes to several workers once its holders cannot keep up;
one that is used now and then stays where it is. Workers are as `bench.router.replay` has them."""

import random

import pytest

from baton_simulator.traces import MOONCAKE_BLOCK_SIZE, TraceRow
from bench.router.replay import Replayed, replay

NUM_WORKERS = 4
# As the router assumes before it has learned anything.
TOKENS_PER_SECOND = 1e4
NUM_PREFIX, NUM_OWN = 20, 2  # blocks
CAPACITY = TOKENS_PER_SECOND / (NUM_OWN * MOONCAKE_BLOCK_SIZE)  # requests a second of one worker


def prompts(per_second: float, number: int, num_own: int, *, prefix: int = 0, seed: int = 0):
    """Arrivals at random of prompts that begin with the same blocks and go on with their own."""
    source, now, rows = random.Random(seed), 0.0, []
    shared = range(prefix * 1000, prefix * 1000 + NUM_PREFIX if prefix else 0)
    for i in range(number):
        now += source.expovariate(per_second)
        first = (seed + 1) * 10**6 + i * num_own
        ids = (*shared, *range(first, first + num_own))
        rows.append(TraceRow(now, len(ids) * MOONCAKE_BLOCK_SIZE, 1, ids))
    return rows


def ninetieth(replayed: Replayed) -> float:
    return sorted(replayed.first_tokens)[len(replayed.first_tokens) * 9 // 10]


def spread(replayed: Replayed) -> dict[str, int]:
    return {worker: replayed.chosen.count(worker) for worker in set(replayed.chosen)}


@pytest.mark.parametrize("times", [1.5, 2.5, 3.2])
def test_hot_prefix_spreads_to_as_many_workers_as_rate_needs(times):
    """It is computed once, and those who serve it share evenly. First tokens come nearly as soon as
    the workers can compute the prompts' own tokens."""
    number = 2000
    rows = prompts(times * CAPACITY, number, NUM_OWN, prefix=1)
    replayed = replay(rows, "baton", NUM_WORKERS, TOKENS_PER_SECOND, fetches=True)
    assert sum(replayed.num_computed_blocks) == number * NUM_OWN + NUM_PREFIX
    workers = spread(replayed)
    assert len(workers) > times
    assert replayed.num_fetched_blocks == (len(workers) - 1) * NUM_PREFIX
    assert max(workers.values()) <= 1.05 * number / len(workers)
    assert ninetieth(replayed) <= 3 / CAPACITY


@pytest.mark.parametrize("times", [1.5, 2.5, 3.2])
def test_hot_prefix_is_recomputed_per_worker_without_sharing(times):
    """That is worth a longer queue, of which there is an end."""
    number = 2000
    rows = prompts(times * CAPACITY, number, NUM_OWN, prefix=1)
    replayed = replay(rows, "baton", NUM_WORKERS, TOKENS_PER_SECOND)
    workers = spread(replayed)
    num_copies = len(workers) * NUM_PREFIX
    assert sum(replayed.num_computed_blocks) == number * NUM_OWN + num_copies
    assert len(workers) >= min(times, NUM_WORKERS - 1)
    one_copy = NUM_PREFIX * MOONCAKE_BLOCK_SIZE / TOKENS_PER_SECOND
    assert ninetieth(replayed) <= 17 * one_copy
    alone = replay(rows, "prefix-only", NUM_WORKERS, TOKENS_PER_SECOND)
    assert len(spread(alone)) == 1
    assert ninetieth(alone) > 2 * ninetieth(replayed)


@pytest.mark.parametrize("fetches", [True, False])
def test_rare_prefix_stays_at_one_worker(fetches):
    """A prompt in five seconds, and other prompts, of which all workers have some to do."""
    rare = prompts(0.02 * CAPACITY, 300, NUM_OWN, prefix=1)
    others = prompts(0.4 * CAPACITY, 6000, 1, seed=1)
    rows = sorted([*rare, *others], key=lambda row: row.arrival)
    replayed = replay(rows, "baton", NUM_WORKERS, TOKENS_PER_SECOND, fetches=fetches)
    pairs = zip(replayed.chosen, rows, strict=True)
    where = {worker for worker, row in pairs if len(row.block_ids or ()) > 1}
    assert len(where) == 1
    assert len(spread(replayed)) == NUM_WORKERS
    assert replayed.num_fetched_blocks == 0
    assert replayed.imbalance < 1.05


def test_moderately_used_prefix_is_copied_at_most_once():
    some = prompts(0.3 * CAPACITY, 300, NUM_OWN, prefix=1)
    replayed = replay(some, "baton", NUM_WORKERS, TOKENS_PER_SECOND, fetches=True)
    assert len(spread(replayed)) <= 2
