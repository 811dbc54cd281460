"""What the terms of the default policy say."""

import pytest

from router.candidate import Candidate
from router.cost_model import CostModel
from router.recent import RecentTokens

MODEL = CostModel(
    prefill_seconds_per_token=1e-3,
    attention_seconds_per_pair=1e-6,
    handoff_seconds=0.25,
    transfer_seconds_per_token=1e-4,
    interference_seconds_per_sequence=0.5,
    crowding=3.0,
    recency=0.01,
    full_share=0.5,
)


def test_a_prefill_worker_costs_what_it_computes_and_what_waits_for_it():
    one = Candidate("p", "prefill", b"", 600, num_queued_tokens=50, num_recent_tokens=2000.0)
    uncached = 0.4 + 400 * (600 + 200) * 1e-6
    assert MODEL.terms(one, 1000) == pytest.approx(
        {"uncached": uncached, "queue": 0.05, "crowding": 3 * uncached, "recent": 0.02}
    )


def test_a_decode_worker_costs_what_is_moved_slowed_and_displaced():
    one = Candidate("d", "decode", b"", 600, num_sequences=3, num_held_tokens=900)
    assert MODEL.terms(one, 1000) == pytest.approx(
        {"handoff": 0.25, "transfer": 0.04, "interference": 1.5, "memory": 0.0}
    )
    bounded = Candidate("d", "decode", b"", 600, num_held_tokens=900, max_held_tokens=2000)
    assert MODEL.terms(bounded, 1000)["memory"] == pytest.approx(0.3)
    assert MODEL.terms(bounded, 700)["memory"] == 0.0


def test_a_cached_prefix_longer_than_the_prompt_costs_no_less_than_nothing():
    for role in ("prefill", "decode"):
        terms = MODEL.terms(Candidate("w", role, b"", 64), 63)
        assert not any(cost for term, cost in terms.items() if term != "handoff")


def test_half_of_recent_work_is_forgotten_in_each_half_life():
    recent = RecentTokens(half_life=10.0)
    recent.add(100, now=5.0)
    assert recent.value(5.0) == 100
    assert recent.value(15.0) == pytest.approx(50)
    recent.add(50, now=15.0)
    assert recent.value(35.0) == pytest.approx(25)
