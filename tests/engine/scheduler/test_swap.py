"""Swap of blocks to host memory and back."""

import sys
from itertools import count
from types import FrameType
from typing import Any

import pytest

from baton.engine.request import KvSource
from baton.engine.scheduler.plan import StepPlan
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.scheduler_stats import SchedulerStats
from baton.engine.scheduler.sequences.config import Preemption
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import Harness, request


def swapping(num_blocks: int = 4, num_host_blocks: int = 20, **config: object) -> Harness:
    group = cache_group(num_blocks, num_host_blocks=num_host_blocks)
    return Harness([group], **{"preemption": Preemption.SWAP, **config})


def step_until_swapped(harness: Harness) -> StepPlan:
    for _ in range(100):
        plan = harness.step()
        if plan.swap_out:
            return plan
    raise AssertionError("nothing was swapped")


def two(harness: Harness) -> None:
    """Both start with two blocks; with their third, one has to go."""
    harness.add(request("a", [1] * 7), request("b", [2] * 7))


def test_swap_moves_each_computed_block_out_and_in_once():
    harness = swapping(prefix_caching=False)
    two(harness)
    plan = step_until_swapped(harness)
    assert len(plan.swap_out) == 2
    stats = harness.scheduler.stats()
    assert (stats.num_swapped, stats.num_held_host_blocks, stats.num_host_blocks) == (1, 2, 20)
    plans = harness.run()
    assert sum(len(plan.swap_in) for plan in plans) == 2
    stats = harness.scheduler.stats()
    assert (stats.num_swaps, stats.num_held_host_blocks) == (1, 0)
    assert (stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (2, 2)


def test_swap_in_skips_blocks_that_are_still_cached():
    harness = swapping(5)
    harness.add(request("a", [1] * 7, max_tokens=3), request("b", [2] * 11))
    step_until_swapped(harness)
    plans = harness.run()
    moved = [move for plan in plans for move in plan.swap_in]
    assert len(moved) == 1  # the tail; two full blocks were found


@pytest.mark.parametrize(
    ("swap_block", "compute_token", "num_swaps"),
    [(1e-9, 1.0, 1), (1.0, 1e-9, 0), (1.0, 0.51, 1), (1.0, 0.5, 0)],
)
def test_preemption_picks_the_cheaper_of_swap_and_recompute(swap_block, compute_token, num_swaps):
    """Two blocks, there and back, against eight tokens."""
    harness = swapping(preemption=Preemption.AUTO)
    harness.scheduler.costs.swap_block = swap_block
    harness.scheduler.costs.compute_token = compute_token
    two(harness)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.num_preemptions, stats.num_swaps) == (1, num_swaps)


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_preemption_recomputes_without_room_on_the_host(num_host_blocks):
    harness = swapping(num_host_blocks=num_host_blocks)
    two(harness)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.num_preemptions, stats.num_swaps) == (1, 0)


def test_swapped_sequence_resumes_before_waiting_requests():
    harness = swapping(max_num_seqs=2, prefix_caching=False)
    two(harness)
    step_until_swapped(harness)
    harness.add(request("small", [3], max_tokens=1))
    harness.step()
    assert list(harness.computed) == ["a"]  # though there is a slot and a block for "small"
    started = []
    while harness.live:
        started += [s.request.request_id for s in harness.step().new_slots]
    assert started == ["b", "small"]


def test_swapped_sequences_resume_best_first():
    harness = swapping(6, prefix_caching=False)
    harness.add(*(request(name, [i] * 7, max_tokens=17) for i, name in enumerate("abc")))
    while harness.scheduler.stats().num_swapped < 2:
        harness.step()
    back = []
    while harness.live:
        back += [s.request.request_id for s in harness.step().new_slots]
    assert back[:2] == ["b", "c"]


def test_swapped_sequence_resumes_only_if_it_can_also_decode():
    """Else it would have to make room again at once."""
    harness = swapping(6, policy="priority", prefix_caching=False)
    harness.add(request("a", [1] * 3, max_tokens=12, priority=0))
    harness.add(request("b", [2] * 7, max_tokens=12, priority=2))
    for _ in range(4):
        harness.step()
    harness.add(request("c", [3], max_tokens=4, priority=1))
    assert len(step_until_swapped(harness).swap_out) == 3
    while "c" in harness.live:
        harness.step()
    assert harness.scheduler._kv.reservations.num_free_blocks(0) == 3
    plan = harness.step()
    assert list(harness.computed) == ["a"]
    assert not plan.swap_in
    harness.run()
    assert harness.scheduler.stats().num_swaps == 1


def fork_beside_the_best(num_blocks: int) -> Harness:
    """Two siblings of two shared blocks and a tail each, and one that will need a second block."""
    harness = swapping(num_blocks, policy="priority", prefix_caching=False)
    harness.add(request("fork", [2] * 9, n=2, temperature=1.0, max_tokens=6, priority=1))
    harness.step()
    harness.step()
    harness.add(request("best", [3] * 4, max_tokens=4, priority=0))
    return harness


def test_swapped_siblings_move_together_and_blocks_once():
    harness = fork_beside_the_best(5)
    plan = step_until_swapped(harness)
    assert list(harness.computed) == ["best"]
    assert len(plan.swap_out) == 4
    assert harness.scheduler.stats().num_swapped == 2
    while not plan.swap_in:
        plan = harness.step()
    assert len(plan.swap_in) == 4
    assert [s.index for s in plan.new_slots] == [0, 1]
    harness.run()
    assert not harness.live


def test_sibling_preempted_for_a_sibling_is_not_swapped():
    """They would come back together, to where there is room for one."""
    harness = swapping(4)
    harness.add(request("a", [1] * 7, n=2, temperature=1.0))
    harness.run()
    assert not harness.live
    stats = harness.scheduler.stats()
    assert (stats.num_preemptions > 0, stats.num_swaps) == (True, 0)


def test_sequence_that_preempts_itself_is_not_swapped():
    harness = swapping(4, prefix_caching=False)
    harness.add(request("a", [1] * 5), request("b", [2] * 7))
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    assert harness.scheduler.stats().num_swaps == 0


def test_swapped_beams_move_together():
    harness = swapping(5, policy="priority", prefix_caching=False)
    harness.add(request("beams", [2] * 9, beam_width=2, max_tokens=6, priority=1))
    harness.step()
    harness.step()
    harness.add(request("best", [3] * 4, max_tokens=12, priority=0))
    step_until_swapped(harness)
    assert harness.scheduler.stats().num_swapped == len(harness.live["beams"].request.sequences)
    harness.run()
    assert not harness.live


def test_step_of_only_swap_ins_makes_progress():
    harness = swapping(4, prefix_caching=False)
    two(harness)
    step_until_swapped(harness)
    harness.abort("a")
    plan = harness.step()
    assert plan.swap_in
    assert plan.num_tokens == 0
    assert plan.made_progress
    harness.step()
    assert list(harness.computed) == ["b"]
    harness.run()


def test_host_blocks_are_freed_a_step_after_swap_in():
    """Blocks swapped out in the same step must not overwrite them before they are read."""
    harness = swapping(4, prefix_caching=False)
    two(harness)
    step_until_swapped(harness)
    host = harness.groups[0].host
    assert host is not None
    harness.abort("a")
    assert harness.step().swap_in
    assert host.num_held_blocks == 2
    harness.step()
    assert host.num_held_blocks == 0
    harness.run()


def test_swap_in_does_not_write_to_a_cached_tail():
    """All of its prompt was cached; its last token is yet to be computed once more."""
    groups = [cache_group(5, num_host_blocks=9), cache_group(20, 30, num_host_blocks=9)]
    harness = Harness(groups, preemption=Preemption.SWAP)
    prompt = [1] * 4 + [2] * 4
    harness.add(request("first", prompt, max_tokens=1))
    harness.run()
    harness.add(request("best", [3] * 11, max_tokens=4))
    harness.add(request("d", prompt, kv_source=KvSource.EXTERNAL))
    harness.step()
    harness.step()
    harness.deliver("d", with_token=False)
    plan = harness.step()
    assert len(plan.swap_out) == 4
    plan = harness.step_until(lambda: not harness.scheduler.stats().num_swapped)
    assert [move.group for move in plan.swap_in] == [0]  # the others were found
    harness.run()
    assert not harness.live


def test_abort_of_a_swapped_sequence_frees_host_blocks_next_step():
    harness = swapping(prefix_caching=False)
    two(harness)
    step_until_swapped(harness)
    host = harness.groups[0].host
    assert host is not None
    assert host.num_held_blocks == 2
    harness.abort("b")
    assert host.num_held_blocks == 2  # a step that is under way may still fill it
    harness.step()
    assert host.num_held_blocks == 0
    harness.run()


def test_swap_moves_only_blocks_that_a_window_sees():
    groups = [cache_group(12, num_host_blocks=20), cache_group(20, 3, num_host_blocks=20)]
    harness = Harness(groups, preemption=Preemption.SWAP, prefix_caching=False)
    harness.add(request("a", [1] * 7, max_tokens=20), request("b", [2] * 13, max_tokens=20))
    plans = harness.run()
    out = [move for plan in plans for move in plan.swap_out]
    assert out
    assert sum(m.group == 1 for m in out) < sum(m.group == 0 for m in out)
    assert not harness.live


def test_swap_needs_a_host_pool_in_every_group():
    groups = [cache_group(4, num_host_blocks=20), cache_group(4, 30)]
    harness = Harness(groups, preemption=Preemption.SWAP)
    two(harness)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.num_preemptions > 0, stats.num_swaps) == (True, 0)


def stats_amid_swap(line: int) -> tuple[Harness, SchedulerStats]:
    """The counts as another thread reads them, while a step swaps at this line of the reading."""
    harness = swapping(prefix_caching=False)
    two(harness)
    lines = iter(range(line))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and next(lines, None) is None:
            sys.settrace(None)
            frame.f_trace = None
            step_until_swapped(harness)
        return trace

    sys.settrace(lambda frame, *_: trace if frame.f_code is Scheduler.stats.__code__ else None)
    try:
        return harness, harness.scheduler.stats()
    finally:
        sys.settrace(None)


def test_stats_count_no_more_swaps_than_preemptions():
    for line in count():
        harness, stats = stats_amid_swap(line)
        assert stats.num_swaps <= stats.num_preemptions
        if not harness.scheduler.stats().num_swaps:  # it has fewer lines
            assert line > 10
            return
