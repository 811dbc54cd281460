"""Admission policies, by name."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.routing.admission.policy import (
    ADMISSION_NAMES,
    LIMIT,
    Arrival,
    DecodePool,
    InFlight,
    admission_named,
    naive,
    none,
    predicted,
)

NOW = 100.0

flights = st.builds(
    lambda prefill, decode, num_tokens: InFlight(NOW + prefill, NOW + prefill + decode, num_tokens),
    st.floats(-50, 50),
    st.floats(0, 50),
    st.integers(1, 500),
)
pools = st.builds(DecodePool, st.lists(flights, max_size=12).map(tuple), st.integers(100, 2000))
arrivals = st.builds(Arrival, st.just(NOW), st.floats(0, 60), st.integers(1, 500))


def pool(*in_flight: InFlight) -> DecodePool:
    return DecodePool(in_flight, max_held_tokens=1000)


ON_ITS_WAY = InFlight(NOW + 5, NOW + 30, 600)
DECODING = InFlight(NOW - 5, NOW + 4, 600)
ARRIVAL = Arrival(NOW, prefill_seconds=10.0, num_tokens=400)


def test_naive_counts_current_decodes_and_predicted_later_ones():
    for in_flight, by_naive, by_predicted in ((ON_ITS_WAY, True, False), (DECODING, False, True)):
        assert naive(ARRIVAL, pool(in_flight)).is_admitted == by_naive
        assert predicted(ARRIVAL, pool(in_flight)).is_admitted == by_predicted
        assert none(ARRIVAL, pool(in_flight, in_flight)).is_admitted


def test_admission_policy_returns_retry_after_when_refusing():
    assert naive(ARRIVAL, pool(DECODING)).retry_after == 4.0
    assert predicted(ARRIVAL, pool(ON_ITS_WAY)).retry_after == 20.0


def test_predicted_policy_counts_overdue_decode():
    late = InFlight(NOW - 50, NOW - 20, 600)
    assert not predicted(ARRIVAL, pool(late)).is_admitted


@given(st.sampled_from(ADMISSION_NAMES), arrivals, pools)
def test_admission_policies_refuse_only_requests_over_limit(name, arrival, decodes):
    decision = admission_named(name)(arrival, decodes)
    assert decision.occupancy >= arrival.num_tokens / decodes.max_held_tokens
    if decision.is_admitted:
        assert decision.retry_after == 0
    else:
        assert decision.occupancy > LIMIT
        assert 0 <= decision.retry_after <= 100


@given(arrivals, pools)
def test_admission_policies_admit_anything_to_idle_pool(arrival, decodes):
    idle = replace(decodes, in_flight=())
    assert all(admission_named(name)(arrival, idle).is_admitted for name in ADMISSION_NAMES)


@given(arrivals, pools)
def test_naive_and_predicted_agree_without_prefills(arrival, decodes):
    at_once = replace(arrival, prefill_seconds=0.0)
    assert naive(at_once, decodes) == predicted(at_once, decodes)


@pytest.mark.parametrize("num_flights", [1, 31, 500])
def test_naive_policy_considers_last_ending_of_many_decodes(num_flights):
    many = tuple(InFlight(NOW - 1, NOW + 1 + i, 600) for i in range(num_flights))
    assert naive(ARRIVAL, pool(*many)).retry_after == float(num_flights)
