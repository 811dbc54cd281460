"""Drafts change no result; only the number of steps."""

from collections.abc import Callable

import pytest

from baton.engine.request import KvSource, Purpose
from baton.engine.scheduler.plan import NotAhead
from baton.engine.scheduler.sequences.sequence import Sequence
from tests.support.scheduler.fakes import VOCAB_SIZE, cache_group
from tests.support.scheduler.harness import Harness, request

Guess = Callable[[list[int]], list[int]]


def run(harness: Harness, guess: Guess) -> int:
    """Steps to the end with drafts made of what comes next; returns the number of steps."""
    num_steps = 0
    while harness.live:
        for sequence in harness.scheduler.speculating:
            expected = harness.live[sequence.request.request_id]
            outcome, _ = expected.outcomes[sequence.index]
            rest = outcome[sequence.num_tokens - expected.num_tokens :]
            harness.scheduler.set_drafts(sequence, guess(rest))
        harness.step()
        num_steps += 1
    return num_steps


def right(rest: list[int]) -> list[int]:
    return rest


def wrong(rest: list[int]) -> list[int]:
    return [(token + 1) % VOCAB_SIZE for token in rest]


def right_at_first(rest: list[int]) -> list[int]:
    return [*rest[:2], *wrong(rest[2:])]


@pytest.mark.parametrize("groups", [[None], [None, 5], [3]])
@pytest.mark.parametrize(
    ("guess", "num_steps", "num_drafted", "num_accepted"),
    [
        (right, 4, 8, 8),  # 1 token, 5, 5 and 1: the last is never a draft
        (wrong, 12, 34, 0),
        (right_at_first, 5, 13, 7),
    ],
)
def test_drafts_never_change_the_output(groups, guess, num_steps, num_drafted, num_accepted):
    harness = Harness([cache_group(20, window) for window in groups], max_drafts=4)
    harness.add(request("a", [1] * 6, max_tokens=12, speculates=True))
    assert run(harness, guess) == num_steps
    stats = harness.scheduler.stats()
    assert stats.num_accepted_tokens == num_accepted == harness.num_right_drafts
    assert stats.num_drafted_tokens == num_drafted


def test_drafts_are_limited_to_max_drafts():
    harness = Harness(20, max_drafts=2)
    harness.add(request("a", [1] * 6, max_tokens=12, speculates=True))
    harness.step()
    (sequence,) = harness.scheduler.speculating
    harness.scheduler.set_drafts(sequence, [1] * 50)
    plan = harness.step()
    assert [chunk.num_drafts for chunk in plan.chunks] == [2]
    harness.run()


def test_drafts_take_only_the_token_budget_left():
    harness = Harness(20, max_drafts=4, max_num_batched_tokens=4)
    harness.add(
        request("a", [1, 2], speculates=True, max_tokens=12),
        request("b", [3, 4], speculates=True, max_tokens=12),
    )
    harness.step()
    for sequence in harness.scheduler.speculating:
        harness.scheduler.set_drafts(sequence, [1] * 4)
    plan = harness.step()
    assert [chunk.num_drafts for chunk in plan.chunks] == [3]
    harness.run()


def test_rejected_drafts_are_never_cached():
    harness = Harness(20, block_size=2, max_drafts=4)
    harness.add(request("a", [1] * 4, max_tokens=12, speculates=True))
    harness.step()
    (sequence,) = harness.scheduler.speculating
    rest = harness.live["a"].outcomes[0][0][1:]
    harness.scheduler.set_drafts(sequence, wrong(rest))
    harness.step()
    assert sequence.num_computed_tokens == 5
    assert sequence.num_committed_blocks == 2
    harness.run()


def test_drafts_preempt_no_sequence():
    harness = Harness(4, max_drafts=4, prefix_caching=False)
    harness.add(request("a", [1] * 3, max_tokens=4, speculates=True))
    harness.add(request("b", [2] * 9, max_tokens=3))
    harness.step()
    (sequence,) = harness.scheduler.speculating
    harness.scheduler.set_drafts(sequence, [1] * 4)
    harness.step()
    assert harness.scheduler.stats().num_preemptions == 0
    harness.run()


def test_sequence_may_finish_within_its_drafts():
    harness = Harness(20, max_drafts=4)
    first = request("a", [1] * 6, max_tokens=12)
    harness.add(first)
    outcome, _ = harness.live["a"].outcomes[0]
    harness.run()
    stop = frozenset({outcome[3]})
    assert outcome.index(outcome[3]) == 3
    harness.add(request("a", [1] * 6, max_tokens=12, speculates=True, stop_token_ids=stop))
    harness.step()
    (sequence,) = harness.scheduler.speculating
    harness.scheduler.set_drafts(sequence, outcome[1:5])
    harness.step()
    assert not harness.live
    harness.check_empty()


def test_forking_and_prefill_requests_do_not_speculate():
    harness = Harness(40, max_drafts=4, max_num_batched_tokens=5, max_num_seqs=5)
    harness.add(request("forks", [1] * 6, n=2, temperature=1.0, speculates=True))
    harness.step()
    assert harness.computed == {"forks": (0, 5)}  # one token behind, as a decode is
    assert harness.scheduler.speculating == []
    harness.step()
    assert len(harness.scheduler.speculating) == 2
    run(harness, right)
    harness.add(request("p", [2] * 6, purpose=Purpose.PREFILL, speculates=True))
    harness.step()
    assert harness.scheduler.speculating == []
    harness.run()


def test_forks_awaiting_kv_do_not_speculate():
    harness = Harness(40, max_drafts=4)
    kind = {"n": 2, "temperature": 1.0, "speculates": True}
    harness.add(request("a", [1] * 6, kv_source=KvSource.EXTERNAL, **kind))
    harness.step()
    harness.deliver("a", with_token=False)
    assert harness.scheduler.speculating == []
    run(harness, right_at_first)


def test_speculating_and_plain_decodes_share_a_step():
    harness = Harness(40, max_drafts=4)
    harness.add(request("a", [1] * 6, max_tokens=12, speculates=True))
    harness.add(request("b", [2] * 6, max_tokens=12))
    harness.step()
    (sequence,) = harness.scheduler.speculating
    outcome, _ = harness.live["a"].outcomes[0]
    harness.scheduler.set_drafts(sequence, outcome[1:3])
    plan = harness.step()
    assert harness.computed == {"b": (6, 7), "a": (6, 9)}
    assert len(plan.sample_rows) == 1 + 3
    assert not plan.is_pure_decode
    assert plan.samples_every_token
    harness.run()


def test_speculating_sequence_without_drafts_is_a_plain_decode():
    harness = Harness(40, max_drafts=4)
    harness.add(request("a", [1] * 6, max_tokens=12, speculates=True))
    harness.add(request("b", [2] * 6, max_tokens=12))
    harness.step()
    outcome, _ = harness.live["a"].outcomes[0]
    assert harness.step().is_pure_decode
    (sequence,) = harness.scheduler.speculating
    harness.scheduler.set_drafts(sequence, [])
    assert harness.step().is_pure_decode
    harness.scheduler.set_drafts(sequence, outcome[3:5])
    assert harness.scheduler.stats().num_running == 2
    plan = harness.step()
    assert [chunk.sequence for chunk in plan.chunks] == [sequence]
    assert len(plan.decode_slots) == 1
    plan = harness.step()
    assert plan.is_pure_decode
    assert len(plan.decode_slots) == 2
    harness.run()


def test_speculating_sequence_is_not_scheduled_ahead():
    harness = Harness(40, max_drafts=4)
    harness.add(request("a", [1] * 6, max_tokens=12, speculates=True))
    harness.step()
    plan = harness.scheduler.schedule()
    assert plan.is_pure_decode
    assert harness.scheduler.schedule_ahead(plan) is NotAhead.SPECULATION


def allowed(*steps: tuple[int, int]) -> int:
    """Drafts that are worth verifying after such steps: how many there were, and were right."""
    sequence = Sequence.first_of(request("a", [1] * 6))
    for num_drafts, num_accepted in steps:
        for token_id in [1] * (num_accepted + 1):
            sequence.append(token_id)
        if num_drafts:
            sequence.learn_from_drafts(num_drafts, num_accepted)
    return sequence.num_drafts_allowed


def test_draft_limit_adapts_to_recent_acceptance():
    assert allowed() == 2
    assert allowed((2, 2)) == 4
    assert allowed((2, 2), (4, 4)) == 8
    assert allowed((2, 2), (4, 1)) == 2
    assert allowed((2, 0)) == 1
    assert allowed((2, 0), (1, 0)) == 0
    assert allowed((64, 64)) == 64


def test_draft_limit_probes_every_few_tokens_after_rejections():
    none_right = (2, 0), (1, 0)
    assert [allowed(*none_right, *[(0, 0)] * n) for n in range(5)] == [0, 0, 0, 0, 1]
