"""Steps that are planned before the tokens of the step before them are known."""

import pytest

from baton.engine.request import KvSource, Purpose
from baton.engine.scheduler.plan import NotAhead, StepPlan
from tests.support.scheduler.fakes import FakeGrammar, cache_group
from tests.support.scheduler.harness import Harness, request


def decoding(harness: Harness) -> StepPlan:
    """A plan of decodes that is computed and not booked."""
    plan = harness.schedule()
    assert plan.is_pure_decode
    assert plan.num_tokens
    harness.runner.run(plan)
    return plan


def spans_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request.request_id, chunk.start, chunk.end) for chunk in plan.chunks]


@pytest.mark.parametrize("groups", [[None], [None, 5], [3]])
@pytest.mark.parametrize("budget", [64, 7])
def test_schedule_ahead_changes_no_output(groups, budget):
    harness = Harness([cache_group(40, window) for window in groups], max_num_batched_tokens=budget)
    harness.add(*(request(name, [i] * (5 + i), max_tokens=9 + i) for i, name in enumerate("abc")))
    num_ahead = 0
    while harness.scheduler.has_work:
        num_ahead += harness.step_ahead() is not None
    assert not harness.live
    assert num_ahead >= 4
    harness.check_empty()


def test_schedule_ahead_decodes_sequences_with_grammars():
    harness = Harness(60)
    names = [f"{i}" for i in range(6)]
    harness.add(*(request(n, [int(n)] * 5, max_tokens=20, grammar=FakeGrammar(9)) for n in names))
    num_steps, num_ahead = 0, 0
    while harness.scheduler.has_work:
        num_steps += 1
        num_ahead += harness.step_ahead() is not None
    assert not harness.live
    assert num_ahead >= num_steps - 1 > 4
    harness.check_empty()


def test_schedule_ahead_continues_chunks_and_starts_decodes():
    harness = Harness(40, max_num_batched_tokens=8)
    harness.add(request("short", [1] * 3, max_tokens=9), request("long", [2] * 14, max_tokens=9))
    plan = harness.schedule()
    result = harness.runner.run(plan)
    assert spans_of(plan) == [("short", 0, 3), ("long", 0, 5)]
    ahead = harness.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    assert ahead.decode_starts.tolist() == [3]
    assert spans_of(ahead) == [("long", 5, 12)]
    harness.apply(plan, result)
    result = harness.runner.run(ahead)
    last = harness.scheduler.schedule_ahead(ahead)
    assert isinstance(last, StepPlan)
    assert last.decode_starts.tolist() == [4]
    assert spans_of(last) == [("long", 12, 14)]
    harness.apply(ahead, result)
    harness.apply(last, harness.runner.run(last))
    harness.run()
    harness.check_empty()


def test_schedule_ahead_of_decode_leaves_prompts_fewer_tokens():
    harness = Harness(40, max_num_batched_tokens=16, max_num_tokens_with_decodes=6)
    harness.add(request("short", [1] * 3, max_tokens=9), request("long", [2] * 30, max_tokens=9))
    plan = harness.schedule()
    assert spans_of(plan) == [("short", 0, 3), ("long", 0, 13)]
    result = harness.runner.run(plan)
    ahead = harness.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    assert ahead.decode_starts.tolist() == [3]
    assert spans_of(ahead) == [("long", 13, 18)]
    harness.apply(plan, result)
    harness.apply(ahead, harness.runner.run(ahead))
    harness.run()
    harness.check_empty()


def test_schedule_ahead_decodes_no_prefill_only_request():
    harness = Harness(40)
    harness.add(request("p", [1] * 6, max_tokens=9, purpose=Purpose.PREFILL))
    assert harness.step_ahead() is None
    harness.release("p")
    harness.check_empty()


@pytest.mark.parametrize(
    ("config", "num_tokens"), [({"max_num_seqs": 2}, 6), ({"max_num_batched_tokens": 7}, 40)]
)
def test_schedule_ahead_ignores_requests_that_cannot_start(config, num_tokens):
    harness = Harness(60, **config)
    harness.add(*(request(name, [i] * num_tokens, max_tokens=5) for i, name in enumerate("abc")))
    assert harness.step_ahead() is not None
    assert harness.scheduler.stats().num_waiting > 0
    harness.run()
    harness.check_empty()


def test_schedule_ahead_skips_a_prompt_without_a_free_block():
    harness = Harness(3, block_size=4, max_num_batched_tokens=8, prefix_caching=False)
    harness.add(request("a", [1] * 3, max_tokens=2), request("b", [2] * 11, max_tokens=1))
    plan = harness.schedule()
    result = harness.runner.run(plan)
    assert spans_of(plan) == [("a", 0, 3), ("b", 0, 5)]
    ahead = harness.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    assert len(ahead.decode_slots) == 1
    assert spans_of(ahead) == []
    harness.apply(plan, result)
    harness.apply(ahead, harness.runner.run(ahead))
    harness.run()
    harness.check_empty()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (request("other", [3] * 6, temperature=1.0, n=2), NotAhead.FORK),
        (request("other", [3] * 6, beam_width=2), NotAhead.BEAMS),
        (request("other", [3] * 6, speculates=True), NotAhead.SPECULATION),
    ],
)
def test_schedule_ahead_waits_for_prompts_beyond_plain_sampling(other, reason):
    harness = Harness(60)
    harness.add(request("a", [1] * 6, max_tokens=12), other)
    plan = harness.schedule()
    assert len(plan.chunks) == 2
    result = harness.runner.run(plan)
    assert harness.scheduler.schedule_ahead(plan) is reason
    harness.apply(plan, result)
    harness.run()
    harness.check_empty()


@pytest.mark.parametrize("policy", ["prefill-first", "fcfs", "priority"])
def test_schedule_ahead_waits_for_prompts_unless_decode_first(policy):
    harness = Harness(40, policy=policy)
    harness.add(request("a", [1] * 6, max_tokens=12))
    assert harness.step_ahead() is None
    assert harness.step_ahead() is not None


def test_schedule_ahead_omits_sequences_about_to_finish():
    harness = Harness(40)
    harness.add(request("ends", [1] * 6, max_tokens=2), request("goes on", [2] * 6, max_tokens=9))
    harness.step()
    ahead = harness.step_ahead()
    assert ahead is not None
    assert len(ahead.decode_slots) == 1
    assert list(harness.live) == ["goes on"]


def test_schedule_ahead_plans_nothing_when_all_will_finish():
    harness = Harness(40)
    harness.add(request("a", [1] * 6, max_tokens=2), request("b", [2] * 6, max_tokens=2))
    harness.step()
    assert harness.step_ahead() is None
    assert not harness.live


def test_schedule_ahead_discards_tokens_after_a_stop_token():
    harness = Harness(40)
    harness.add(request("a", [1] * 6, max_tokens=12))
    outcome, _ = harness.live["a"].outcomes[0]
    harness.abort("a")
    assert outcome.index(outcome[2]) == 2
    harness.add(request("a", [1] * 6, max_tokens=12, stop_token_ids=frozenset({outcome[2]})))
    harness.step()
    harness.step()
    ahead = harness.step_ahead()
    assert ahead is not None
    assert len(ahead.decode_slots) == 1
    assert not harness.live
    harness.run()
    harness.check_empty()


def test_schedule_ahead_allocates_the_block_it_needs():
    harness = Harness(40, block_size=4)
    harness.add(request("a", [1] * 7, max_tokens=9))
    harness.step()
    held = harness.scheduler.stats().num_held_blocks
    plan = harness.schedule()
    result = harness.runner.run(plan)
    ahead = harness.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    assert (plan.decode_starts.tolist(), ahead.decode_starts.tolist()) == ([7], [8])
    assert harness.scheduler.stats().num_held_blocks == held + 1
    assert len(ahead.cleared) == 1
    harness.apply(plan, result)
    harness.apply(ahead, harness.runner.run(ahead))
    harness.run()
    harness.check_empty()


def test_schedule_ahead_waits_without_a_free_block():
    harness = Harness(4, block_size=4, prefix_caching=False)
    harness.add(request("a", [1] * 7, max_tokens=5), request("b", [2] * 7, max_tokens=5))
    harness.step()
    plan = decoding(harness)
    assert harness.scheduler.schedule_ahead(plan) is NotAhead.BLOCKS


@pytest.mark.parametrize(
    "other",
    [
        request("other", [3] * 6),
        request("other", [3] * 6, grammar=FakeGrammar(5)),
        request("other", [3] * 6, beam_width=2),
        request("other", [3] * 6, temperature=1.0, n=2),
        request("other", [3] * 6, speculates=True),
        request("other", [3] * 6, prompt_logprobs=0),
    ],
)
def test_schedule_ahead_admits_a_request_of_any_kind(other):
    harness = Harness(60)
    harness.add(request("a", [1] * 6, max_tokens=12))
    harness.step()
    plan = decoding(harness)
    harness.add(other)
    ahead = harness.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    assert spans_of(ahead) == [("other", 0, 6)]
    assert len(ahead.decode_slots) == 1


def test_schedule_ahead_allocates_blocks_for_external_kv():
    harness = Harness(60)
    harness.add(request("a", [1] * 6, max_tokens=12))
    harness.step()
    plan = harness.schedule()
    result = harness.runner.run(plan)
    harness.add(request("b", [3] * 6, max_tokens=5, kv_source=KvSource.EXTERNAL))
    ahead = harness.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    assert [allocation.request_id for allocation in ahead.external] == ["b"]
    harness.apply(plan, result)
    assert harness.awaiting == []
    harness.apply(ahead, harness.runner.run(ahead))
    assert harness.awaiting == ["b"]
    harness.deliver("b")
    harness.run()
    harness.check_empty()


def test_schedule_ahead_decodes_committed_kv():
    harness = Harness(60)
    harness.add(
        request("a", [1] * 6, max_tokens=12),
        request("b", [3] * 6, max_tokens=5, kv_source=KvSource.EXTERNAL),
    )
    harness.step()
    plan = harness.schedule()
    assert len(plan.decode_slots) == 1
    result = harness.runner.run(plan)
    harness.deliver("b")
    ahead = harness.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    assert (ahead.decode_starts.tolist(), ahead.previous_rows.tolist()) == ([7, 6], [0])
    harness.apply(plan, result)
    harness.apply(ahead, harness.runner.run(ahead))
    harness.run()
    harness.check_empty()


def test_schedule_ahead_hits_blocks_of_the_step_in_flight():
    harness = Harness(60)
    harness.add(request("a", [1] * 9, max_tokens=5))
    plan = harness.schedule()
    result = harness.runner.run(plan)
    harness.add(request("b", [1] * 9, max_tokens=5))
    ahead = harness.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    assert spans_of(ahead) == [("b", 8, 9)]
    harness.apply(plan, result)
    harness.apply(ahead, harness.runner.run(ahead))
    harness.run()
    harness.check_empty()


def test_schedule_ahead_gives_no_slot_that_is_in_flight():
    harness = Harness(60, max_num_seqs=1)
    harness.add(request("a", [1] * 6, max_tokens=12))
    harness.step()
    plan = harness.schedule()
    result = harness.runner.run(plan)
    ahead = harness.scheduler.schedule_ahead(plan)
    assert isinstance(ahead, StepPlan)
    harness.apply(plan, result)
    harness.abort("a")
    harness.add(request("b", [2] * 6, max_tokens=5))
    assert harness.scheduler.schedule_ahead(ahead) is NotAhead.NOTHING
    harness.apply(ahead, harness.runner.run(ahead))
    harness.run()
    harness.check_empty()


def test_schedule_ahead_respects_max_cache_reads():
    harness = Harness(40, max_cache_reads=16)
    harness.add(request("a", [1] * 6, max_tokens=12), request("b", [2] * 6, max_tokens=12))
    harness.step()
    plan = decoding(harness)
    assert (plan.decode_starts + 1).sum() == 14
    assert isinstance(harness.scheduler.schedule_ahead(plan), StepPlan)
    harness = Harness(40, max_cache_reads=15)
    harness.add(request("a", [1] * 6, max_tokens=12), request("b", [2] * 6, max_tokens=12))
    harness.step()
    assert harness.scheduler.schedule_ahead(decoding(harness)) is NotAhead.BUDGET
