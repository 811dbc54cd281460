"""Interface of the scheduler beside its steps."""

from threading import Thread

from baton.engine.scheduler.sequences.sequence import Purpose
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


def test_cancel_is_safe_from_many_threads():
    """Each by three threads; those that are not cancelled come to their end."""
    harness = Harness(200, max_num_seqs=20)
    names = [f"r{i}" for i in range(30)]
    harness.add(*(request(name, [i % 7] * (1 + i % 9)) for i, name in enumerate(names)))
    gone = names[::2]
    threads = [Thread(target=harness.scheduler.cancel, args=gone) for _ in range(3)]
    harness.cancelled.update(gone)
    for thread in threads:
        thread.start()
        plan = harness.scheduler.schedule()
        result = harness.runner.run(plan)
        harness.scheduler.apply(plan, result)
    for thread in threads:
        thread.join()
    while harness.scheduler.has_work:
        plan = harness.scheduler.schedule()
        harness.scheduler.apply(plan, harness.runner.run(plan))
        harness.scheduler.check_integrity()
    assert not harness.scheduler.requests
    assert harness.scheduler.stats().num_held_blocks == 0
    assert not harness.runner.known
