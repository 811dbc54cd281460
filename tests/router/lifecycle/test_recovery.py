"""Recovery after failures: pure decisions, and their bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import (
    BatonError,
    CancelledError,
    DeadlineExceededError,
    EngineLimitError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NonFiniteError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton.rpc.backoff import Backoff
from baton_router.call.failure import AttemptFailure, FailureKind
from baton_router.lifecycle.recovery import MAX_FAILURES, MAX_RETURNS, SAME_PLACE_TOKENS, Recovery
from baton_router.lifecycle.retry_budget import RetryBudget

REFUSED, LOST, SILENT, BROKEN, NO_WORKER, PREEMPTED, TOO_SMALL, VIOLATION = FailureKind


def recovery(*, accepted: bool = True, tries: float = 1000.0) -> Recovery:
    budget = RetryBudget(largest=tries, per_second=0.0)
    made = Recovery("r", budget, Backoff(1.0, 8.0, lambda: 0.999999))
    made.is_accepted = accepted
    return made


def failure(
    kind: FailureKind = LOST,
    error: BatonError | None = None,
    worker: str = "d0",
    *,
    prefill: str = "p0",
) -> AttemptFailure:
    return AttemptFailure(kind, error or UnavailableError("gone"), worker, (prefill, "d0"))


@pytest.mark.parametrize("kind", [REFUSED, LOST, SILENT])
def test_recovery_asks_next_worker_at_once_before_acceptance(kind):
    trying = recovery(accepted=False)
    assert trying.after(failure(kind), 0) == 0.0
    assert trying.after(failure(kind, OverloadedError("full"), "d1"), 0) == 0.0
    assert trying.refused == {"d0", "d1"}
    with pytest.raises(OverloadedError, match="full"):
        trying.after(failure(NO_WORKER), 0)


@pytest.mark.parametrize(
    "error", [InvalidArgumentError("f", "is bad"), FailedPreconditionError("another model")]
)
def test_recovery_raises_permanent_refusal_at_once(error):
    with pytest.raises(type(error)):
        recovery(accepted=False).after(failure(REFUSED, error), 0)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("f", "is bad"),
        CancelledError("aborted"),
        DeadlineExceededError("late"),
        NonFiniteError("the logits are NaN"),
    ],
)
def test_recovery_ends_accepted_request_on_permanent_error(error):
    with pytest.raises(type(error)):
        recovery().after(failure(BROKEN, error), 0)


LIMIT = EngineLimitError("sampling.n", "asks for 8 sequences; this engine runs 2")
ALL_SMALL = EngineLimitError("sampling.n", "asks for 8 sequences; the largest runs 2")
AWAY = UnavailableError("no decode worker can take work: draining, too small")


@pytest.mark.parametrize("accepted", [False, True])
def test_recovery_passes_over_small_workers_for_free(accepted):
    trying = recovery(accepted=accepted, tries=0.0)
    for number in range(2 * MAX_FAILURES):
        assert trying.after(failure(TOO_SMALL, LIMIT, f"d{number}"), 5) == 0.0
    assert (len(trying.too_small), trying.refused) == (2 * MAX_FAILURES, set())


@pytest.mark.parametrize(
    ("refusals", "none", "expected"),
    [
        ([], ALL_SMALL, "the largest runs 2"),
        ([(TOO_SMALL, LIMIT)], ALL_SMALL, "this engine runs 2"),
        ([(TOO_SMALL, LIMIT)], AWAY, "draining, too small"),
        ([(TOO_SMALL, LIMIT), (REFUSED, OverloadedError("full"))], AWAY, "full"),
        ([(REFUSED, OverloadedError("full")), (TOO_SMALL, LIMIT)], AWAY, "full"),
    ],
)
def test_recovery_refuses_as_too_large_only_if_all_are_small(refusals, none, expected):
    trying = recovery(accepted=False)
    for number, (kind, error) in enumerate(refusals):
        trying.after(failure(kind, error, f"d{number}"), 0)
    with pytest.raises(BatonError, match=expected):
        trying.after(failure(NO_WORKER, none, ""), 0)


def test_recovery_waits_for_large_worker_once_accepted():
    trying = recovery()
    for _ in range(MAX_FAILURES):
        trying.after(failure(NO_WORKER, ALL_SMALL, ""), 3)
    with pytest.raises(UnavailableError, match="no worker that is left is large enough"):
        trying.after(failure(NO_WORKER, ALL_SMALL, ""), 3)


def test_recovery_retries_at_once_then_backs_off():
    trying = recovery()
    waits = [round(trying.after(failure(), 5)) for _ in range(6)]
    assert waits == [0, 1, 2, 4, 8, 8]
    assert trying.after(failure(), 6) == 0.0


def test_recovery_gives_up_without_progress_and_says_why():
    trying = recovery()
    for _ in range(MAX_FAILURES):
        trying.after(failure(BROKEN, NotFoundError("the lease is over")), 3)
    with pytest.raises(UnavailableError, match="the handoff failed: the lease is over"):
        trying.after(failure(BROKEN, NotFoundError("the lease is over")), 3)


def test_recovery_avoids_workers_until_none_is_left():
    trying = recovery()
    trying.after(failure(LOST, worker="d1"), 0)
    trying.after(failure(BROKEN), 0)
    assert (trying.refused, trying.broken) == ({"d1"}, {("p0", "d0")})
    trying.after(failure(NO_WORKER, worker=""), 0)
    assert (trying.refused, trying.broken) == (set(), set())


@given(st.integers(0, 100), st.integers(0, 100))
def test_recovery_finds_poison_when_two_fail_near_same_token(first, second):
    trying = recovery()
    trying.after(failure(), 0, first)
    again = failure(LOST, InternalError("the engine failed"), "d1")
    if abs(first - second) < SAME_PLACE_TOKENS:
        with pytest.raises(InternalError, match=r"d0 and d1 were lost .* engine failed"):
            trying.after(again, 0, second)
    else:
        trying.after(again, 0, second)


def test_recovery_finds_no_poison_across_roles():
    trying = recovery()
    trying.after(failure(worker="d0"), 5, 5)
    trying.after(failure(worker="p0"), 5, 5)
    with pytest.raises(InternalError, match="poison: p0 and p1 were lost"):
        trying.after(failure(worker="p1", prefill="p1"), 5, 5)


def test_recovery_ignores_workers_lost_before_request_ran():
    trying = recovery()
    for worker in ("d0", "d1", "d2", "d3"):
        trying.after(failure(worker=worker), 0)


@pytest.mark.parametrize(
    ("accepted", "expected"), [(False, OverloadedError), (True, UnavailableError)]
)
def test_recovery_stops_when_retry_budget_is_spent(accepted, expected):
    trying = recovery(accepted=accepted, tries=1.0)
    trying.after(failure(REFUSED, OverloadedError("full")), 0)
    with pytest.raises(expected, match="full"):
        trying.after(failure(REFUSED, OverloadedError("full"), "d1"), 0)


def test_recovery_spends_no_budget_when_no_worker_exists():
    trying = recovery(tries=0.0)
    trying.after(failure(NO_WORKER), 0)


def given_back(worker: str = "d0") -> AttemptFailure:
    return failure(PREEMPTED, OverloadedError("no room any more"), worker)


def test_recovery_spends_no_budget_on_preempted_request():
    trying = recovery(tries=1.0)
    trying.after(failure(REFUSED, OverloadedError("full"), "d1"), 0)
    for num_tokens in range(5, 5 + MAX_FAILURES):
        assert trying.after(given_back(), num_tokens) == 0.0
    assert (trying.refused, trying.broken, trying.preempted_by) == (set(), set(), "d0")
    trying.after(failure(NO_WORKER), 99)
    assert trying.preempted_by == ""


def test_recovery_bounds_returns_of_preempted_request():
    trying = recovery()
    for num_tokens in range(MAX_RETURNS):
        assert trying.may_return
        trying.after(given_back(), num_tokens)
    assert not trying.may_return


def test_recovery_refuses_second_return_without_progress():
    trying = recovery()
    trying.after(given_back(), 7)
    assert trying.may_return
    trying.after(given_back("d1"), 7)
    assert not trying.may_return


def test_recovery_waits_for_room_for_preempted_request():
    trying = recovery(tries=0.0)
    trying.after(given_back(), 7)
    full = failure(REFUSED, OverloadedError("full"), "d1")
    waits = [round(trying.after(each, 7)) for each in [full, failure(NO_WORKER)] * MAX_FAILURES]
    assert waits[:5] == [1, 2, 4, 8, 8]
    assert trying.may_return


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(failure(LOST, worker="d1"), id="a worker is lost"),
        pytest.param(failure(NO_WORKER, worker=""), id="there are no workers"),
        pytest.param(failure(REFUSED, UnavailableError("draining"), "d1"), id="a worker leaves"),
    ],
)
def test_recovery_gives_up_on_other_failures_after_return(other):
    trying = recovery()
    trying.after(given_back(), 7)
    for _ in range(MAX_FAILURES):
        trying.after(other, 7)
        trying.refused.clear()
    with pytest.raises(UnavailableError):
        trying.after(other, 7)


def test_recovery_counts_refusals_again_after_progress():
    trying = recovery()
    trying.after(given_back(), 7)
    full = failure(REFUSED, OverloadedError("full"), "d1")
    for _ in range(MAX_FAILURES):
        trying.after(full, 8)
    with pytest.raises(OverloadedError):
        trying.after(full, 8)
