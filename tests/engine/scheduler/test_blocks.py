"""Ownership of blocks: sharing, copy-on-write, windows, reservations, accounting."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from baton.engine.request import Purpose
from baton.engine.scheduler.plan import StepPlan
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.engine.scheduler.sequences.sequence import Sequence
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import Harness, request


def only(harness: Harness, name: str) -> Sequence:
    (sequence,) = harness.live[name].request.sequences
    return sequence


def copied(plan: StepPlan) -> list[int]:
    return [move.source for move in plan.copies]


def test_fork_copies_the_partial_tail_except_for_last_holder():
    harness = Harness(20)
    harness.add(request("a", range(6), n=3, temperature=1.0))
    harness.step()
    sequences = harness.live["a"].request.sequences
    shared, tail = sequences[0].block_ids[0]
    assert all(s.block_ids == [[shared, tail]] for s in sequences)
    plan = harness.step()
    assert copied(plan) == [tail, tail]
    assert {s.block_ids[0][0] for s in sequences} == {shared}
    tails = [s.block_ids[0][1] for s in sequences]
    assert len(set(tails)) == 3
    assert tail in tails
    assert harness.step().copies == ()


def test_fork_copies_the_tail_in_every_group():
    harness = Harness([cache_group(20), cache_group(20, 3)])
    harness.add(request("a", range(6), n=2, temperature=1.0))
    harness.step()
    plan = harness.step()
    assert [move.group for move in plan.copies] == [0, 1]


def test_fork_at_a_block_boundary_copies_nothing():
    harness = Harness(20)
    harness.add(request("a", range(8), n=3, temperature=1.0))
    plans = harness.run()
    assert not any(plan.copies for plan in plans)


def test_plan_clears_no_block_that_a_copy_has_taken():
    harness = Harness(4)
    harness.add(request("fork", [1] * 6, n=2, temperature=1.0, max_tokens=3))
    harness.add(request("decode", [2] * 4))
    harness.step()
    plan = harness.step()  # the decode grows, and then makes room for the copy
    assert list(harness.computed) == ["fork", "fork1"]
    (move,) = plan.copies
    assert (0, move.target) not in plan.cleared
    harness.run()
    assert not harness.live


def test_fork_without_a_free_block_preempts_a_sibling():
    harness = Harness(4)
    harness.add(request("a", range(10), n=3, temperature=1.0, max_tokens=4))
    plans = harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    assert sum(len(plan.copies) for plan in plans) < 2


def test_fork_waits_until_all_its_slots_are_free():
    harness = Harness(40, max_num_seqs=4)
    harness.add(request("two", range(5), n=2, temperature=1.0, max_tokens=3))
    harness.add(request("three", range(6), n=3, temperature=1.0))
    harness.add(request("one", range(7)))
    harness.step()
    assert list(harness.computed) == ["two"]  # two slots are left: not enough for the next
    harness.step()
    assert list(harness.computed) == ["two", "two1"]
    harness.step()
    harness.step()
    assert list(harness.computed) == ["three", "one"]
    harness.run()


def test_windowed_sequence_holds_only_blocks_it_still_sees():
    harness = Harness([cache_group(20), cache_group(20, 6)], max_num_batched_tokens=4)
    harness.add(request("a", [1] * 17, max_tokens=20))
    sequence = harness.live["a"].request.sequences[0]
    most = 0
    while harness.live:
        harness.step()
        if sequence.block_ids:
            table = sequence.block_ids[1]
            held = [i for i, block in enumerate(table) if block != NULL_BLOCK]
            assert held == list(range(held[0], len(table)))
            most = max(most, len(held))
    assert most == 3  # 6 tokens of the past and 4 new ones, across blocks of 4


def test_windowed_pool_serves_prompts_longer_than_itself():
    harness = Harness([cache_group(4, 6)], max_num_batched_tokens=4, full_sequence_must_fit=True)
    harness.add(request("a", [1, 2] * 20, max_tokens=20))
    harness.run()
    assert harness.scheduler.stats().num_preemptions == 0


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8))
def test_peak_blocks_bounds_a_window_tightly(window, chunk, block_size):
    harness = Harness([cache_group(9, window)], max_num_batched_tokens=chunk, block_size=block_size)
    group = harness.groups[0]
    at_once = [
        -(-(query + chunk) // block_size) - group.first_block(query, block_size)
        for query in range(window, window + 2 * block_size)
    ]
    assert (
        max(at_once)
        <= harness.scheduler._kv.reservations.peak_blocks(group, 10**6)
        <= max(at_once) + 1
    )


@pytest.mark.parametrize("must_fit", [False, True])
def test_full_sequence_must_fit_delays_a_long_prompt(must_fit):
    harness = Harness(6, max_num_batched_tokens=5, full_sequence_must_fit=must_fit)
    harness.add(request("runs", range(9), max_tokens=4))
    harness.step()
    harness.add(request("long", [7] * 14, max_tokens=2))
    harness.step()
    assert ("long" in harness.computed) == (not must_fit)
    harness.run()
    assert (harness.scheduler.stats().num_preemptions > 0) == (not must_fit)


def test_prefill_keeps_its_reserved_blocks():
    harness = Harness(6, max_num_batched_tokens=4)
    harness.add(request("p", range(11), purpose=Purpose.PREFILL))
    harness.step()
    harness.add(request("other", [7] * 13, max_tokens=1))
    while "p" in harness.live:
        harness.step()
    assert harness.kept["p"].request.sequences[0].num_interruptions == 0
    harness.run()
    assert "other" in harness.live
    harness.release("p")
    harness.run()
    assert not harness.live


def test_prefill_reserves_only_blocks_that_will_become_free():
    """They do not become free, so they cannot be kept for it."""
    groups = [cache_group(30), cache_group(12, 3)]
    harness = Harness(groups, block_size=1, max_num_batched_tokens=4, long_prefill_threshold=1)
    for name in "abc":
        harness.add(request(name, range(8), purpose=Purpose.PREFILL))
    harness.run()
    assert sorted(harness.kept) == ["a", "b", "c"]


def test_free_block_margin_is_kept_for_running_sequences():
    harness = Harness(5, free_block_margin=0.4)
    harness.add(request("alone", [1] * 16, max_tokens=1))
    harness.step()  # it takes four of five: nothing runs that could need them
    assert not harness.live
    harness.add(request("runs", [2] * 7, max_tokens=9), request("new", [3] * 5))
    harness.step()
    assert list(harness.computed) == ["runs"]
    harness.run()


@pytest.mark.parametrize("policy", ["decode-first", "prefill-first", "fcfs"])
def test_free_block_margin_is_left_by_begun_prompts(policy):
    """Prompts that have begun wait for what runs, but for nothing else."""
    harness = Harness(20, free_block_margin=0.25, max_num_batched_tokens=8, policy=policy)
    harness.add(request("runs", [1] * 4, max_tokens=12), request("long", [2] * 60, max_tokens=1))
    while "runs" in harness.live:
        harness.step()
        if "long" in harness.computed and "runs" in harness.live:
            assert harness.scheduler.stats().num_held_blocks <= 15 + 1  # the decode took one since
    harness.run()
    assert harness.scheduler.stats().num_preemptions == 0


def test_memory_report_counts_sharing_and_waste():
    harness = Harness(40)
    harness.add(request("a", range(10), n=3, temperature=1.0, max_tokens=20))
    harness.step()
    # Three tables of 3 blocks; 2 slots of the tail, which all three see, are empty.
    report = harness.scheduler.memory_report()
    assert (report.num_logical_blocks, report.num_physical_blocks) == (9, 3)
    assert (report.num_saved_blocks, report.num_wasted_slots) == (6, 6)
    harness.step()
    report = harness.scheduler.memory_report()
    assert (report.num_logical_blocks, report.num_physical_blocks) == (9, 5)
    assert (report.num_saved_blocks, report.num_wasted_slots) == (4, 3)
    harness.abort("a")
    report = harness.scheduler.memory_report()
    assert (report.num_logical_blocks, report.num_physical_blocks) == (0, 0)
    assert (report.num_saved_blocks, report.num_wasted_slots) == (0, 0)


def test_memory_report_counts_every_group():
    harness = Harness([cache_group(40), cache_group(40, 4)], max_num_batched_tokens=8)
    harness.add(request("a", [1] * 18, max_tokens=20))
    for _ in range(3):
        harness.step()
    # 5 blocks of the first group; of the second those from token 13 on, when 16 was the next.
    report = harness.scheduler.memory_report()
    assert report.num_logical_blocks == report.num_physical_blocks == 5 + 2
    assert report.num_wasted_slots == 2 * 2


def test_stats_count_reserved_blocks_of_a_begun_prompt():
    harness = Harness(20, max_num_batched_tokens=8)
    harness.add(request("p", [1] * 30, purpose=Purpose.PREFILL))
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_held_blocks, stats.num_reserved_blocks) == (2, 6)
    harness.abort("p")
    assert harness.scheduler.stats().num_reserved_blocks == 0


def test_stats_count_requests_blocks_and_hits():
    harness = Harness([cache_group(10), cache_group(10, 4)], max_num_seqs=2)
    harness.add(request("p", range(6), purpose=Purpose.PREFILL))
    harness.step()
    harness.add(*(request(name, range(5)) for name in ("a", "b", "c")))
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_kept) == (1, 2, 1)
    assert (stats.num_awaiting_kv, stats.num_swapped) == (0, 0)
    assert stats.num_blocks == 20
    # "a" and "b" find the first block of "p", and have a tail of their own.
    assert stats.num_held_blocks == (2 + 2) * 2
    assert stats.num_cached_blocks == 0  # found, but held
    assert stats.num_step_tokens == 2
    assert (stats.num_hit_tokens, stats.num_prompt_tokens) == (8, 6 + 5 + 5)
