"""The conversation trace in the simulator. Its caches are bounded as real pools are."""

from pathlib import Path

import pytest

from baton_router.routing.placement.policy import POLICY_NAMES
from baton_simulator.machines import h200_8b
from baton_simulator.outcome import Objectives, Outcome, outcome_of
from baton_simulator.setup import Setup, jobs_of
from baton_simulator.study import simulate
from baton_simulator.traces import MOONCAKE_BLOCK_SIZE, TraceRow, read_mooncake

NUM_REQUESTS, FEWER = 2500, 700
OBJECTIVES = Objectives(ttft=2.0, itl=0.05)
# Requests, blocks of a cache, and multiples of the trace's own rate. At 12 no policy serves all in
# time.
LOADS = [
    (FEWER, 3_000, 10.0),
    *(
        pytest.param(NUM_REQUESTS, num_blocks, rate, marks=pytest.mark.nightly)
        for num_blocks in (1_000, 3_000, 10_000, 30_000)
        for rate in (8.0, 10.0, 12.0)
    ),
]


@pytest.fixture(scope="module")
def rows(conversation_trace: Path) -> list[TraceRow]:
    return list(read_mooncake(conversation_trace))[:NUM_REQUESTS]


def test_single_worker_hits_every_full_block_seen_before(rows):
    rows = rows[:200]
    setup = Setup(
        machine=h200_8b(),
        num_prefill=1,
        num_decode=1,
        policy="prefix-only",  # which lets no decode worker compute a prompt
        cache_tokens=20_000 * MOONCAKE_BLOCK_SIZE,
    )
    cluster = simulate(setup, rows, rate=0.1)  # one prompt after the other
    seen: set[bytes] = set()
    num_found = 0
    for job in jobs_of(rows, 1.0, MOONCAKE_BLOCK_SIZE):
        num_found += next((i for i, h in enumerate(job.hashes) if h not in seen), len(job.hashes))
        seen.update(job.hashes)
    num_hit_tokens = sum(job.num_cached_tokens for job in cluster.jobs)
    # Of a prompt that is all there, the last token is computed again.
    assert num_hit_tokens == pytest.approx(num_found * MOONCAKE_BLOCK_SIZE, abs=len(rows))
    assert num_found > 100


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_requests", "num_blocks", "rate"), LOADS)
def test_baton_policy_beats_every_other_policy_on_the_trace(rows, num_requests, num_blocks, rate):
    """On p90 TTFT and on goodput, with caches of `num_blocks`, at `rate` times the trace's own
    rate. Every policy rejects requests that cannot meet their deadline."""
    rows = rows[:num_requests]
    found = {policy: _outcome(rows, policy, num_blocks, rate) for policy in POLICY_NAMES}
    baton = found.pop("baton")
    for other in found.values():
        assert baton.goodput > other.goodput
        assert baton.ttft[1] < other.ttft[1]


def _outcome(rows: list[TraceRow], policy: str, num_blocks: int, rate: float) -> Outcome:
    setup = Setup(
        machine=h200_8b(),
        num_prefill=8,
        num_decode=8,
        policy=policy,  # type: ignore[arg-type]
        cache_tokens=num_blocks * MOONCAKE_BLOCK_SIZE,
        ttft_deadline=OBJECTIVES.ttft,
    )
    return outcome_of(simulate(setup, rows, rate), policy, rate, OBJECTIVES)
