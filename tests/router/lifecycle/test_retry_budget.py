"""The budget of tries, with a clock of the test's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.lifecycle.retry_budget import RetryBudget
from tests.support.clock import Clock


def test_retry_budget_grows_by_requests_and_time():
    clock = Clock()
    budget = RetryBudget(share=0.5, per_second=2.0, largest=3.0, clock=clock)
    assert [budget.withdraw() for _ in range(4)] == [True, True, True, False]
    budget.deposit()
    assert not budget.withdraw()
    budget.deposit()
    assert budget.withdraw()
    clock.now = 0.5
    assert budget.withdraw()
    assert not budget.withdraw()


@given(st.lists(st.sampled_from(["deposit", "withdraw", "wait"]), max_size=200))
def test_retry_budget_never_grants_more_than_was_deposited(events):
    clock = Clock()
    budget = RetryBudget(share=0.25, per_second=1.0, largest=5.0, clock=clock)
    num_requests = num_tries = 0
    for event in events:
        if event == "wait":
            clock.now += 0.5
        elif event == "deposit":
            budget.deposit()
            num_requests += 1
        else:
            could = budget.balance >= 1.0
            assert budget.withdraw() == could
            num_tries += could
        assert 0.0 <= budget.balance <= 5.0
        assert num_tries <= 5.0 + 0.25 * num_requests + clock.now + 1e-9


def test_retry_budget_grants_nothing_when_clock_stands_still():
    budget = RetryBudget(share=0.0, per_second=100.0, largest=1.0, clock=lambda: 7.0)
    assert budget.withdraw()
    assert budget.balance == pytest.approx(0.0)
    assert not budget.withdraw()
