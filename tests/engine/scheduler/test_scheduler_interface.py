"""Interface of the scheduler beside its steps."""

from baton.engine.request import Purpose
from tests.support.scheduler.harness import Harness, request


def test_scheduler_adds_and_aborts_several_requests_at_once():
    harness = Harness(40)
    harness.add(*(request(name, [1, 2, 3]) for name in "abcdef"))
    harness.step()
    ended = harness.scheduler.abort("a", "f", "unknown", "c", "a")
    assert [r.request_id for r in ended] == ["a", "f", "c"]
    harness._drop("a", "f", "c")
    assert harness.scheduler.abort("a", "f", "c") == []
    assert sorted(harness.scheduler.requests) == ["b", "d", "e"]
    assert "b" in harness.scheduler
    assert "a" not in harness.scheduler
    harness.run()
    harness.check_empty()


def test_forgotten_sequences_are_reported_once_in_a_step():
    harness = Harness(40)
    harness.add(*(request(name, [1, 2]) for name in "abcd"), request("never in a slot", [1, 2]))
    harness.step()
    harness.scheduler.shutdown()
    assert harness.scheduler.has_work
    plan = harness.scheduler.schedule()
    assert plan.num_tokens == 0
    assert len(plan.released) == len(set(plan.released)) == 4
    assert harness.scheduler.schedule().released == ()
    assert not harness.scheduler.has_work


def test_scheduler_has_no_work_while_paused_with_a_kept_prefill():
    harness = Harness(40)
    harness.add(request("p", [1] * 6, purpose=Purpose.PREFILL))
    harness.step()
    assert list(harness.kept) == ["p"]
    harness.step()  # the runner is told
    assert "p" in harness.scheduler
    harness.pause()
    harness.add(request("waits", [1] * 6))
    assert not harness.scheduler.has_work
    harness.resume()
    harness.release("p")
    harness.run()
    harness.check_empty()
