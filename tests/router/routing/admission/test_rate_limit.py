"""Buckets that hold what they promise, and who is refused for what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import OverloadedError
from baton.sampling import SamplingParams
from baton_router.call.request import Request, RequestOutcome
from baton_router.call.usage import Account, Timings
from baton_router.routing.admission.quotas import Quota
from baton_router.routing.admission.rate_limit import RateLimitedError, RateLimits
from baton_router.routing.admission.token_bucket import TokenBucket
from baton_router.settings import RouterSettings
from tests.support.clock import Clock

STEPS = st.lists(
    st.tuples(
        st.floats(0, 30, allow_nan=False),  # seconds that pass
        st.integers(1, 100),  # what is asked for
        st.floats(0, 1),  # the part of it that is given back
    ),
    max_size=60,
)


@given(st.integers(1, 100), st.floats(0.01, 50), STEPS)
def test_token_bucket_never_exceeds_capacity_plus_refill(capacity, rate, steps):
    clock = Clock(1000.0)
    bucket = TokenBucket(capacity, rate, clock)
    taken: list[tuple[float, float]] = []  # when, and how much was kept
    for seconds, amount, part in steps:
        clock.now += seconds
        if amount <= capacity and bucket.seconds_until(amount) == 0.0:
            bucket.take(amount)
            bucket.refund(amount * part)
            taken.append((clock.now, amount * (1 - part)))
        assert 0 <= bucket.level <= capacity
    for first, (begin, _) in enumerate(taken):
        total = 0.0
        for moment, amount in taken[first:]:
            total += amount
            assert total <= capacity + rate * (moment - begin) + 1e-3


@given(st.integers(1, 100), st.floats(0.01, 50), STEPS)
def test_token_bucket_has_tokens_at_predicted_time(capacity, rate, steps):
    clock = Clock(1000.0)
    bucket = TokenBucket(capacity, rate, clock)
    for seconds, amount, _ in steps:
        clock.now += seconds
        wanted = min(amount, capacity)
        wait = bucket.seconds_until(wanted)
        if wait:
            asked = clock.now
            clock.now = asked + 0.99 * wait
            assert bucket.seconds_until(wanted) <= wait
            assert bucket.level < wanted
            clock.now = asked + wait
        clock.now += 1e-6
        assert bucket.seconds_until(wanted) == 0.0
        bucket.take(wanted)


def limits(clock: Clock, **bounds: int) -> RateLimits:
    return RateLimits(lambda tenant: Quota(**bounds), clock)


def test_rate_limit_rejects_excess_request_with_retry_after():
    clock = Clock(1000.0)
    limited = limits(clock, requests_per_minute=3)
    for _ in range(3):
        limited.count_request("acme")
    with pytest.raises(RateLimitedError) as caught:
        limited.count_request("acme")
    assert isinstance(caught.value, OverloadedError)
    assert caught.value.retry_after == pytest.approx(20.0)
    status = caught.value.statuses["requests"]
    assert (status.limit, status.remaining) == (3, 0)
    assert status.reset_seconds == pytest.approx(60.0)
    clock.now += 20.0
    limited.count_request("acme")
    limited.count_request("globex")
    assert caught.value.reason == "requests_per_minute"


def test_rate_limit_check_counts_nothing():
    limited = limits(Clock(1000.0), requests_per_minute=1)
    for _ in range(5):
        limited.check("acme")
    limited.count_request("acme")
    with pytest.raises(RateLimitedError):
        limited.check("acme")


def outcome(num_tokens: int) -> RequestOutcome:
    """Returns the outcome of a request that used `num_tokens` tokens."""
    account = Account(Timings(0.0, admitted=0.0), 0, num_output_tokens=num_tokens)
    return RequestOutcome(Request("r", (), SamplingParams()), account)


def test_rate_limit_reserves_tokens_and_returns_unused_ones():
    clock = Clock(1000.0)
    limited = limits(clock, tokens_per_minute=600)
    reservation = limited.reserve("acme", 500)
    with pytest.raises(RateLimitedError, match="600 tokens in a minute") as caught:
        limited.reserve("acme", 200)
    assert caught.value.retry_after == pytest.approx(10.0)
    reservation.end(outcome(num_tokens=50))
    assert limited.statuses("acme")["tokens"].remaining == 550


def test_rate_limit_lets_request_over_limit_run_into_debt():
    clock = Clock(1000.0)
    limited = limits(clock, tokens_per_minute=600)
    reservation = limited.reserve("acme", 5000)
    assert limited.statuses("acme")["tokens"].remaining == 0
    reservation.end(outcome(num_tokens=900))
    assert limited.statuses("acme")["tokens"].remaining == 0
    with pytest.raises(RateLimitedError) as caught:
        limited.reserve("acme", 1)
    assert caught.value.retry_after == pytest.approx(30.1)
    clock.now += 31.0
    limited.reserve("acme", 1).end(outcome(num_tokens=0))
    with pytest.raises(RateLimitedError) as caught:
        limited.reserve("acme", 5000)
    clock.now += caught.value.retry_after
    limited.reserve("acme", 5000)


def test_rate_limit_rejects_excess_bytes_with_retry_after():
    clock = Clock(1000.0)
    limited = limits(clock, bytes_per_minute=600)
    limited.count_bytes("acme", 500)
    with pytest.raises(RateLimitedError, match="600 bytes in a minute") as caught:
        limited.count_bytes("acme", 200)
    assert caught.value.retry_after == pytest.approx(10.0)
    limited.check("acme")
    limited.count_bytes("acme", 100)
    with pytest.raises(RateLimitedError, match="600 bytes in a minute"):
        limited.check("acme")
    clock.now += 60.0
    limited.count_bytes("acme", 10**9)


# All at once, where the whole of `make demo` sends some dozens.
LAPTOP = {"requests": 5_000, "prompt_bytes": 4_000, "tokens": 1_000 + 1_000}


def test_default_rate_limits_never_reject_a_laptop():
    clock = Clock(1000.0)
    limited = RateLimits(RouterSettings().all_quotas().of, clock)
    for _ in range(LAPTOP["requests"]):
        limited.check("default")
        limited.count_bytes("default", LAPTOP["prompt_bytes"])
        limited.count_request("default")
        limited.reserve("default", LAPTOP["tokens"])


@pytest.mark.parametrize("kind", ["requests", "tokens", "bytes"])
def test_default_rate_limits_reject_a_flood_with_retry_after(kind):
    limited = RateLimits(RouterSettings().all_quotas().of, Clock(1000.0))

    def flood() -> None:
        for _ in range(100_000):
            if kind == "requests":
                limited.count_request("default")
            elif kind == "bytes":
                limited.count_bytes("default", 8 * 2**20)
            else:
                limited.reserve("default", 100_000)

    with pytest.raises(RateLimitedError, match=f"{kind} in a minute") as caught:
        flood()
    assert 0 < caught.value.retry_after <= 60.0


def test_rate_limit_settings_of_zero_set_no_limit():
    none = RouterSettings(requests_per_minute=0, tokens_per_minute=0, bytes_per_minute=0)
    assert none.all_quotas().of("default") == Quota()


def test_request_that_no_worker_takes_costs_no_tokens():
    limited = limits(Clock(1000.0), tokens_per_minute=600)
    request = Request("r", (1,) * 400, SamplingParams())
    limited.reserve("acme", 600).end(RequestOutcome(request, Account(Timings(0.0), 400)))
    assert limited.statuses("acme")["tokens"].remaining == 600


def test_rate_limit_keeps_nothing_without_limits():
    limited = limits(Clock(1000.0))
    for tenant in map(str, range(10)):
        limited.count_request(tenant)
        limited.reserve(tenant, 10**9).end(outcome(num_tokens=10**9))
        assert limited.statuses(tenant) == {}
    assert not limited._buckets


def test_rate_limit_forgets_idle_tenants_only():
    clock = Clock(1000.0)
    limited = limits(clock, requests_per_minute=1)
    for number in range(10_000):
        limited.count_request(str(number))
        clock.now += 1.0
    assert len(limited._buckets) < 2100
    with pytest.raises(RateLimitedError):
        limited.count_request("9999")
