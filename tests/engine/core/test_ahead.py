"""Steps that are planned before the tokens of the step before them are known."""

import pytest

from baton.engine.core.plan import StepPlan
from baton.engine.core.sequence import KvSource, Request

from .fakes import FakeGrammar, cache_group
from .harness import Harness, request


def decoding(harness: Harness) -> StepPlan:
    """A plan of decodes that is computed and not booked."""
    plan = harness.schedule()
    assert plan.is_pure_decode
    assert plan.num_tokens
    harness.runner.run(plan)
    return plan


@pytest.mark.parametrize("groups", [[None], [None, 5], [3]])
def test_the_outcome_is_that_of_steps_that_wait(groups: list[int | None]) -> None:
    harness = Harness([cache_group(40, window) for window in groups])
    harness.add(*(request(name, [i] * (5 + i), max_tokens=9 + i) for i, name in enumerate("abc")))
    num_ahead = 0
    while harness.scheduler.has_work:
        num_ahead += harness.step_ahead() is not None
    assert not harness.live
    assert num_ahead >= 4
    harness.check_empty()


def test_what_certainly_ends_with_a_step_is_not_in_the_one_behind() -> None:
    harness = Harness(40)
    harness.add(request("ends", [1] * 6, max_tokens=2), request("goes on", [2] * 6, max_tokens=9))
    harness.step()
    ahead = harness.step_ahead()
    assert ahead is not None
    assert len(ahead.decode_seats) == 1
    assert list(harness.live) == ["goes on"]


def test_where_all_certainly_end_nothing_is_planned_ahead() -> None:
    harness = Harness(40)
    harness.add(request("a", [1] * 6, max_tokens=2), request("b", [2] * 6, max_tokens=2))
    harness.step()
    assert harness.step_ahead() is None
    assert not harness.live


def test_what_ends_unforeseen_is_computed_in_vain_and_passed_over() -> None:
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
    assert len(ahead.decode_seats) == 1
    assert not harness.live
    harness.run()
    harness.check_empty()


def test_who_is_aborted_meanwhile_is_passed_over() -> None:
    harness = Harness(40)
    harness.add(request("a", [1] * 6, max_tokens=9), request("b", [2] * 6, max_tokens=9))
    harness.step()
    assert harness.step_ahead(lambda: harness.abort("a")) is not None
    assert list(harness.live) == ["b"]
    harness.run()
    harness.check_empty()


def test_the_step_behind_takes_the_block_it_needs() -> None:
    harness = Harness(40, block_size=4)
    harness.add(request("a", [1] * 7, max_tokens=9))
    harness.step()
    held = harness.scheduler.stats().num_held_blocks
    plan = harness.schedule()
    result = harness.runner.run(plan)
    ahead = harness.scheduler.schedule_ahead(plan)
    assert ahead is not None
    assert (plan.decode_starts.tolist(), ahead.decode_starts.tolist()) == ([7], [8])
    assert harness.scheduler.stats().num_held_blocks == held + 1
    assert len(ahead.cleared) == 1
    harness.apply(plan, result)
    harness.apply(ahead, harness.runner.run(ahead))
    harness.run()
    harness.check_empty()


def test_without_a_free_block_the_step_behind_waits() -> None:
    harness = Harness(4, block_size=4, prefix_caching=False)
    harness.add(request("a", [1] * 7, max_tokens=5), request("b", [2] * 7, max_tokens=5))
    harness.step()
    plan = decoding(harness)
    assert harness.scheduler.schedule_ahead(plan) is None


@pytest.mark.parametrize(
    "other",
    [
        request("other", [3] * 6),
        request("other", [3] * 6, grammar=FakeGrammar(5)),
        request("other", [3] * 6, beam_width=2),
        request("other", [3] * 6, speculates=True),
        request("other", [3] * 6, kv_source=KvSource.EXTERNAL),
    ],
)
def test_whoever_else_has_something_to_do_is_waited_for(other: Request) -> None:
    harness = Harness(60)
    harness.add(request("a", [1] * 6, max_tokens=12))
    harness.step()
    plan = decoding(harness)
    harness.add(other)
    assert harness.scheduler.schedule_ahead(plan) is None


def test_a_cancellation_is_waited_for() -> None:
    harness = Harness(40)
    harness.add(request("a", [1] * 6, max_tokens=12))
    harness.step()
    plan = decoding(harness)
    harness.cancel("a")
    assert harness.scheduler.schedule_ahead(plan) is None


def test_cache_reads_are_bounded_for_the_step_behind_too() -> None:
    harness = Harness(40, max_cache_reads=16)
    harness.add(request("a", [1] * 6, max_tokens=12), request("b", [2] * 6, max_tokens=12))
    harness.step()
    plan = decoding(harness)
    assert (plan.decode_starts + 1).sum() == 14
    assert harness.scheduler.schedule_ahead(plan) is not None
    harness = Harness(40, max_cache_reads=15)
    harness.add(request("a", [1] * 6, max_tokens=12), request("b", [2] * 6, max_tokens=12))
    harness.step()
    assert harness.scheduler.schedule_ahead(decoding(harness)) is None
