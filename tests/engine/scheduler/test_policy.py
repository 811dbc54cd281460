"""In which order requests are served, and what bounds a step."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from baton.engine.request import Purpose
from baton.engine.scheduler.plan import StepPlan, StepResult
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.scheduling.planner import READ_PATIENCE
from baton.engine.scheduler.scheduling.policy import (
    AGEING_STEPS,
    AGEING_TOKENS,
    DEFAULT_DEADLINE_SECONDS,
    POLICIES,
    DecodeOrder,
)
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.models.images.encoder_input import EncoderInput
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import Harness, request


def order_served(policy: str, **requests: dict[str, Any]) -> list[str]:
    """In which order requests that wait start, one at a time."""
    harness = Harness(20, max_num_seqs=1, policy=policy)
    for name, kind in requests.items():
        harness.add(request(name, [1] * kind.pop("length", 5), max_tokens=2, **kind))
    started = []
    while harness.live:
        started += [sequence.request.request_id for sequence in harness.step().new_slots]
    return started


ARRIVED = {
    "a": {"priority": 2, "length": 9, "arrival_time": 0.0, "first_token_deadline": 50.0},
    "b": {"priority": 1, "length": 8, "arrival_time": 1.0},
    "c": {"priority": 2, "length": 2, "arrival_time": 2.0, "first_token_deadline": 3.0},
    "d": {"priority": 0, "length": 5, "arrival_time": 3.0},
}


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", "abcd"),
        ("decode-first", "abcd"),
        ("prefill-first", "abcd"),
        ("priority", "dbac"),
        ("deadline", "cbda"),  # without a deadline it is patience that runs out
        ("shortest-prefill", "cdba"),
    ],
)
def test_policy_orders_waiting_requests(policy, order):
    requests = {name: dict(kind) for name, kind in ARRIVED.items()}
    assert order_served(policy, **requests) == list(order)


def test_policies_are_all_covered_here():
    assert len(POLICIES) == 6


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "b"), ("priority", "a")])
def test_policy_preempts_the_lowest_ranked_request(policy, victim):
    harness = Harness(4, policy=policy)
    harness.add(request("a", [1] * 7, priority=1), request("b", [2] * 7, priority=0))
    sequences = {name: harness.live[name].request.sequences[0] for name in "ab"}
    harness.run()
    assert {name for name, s in sequences.items() if s.num_interruptions} == {victim}


def test_skipped_request_runs_on_budget_freed_in_the_same_step():
    """Else, with nothing planned, it would have to give way too, and both would begin again."""
    harness = Harness(
        4, max_num_batched_tokens=7, encoder_budget=3, encoder_cache_tokens=3, prefix_caching=False
    )
    first = (EncoderInput(b"long", 2, 3), EncoderInput(b"short", 5, 2))
    harness.add(request("first", [1, 2, *[0] * 5, *[3] * 5], 1, encoder_inputs=first))
    last = (EncoderInput(b"long", 1, 3),)
    harness.add(request("last", [4, *[0] * 3, *[5] * 7], 1, encoder_inputs=last))
    harness.step()
    assert harness.computed == {"first": (0, 5), "last": (0, 2)}
    harness.step()  # `last` holds the encoder's room that `first` needs, and has no blocks
    assert harness.computed == {"first": (5, 12)}
    assert harness.scheduler.stats().num_preemptions == 1
    harness.run()
    assert not harness.live


def test_preempted_request_restarts_before_waiting_ones():
    harness = Harness(4, max_num_seqs=2)
    harness.add(*(request(name, [i] * 7) for i, name in enumerate(["first", "second", "third"])))
    started: list[str] = []
    while harness.live:
        started += [sequence.request.request_id for sequence in harness.step().new_slots]
    assert started.count("first") == 1
    assert started.index("third") > started.index("second", started.index("second") + 1)


turns = st.integers(0, 10**6)


@given(first=st.integers(-5, 5), second=st.integers(-5, 5), earlier=turns, later=turns)
def test_priority_rank_ages_with_waiting(first, second, earlier, later):
    rank = POLICIES["priority"].rank
    waited = rank(request("a", [1], priority=first).spec, 0, earlier)
    fresh = rank(request("b", [1], priority=second).spec, 1, later)
    is_outweighed = later - earlier > (first - second) * AGEING_STEPS
    if later - earlier != (first - second) * AGEING_STEPS:
        assert (waited < fresh) == is_outweighed


@given(length=st.integers(1, 500), other=st.integers(1, 500), steps=st.integers(0, 20))
def test_shortest_prefill_rank_ages_with_waiting(length, other, steps):
    rank = POLICIES["shortest-prefill"].rank
    waited = rank(request("a", [1] * length).spec, 0, 100)
    fresh = rank(request("b", [1] * other).spec, 1, 100 + steps)
    assert (waited < fresh) == (steps * AGEING_TOKENS > length - other)


def test_deadline_rank_defaults_to_arrival_plus_patience():
    rank = POLICIES["deadline"].rank
    assert rank(request("a", [1], arrival_time=5.0).spec, 0, 0) == 5.0 + DEFAULT_DEADLINE_SECONDS
    assert rank(request("a", [1], first_token_deadline=7.0).spec, 0, 0) == 7.0


@pytest.mark.parametrize(
    ("policy", "kind", "flood"),
    [
        ("priority", {"priority": 1}, {"priority": 0}),
        ("shortest-prefill", {"length": 40}, {"length": 1}),
        ("deadline", {"first_token_deadline": 30.0}, {"first_token_deadline": None}),
    ],
)
def test_policy_starves_no_request(policy, kind, flood):
    """One slot, and in every step a new request that ranks before the one that waits."""
    config = SchedulerConfig(
        max_num_batched_tokens=50,
        max_num_seqs=1,
        block_size=16,
        max_model_len=64,
        vocab_size=8,
        policy=policy,
    )
    scheduler = Scheduler(config, [cache_group(20)])
    scheduler.add(request("waits", [1] * kind.pop("length", 1), max_tokens=1, **kind))
    prompt = [1] * flood.pop("length", 1)
    for step in range(2 * AGEING_STEPS):
        now = step / 10
        scheduler.add(request(f"{step}", prompt, max_tokens=1, arrival_time=now, **flood))
        apply(scheduler, scheduler.schedule())
        if "waits" not in scheduler:
            return
    raise AssertionError("it starves")


def apply(scheduler: Scheduler, plan: StepPlan) -> None:
    scheduler.apply(plan, StepResult(np.zeros(len(plan.sample_rows), np.int64)))


def shared_step(policy: str, **ranks: Any) -> dict[str, tuple[int, int]]:
    """Returns what is computed when two decodes and a long prompt share six tokens."""
    harness = Harness(40, max_num_batched_tokens=6, max_num_seqs=3, policy=policy)
    harness.add(request("a", [1] * 3, priority=1), request("b", [2] * 3, priority=5))
    harness.step()
    harness.add(request("long", [3] * 20, priority=3))
    harness.step()
    return harness.computed


@pytest.mark.parametrize(
    ("policy", "computed"),
    [
        ("decode-first", {"a": (3, 4), "b": (3, 4), "long": (0, 4)}),
        ("shortest-prefill", {"a": (3, 4), "b": (3, 4), "long": (0, 4)}),
        ("prefill-first", {"a": (3, 4), "b": (3, 4), "long": (0, 4)}),
        ("fcfs", {"a": (3, 4), "b": (3, 4), "long": (0, 4)}),
    ],
)
def test_policy_orders_decodes_and_prefills_within_a_step(policy, computed):
    assert shared_step(policy) == computed


def test_rank_order_schedules_a_prompt_before_worse_decodes():
    assert POLICIES["priority"].decode_order is DecodeOrder.BY_RANK
    harness = Harness(40, max_num_batched_tokens=6, max_num_seqs=3, policy="priority")
    harness.add(request("good", [1] * 3, priority=1), request("bad", [2] * 3, priority=5))
    harness.step()
    harness.add(request("long", [3] * 20, priority=3))
    harness.step()
    assert harness.computed == {"good": (3, 4), "bad": (3, 4), "long": (0, 4)}  # not begun
    harness.step()
    assert harness.computed == {"good": (4, 5), "long": (4, 9)}
    harness.run()


def test_rank_order_preempts_a_worse_decode_for_a_prompt():
    """The worse decode has then left the step, with blocks to spare."""
    harness = Harness(8, max_num_batched_tokens=6, policy="priority", prefix_caching=False)
    harness.add(request("good", [1] * 3, max_tokens=9, priority=1))
    harness.add(request("bad", [2] * 14, max_tokens=9, priority=5))
    harness.step_until(lambda: len(harness.live["bad"].produced) == 1)
    harness.add(request("long", [3] * 20, max_tokens=2, priority=3))
    harness.step_until(lambda: harness.scheduler.stats().num_preemptions)
    assert list(harness.computed) == ["good", "long"]
    assert harness.scheduler._kv.reservations.num_free_blocks(0) > 0
    harness.run()
    assert not harness.live


def test_rank_order_decodes_the_best_when_tokens_are_scarce():
    harness = Harness(40, max_num_batched_tokens=2, max_num_seqs=3, policy="priority")
    for i, priority in enumerate([2, 0, 1]):
        harness.add(request(f"p{priority}", [i], max_tokens=6, priority=priority))
    for _ in range(3):
        harness.step()
    assert set(harness.computed) <= {"p0", "p1", "p2"}
    harness.step()
    assert set(harness.computed) == {"p0", "p1"}
    harness.run()


def test_long_prefill_threshold_leaves_tokens_for_others():
    harness = Harness(40, long_prefill_threshold=3, max_num_batched_tokens=8)
    harness.add(request("long", [1] * 9), request("short", [2] * 2))
    harness.step()
    assert harness.computed == {"long": (0, 3), "short": (0, 2)}
    harness.run()


def test_steps_with_decodes_leave_prompts_fewer_tokens():
    harness = Harness(40, max_num_batched_tokens=16, max_num_tokens_with_decodes=6)
    harness.add(request("short", [1] * 3, max_tokens=2))
    harness.step()
    harness.add(request("long", [2] * 30))
    harness.step()
    assert harness.computed == {"short": (3, 4), "long": (0, 5)}
    harness.step()
    assert harness.computed == {"long": (5, 21)}
    harness.run()


def test_max_cache_reads_bounds_all_but_a_single_sequence():
    harness = Harness(40, max_cache_reads=20, max_num_batched_tokens=64)
    harness.add(request("a", [1] * 9), request("b", [2] * 9))
    harness.step()
    assert list(harness.computed) == ["a", "b"]
    harness.step()
    assert list(harness.computed) == ["a", "b"]
    harness.step()
    assert list(harness.computed) == ["a"]  # 11 and 11 are too many
    harness.run()
    harness.add(request("huge", [4] * 30))
    harness.step()
    assert harness.computed == {"huge": (0, 30)}
    harness.run()
    assert harness.scheduler.stats().num_preemptions == 0


def crowded(windows: tuple[int | None, ...] = (None,), **config: Any) -> Harness:
    """A harness with room for all, where cache reads are what is scarce."""
    groups = [cache_group(200, window) for window in windows]
    return Harness(groups, **{"max_num_seqs": 6, "max_num_batched_tokens": 128, **config})


def steps_run(harness: Harness, num_steps: int) -> Counter[str]:
    """In how many of so many steps each sequence runs."""
    counts: Counter[str] = Counter()
    for _ in range(num_steps):
        harness.step()
        counts.update(harness.computed.keys())
    return counts


@pytest.mark.parametrize("num_low", [3, 40])
def test_max_cache_reads_serves_decodes_by_rank_without_starving(num_low):
    harness = crowded(policy="priority", max_cache_reads=60, max_num_seqs=num_low + 1)
    harness.add(*(request(f"low{i}", [i % 11] * 20, 44, priority=10) for i in range(num_low)))
    harness.step_until(lambda: all(e.produced for e in harness.live.values()))
    harness.add(request("urgent", [4] * 4, 60, priority=-10000))
    harness.step()
    assert harness.live["urgent"].produced
    counts = steps_run(harness, 48)
    assert counts["urgent"] >= 48 - 48 // READ_PATIENCE
    counts += steps_run(harness, READ_PATIENCE * num_low)
    assert len(counts) == num_low + 1
    harness.run()


def test_max_cache_reads_leaves_those_of_better_decodes():
    harness = crowded(policy="priority", max_cache_reads=30, max_num_batched_tokens=20)
    harness.add(request("good", [1] * 12, 40, priority=0))
    harness.step()
    harness.add(request("prompt", [2] * 40, 2, priority=5))
    counts = steps_run(harness, READ_PATIENCE)
    assert counts["good"] == READ_PATIENCE
    counts = steps_run(harness, READ_PATIENCE)  # it is first once, and now it has begun
    assert (counts["prompt"], counts["good"]) == (1, READ_PATIENCE - 1)
    harness.run()


def test_max_cache_reads_passes_over_a_prompt_until_it_is_first():
    harness = crowded(max_cache_reads=40)
    harness.add(request("runs", [1] * 16, 40))
    harness.step()
    harness.add(request("large", [2] * 32, 2))
    for i in range(READ_PATIENCE + 2):
        harness.add(request(f"small{i}", [i % 3] * 4, 2))
        harness.step()
        assert i or "small0" in harness.computed  # after the large one in the queue
    assert "large" not in harness.live or harness.live["large"].produced
    harness.run()


@pytest.mark.parametrize(("windows", "at_once"), [((8,), 3), ((None, 8), 1), ((8, 16), 2)])
def test_max_cache_reads_charges_windows_what_they_read(windows, at_once):
    """24 of 40 tokens: those of three windows of 8, or of two layers with 8 and 16 twice."""
    harness = crowded(windows, max_cache_reads=24, max_num_batched_tokens=24)
    harness.add(*(request(f"{i}", [i] * 20, 44) for i in range(4)))
    harness.step_until(lambda: all(e.produced for e in harness.live.values()))
    assert max(len(harness.computed) for _ in range(8) if harness.step()) == at_once
    harness.run()


def test_prefill_first_serves_decodes_between_prompts():
    """However many wait: a decode is in each step in which another prompt begins."""
    harness = crowded(policy="prefill-first", max_num_batched_tokens=8)
    harness.add(request("runs", [1] * 4, 40))
    harness.step()
    harness.add(*(request(f"p{i}", [i % 8] * 20, 1) for i in range(12)))
    assert steps_run(harness, 20)["runs"] >= 20 // (20 // 8 + 1)
    harness.run()


def test_max_cache_reads_schedules_beams_as_one():
    harness = Harness(40, max_cache_reads=5)
    harness.add(request("beams", [1] * 6, beam_width=3), request("b", [2] * 9))
    harness.run()
    assert not harness.live


def test_pause_lets_running_requests_finish():
    harness = Harness(4)
    harness.add(request("a", [1] * 7), request("b", [2] * 7))
    harness.step()
    harness.add(request("new", [3] * 2))
    harness.pause()
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0  # and it came back
    assert list(harness.live) == ["new"]
    assert not harness.scheduler.has_work
    harness.resume()
    harness.run()
    assert not harness.live


def test_shutdown_ends_all_requests():
    harness = Harness(20)
    harness.add(request("p", [1] * 7, purpose=Purpose.PREFILL))
    harness.step()
    harness.add(request("runs", [2] * 7))
    harness.step()
    harness.add(request("waits", [3] * 7))
    ended = harness.scheduler.shutdown()
    assert sorted(r.request_id for r in ended) == ["p", "runs", "waits"]
    plan = harness.scheduler.schedule()
    assert sorted(plan.released) == [("runs", 0)]
    assert not harness.scheduler.has_work
    assert harness.scheduler.stats().num_held_blocks == 0
