"""A shared limit: no holder below its equal share gives way."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.fairness.fair_bound import FairBound

_EVENTS = st.lists(st.tuples(st.booleans(), st.sampled_from("abcde")), max_size=200)


@given(st.integers(1, 12), _EVENTS)
def test_fair_bound_refuses_no_holder_below_its_share(limit, events):
    bound, held, seen = FairBound(limit), Counter(), set()
    for is_arrival, holder in events:
        seen.add(holder)
        if not is_arrival:
            if held[holder]:
                bound.remove(holder)
                held[holder] -= 1
            continue
        before = dict(held)
        victim = bound.victim_for(holder)
        if victim == holder:
            others = {each for each in seen if before.get(each, 0)} | {holder}
            assert sum(held.values()) == limit
            assert held[holder] >= limit // len(others), "refused below its share"
            assert max(held.values()) <= held[holder] + 1
            continue
        if victim is not None:
            assert held[victim] == max(held.values())
            assert held[victim] > held[holder] + 1, "the two would only change places"
            bound.remove(victim)
            held[victim] -= 1
        bound.add(holder)
        held[holder] += 1
        assert bound.total == sum(held.values()) <= limit
        assert {each: bound.held_by(each) for each in held} == held


@given(st.integers(1, 1000), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 100))))
def test_fair_bound_takes_amounts_from_the_largest(limit, arrivals):
    bound, held = FairBound(limit), Counter()
    for holder, amount in arrivals:
        while (victim := bound.victim_for(holder, amount)) not in (None, holder):
            assert held[victim] == max(held.values()) > held[holder] + amount
            bound.remove(victim)
            held[victim] -= 1
        if victim is None:
            bound.add(holder, amount)
            held[holder] += amount
        assert bound.total == sum(held.values()) <= limit


def test_fair_bound_gives_all_to_a_holder_alone():
    bound = FairBound(3)
    for _ in range(3):
        assert bound.victim_for("a") is None
        bound.add("a")
    assert bound.victim_for("a") == "a"
    assert bound.victim_for("b") == "a"


def test_fair_bound_remembers_no_holder_without_items():
    bound = FairBound(10)
    for number in range(1000):
        bound.add(str(number))
        bound.remove(str(number))
    assert bound.total == 0
    assert bound.largest is None


def test_fair_bound_rejects_removal_of_what_is_not_held():
    with pytest.raises(AssertionError, match="more than the holder has"):
        FairBound(1).remove("a")
