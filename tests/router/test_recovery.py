"""What a request does after setbacks: pure decisions, and what they add up to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.backoff import Backoff
from baton.errors import (
    BatonError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton_router.failure import AttemptFailure, FailureKind
from baton_router.lifecycle.recovery import MAX_FAILURES, MAX_RETURNS, SAME_PLACE_TOKENS, Recovery
from baton_router.lifecycle.retry_budget import RetryBudget

REFUSED, LOST, SILENT, BROKEN, NOBODY, PREEMPTED = FailureKind


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
    place: int | None = None,
    prefill: str = "p0",
) -> AttemptFailure:
    made = AttemptFailure(kind, error or UnavailableError("gone"), worker, (prefill, "d0"))
    made.place = place
    return made


@pytest.mark.parametrize("kind", [REFUSED, LOST, SILENT])
def test_before_it_is_accepted_the_next_worker_is_asked_at_once(kind):
    trying = recovery(accepted=False)
    assert trying.after(failure(kind), 0) == 0.0
    assert trying.after(failure(kind, OverloadedError("full"), "d1"), 0) == 0.0
    assert trying.refused == {"d0", "d1"}
    with pytest.raises(OverloadedError, match="full"):
        trying.after(failure(NOBODY), 0)


@pytest.mark.parametrize(
    "error", [InvalidArgumentError("f", "is bad"), FailedPreconditionError("another model")]
)
def test_a_refusal_for_good_is_told_at_once(error):
    with pytest.raises(type(error)):
        recovery(accepted=False).after(failure(REFUSED, error), 0)


@pytest.mark.parametrize(
    "error",
    [InvalidArgumentError("f", "is bad"), CancelledError("aborted"), DeadlineExceededError("late")],
)
def test_what_no_other_worker_would_do_better_ends_an_accepted_request_too(error):
    with pytest.raises(type(error)):
        recovery().after(failure(BROKEN, error), 0)


def test_an_accepted_request_goes_on_at_once_and_then_waits_longer_each_time():
    trying = recovery()
    waits = [round(trying.after(failure(), 5)) for _ in range(6)]
    assert waits == [0, 1, 2, 4, 8, 8]
    assert trying.after(failure(), 6) == 0.0


def test_without_progress_it_gives_up_in_the_end_and_says_why():
    trying = recovery()
    for _ in range(MAX_FAILURES):
        trying.after(failure(BROKEN, NotFoundError("the lease is over")), 3)
    with pytest.raises(UnavailableError, match="the handoff failed: the lease is over"):
        trying.after(failure(BROKEN, NotFoundError("the lease is over")), 3)


def test_workers_are_avoided_until_nobody_is_left():
    trying = recovery()
    trying.after(failure(LOST, worker="d1"), 0)
    trying.after(failure(BROKEN), 0)
    assert (trying.refused, trying.broken) == ({"d1"}, {("p0", "d0")})
    trying.after(failure(NOBODY, worker=""), 0)
    assert (trying.refused, trying.broken) == (set(), set())


@given(st.integers(0, 100), st.integers(0, 100))
def test_two_workers_lost_at_the_same_place_are_a_poison_and_elsewhere_chance(first, second):
    trying = recovery()
    trying.after(failure(place=first), 0)
    again = failure(LOST, InternalError("the engine failed"), "d1", place=second)
    if abs(first - second) < SAME_PLACE_TOKENS:
        with pytest.raises(InternalError, match=r"d0 and d1 were lost .* engine failed"):
            trying.after(again, 0)
    else:
        trying.after(again, 0)


def test_a_prefill_and_a_decode_worker_lost_at_the_same_place_are_chance():
    trying = recovery()
    trying.after(failure(worker="d0", place=5), 5)
    trying.after(failure(worker="p0", place=5), 5)
    with pytest.raises(InternalError, match="poison: p0 and p1 were lost"):
        trying.after(failure(worker="p1", place=5, prefill="p1"), 5)


def test_workers_lost_while_the_request_only_waited_there_count_for_nothing():
    trying = recovery()
    for worker in ("d0", "d1", "d2", "d3"):
        trying.after(failure(worker=worker), 0)


@pytest.mark.parametrize(
    ("accepted", "expected"), [(False, OverloadedError), (True, UnavailableError)]
)
def test_where_the_budget_is_spent_no_other_worker_is_asked(accepted, expected):
    trying = recovery(accepted=accepted, tries=1.0)
    trying.after(failure(REFUSED, OverloadedError("full")), 0)
    with pytest.raises(expected, match="full"):
        trying.after(failure(REFUSED, OverloadedError("full"), "d1"), 0)


def test_looking_for_workers_where_there_are_none_costs_nothing():
    trying = recovery(tries=0.0)
    trying.after(failure(NOBODY), 0)


def given_back(worker: str = "d0") -> AttemptFailure:
    return failure(PREEMPTED, OverloadedError("no room any more"), worker)


def test_to_be_given_back_is_no_failure_and_costs_nothing():
    trying = recovery(tries=1.0)
    trying.after(failure(REFUSED, OverloadedError("full"), "d1"), 0)
    for num_tokens in range(5, 5 + MAX_FAILURES):
        assert trying.after(given_back(), num_tokens) == 0.0
    assert (trying.refused, trying.broken, trying.preempted_by) == (set(), set(), "d0")
    trying.after(failure(NOBODY), 99)
    assert trying.preempted_by == ""


def test_a_request_is_given_back_only_so_often():
    trying = recovery()
    for num_tokens in range(MAX_RETURNS):
        assert trying.may_return
        trying.after(given_back(), num_tokens)
    assert not trying.may_return


def test_a_request_that_comes_no_further_is_not_given_back_again():
    trying = recovery()
    trying.after(given_back(), 7)
    assert trying.may_return
    trying.after(given_back("d1"), 7)
    assert not trying.may_return


def test_what_was_given_back_waits_for_room_as_long_as_it_takes():
    trying = recovery(tries=0.0)
    trying.after(given_back(), 7)
    full = failure(REFUSED, OverloadedError("full"), "d1")
    waits = [round(trying.after(each, 7)) for each in [full, failure(NOBODY)] * MAX_FAILURES]
    assert waits[:5] == [1, 2, 4, 8, 8]
    assert trying.may_return


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(failure(LOST, worker="d1"), id="a worker is lost"),
        pytest.param(failure(NOBODY, worker=""), id="there are no workers"),
        pytest.param(failure(REFUSED, UnavailableError("draining"), "d1"), id="a worker leaves"),
    ],
)
def test_what_was_given_back_and_then_fails_gives_up_as_others_do(other):
    trying = recovery()
    trying.after(given_back(), 7)
    for _ in range(MAX_FAILURES):
        trying.after(other, 7)
        trying.refused.clear()
    with pytest.raises(UnavailableError):
        trying.after(other, 7)


def test_once_it_has_come_further_refusals_count_again():
    trying = recovery()
    trying.after(given_back(), 7)
    full = failure(REFUSED, OverloadedError("full"), "d1")
    for _ in range(MAX_FAILURES):
        trying.after(full, 8)
    with pytest.raises(OverloadedError):
        trying.after(full, 8)
