"""Terms of the default placement policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.fleet.decayed_counter import DecayedCounter
from baton_router.routing.placement.cost_model import CostModel
from baton_router.routing.placement.placement import place
from baton_router.routing.placement.prefix_source import with_sources

MODEL = CostModel(
    prefill_seconds_per_token=1e-3,
    attention_seconds_per_pair=1e-6,
    handoff_seconds=0.25,
    transfer_seconds_per_token=1e-4,
    interference_seconds_per_sequence=0.5,
    congestion=3.0,
    load=0.01,
    full_share=0.5,
)


def test_prefill_cost_counts_computed_and_queued_tokens():
    one = Candidate("p", "prefill", b"", 600, num_queued_tokens=50, num_recent_tokens=2000.0)
    uncached = 0.4 + 400 * (600 + 200) * 1e-6
    assert MODEL.terms(one, 1000) == pytest.approx(
        {"uncached": uncached, "queue": 0.05, "congestion": 3 * uncached, "load": 0.02}
    )


def test_congestion_cost_is_same_at_any_speed_and_role():
    """Half of a step is half of what a step takes to those whose prompts fill it up."""
    rates = Rates(8e-3, 1e-3, max_step_tokens=64)
    slower = Rates(16e-3, 2e-3, max_step_tokens=64, slowness=2.0)
    for role, terms in (("prefill", MODEL.terms), ("decode", MODEL.alone_terms)):
        one, other = (terms(Candidate("w", role, b"", 992, rates=r), 1024) for r in (rates, slower))
        assert one["congestion"] == pytest.approx(3 * (4e-3 + 32e-3))
        assert other["congestion"] == pytest.approx(one["congestion"])
        assert other["uncached"] == pytest.approx(2 * one["uncached"]) == pytest.approx(80e-3)


_SPEEDS = st.floats(0.7, 1.4)


@given(_SPEEDS, _SPEEDS, st.floats(0, 0.1), st.floats(1e-7, 2e-4), st.sampled_from([4, 512]))
def test_placement_keeps_cached_prompt_despite_speed_noise(
    one, other, step, token, max_step_tokens
):
    def rates(slowness):
        return Rates(
            step * slowness,
            token * slowness,
            max_step_tokens=max_step_tokens,
            transfer_seconds_per_token=1e-7,
            slowness=slowness,
        )

    cluster = [
        Candidate("p0", "prefill", b"", 192, num_recent_tokens=200.0, rates=rates(one)),
        Candidate("p1", "prefill", b"", rates=rates(other)),
        Candidate("d0", "decode", b"", 192, rates=rates(one)),
        Candidate("d1", "decode", b"", rates=rates(other)),
    ]
    for name in map(str, range(8)):
        placement = place(name, 200, with_sources(cluster))
        assert placement is not None
        assert (placement.prefill, placement.decode) == ("p0", "d0")


def test_decode_cost_counts_moved_slowed_and_displaced_tokens():
    one = Candidate("d", "decode", b"", 600, num_sequences=3, num_held_tokens=900)
    assert MODEL.terms(one, 1000) == pytest.approx(
        {"handoff": 0.25, "transfer": 0.04, "interference": 1.5, "memory": 0.0}
    )
    bounded = Candidate("d", "decode", b"", 600, num_held_tokens=900, max_held_tokens=2000)
    assert MODEL.terms(bounded, 1000)["memory"] == pytest.approx(0.3)
    assert MODEL.terms(bounded, 700)["memory"] == 0.0


def test_cost_is_never_negative_when_prefix_exceeds_prompt():
    for role in ("prefill", "decode"):
        terms = MODEL.terms(Candidate("w", role, b"", 64), 63)
        assert not any(cost for term, cost in terms.items() if term != "handoff")


def test_decayed_counter_halves_in_each_half_life():
    recent = DecayedCounter(half_life=10.0)
    recent.add(100, now=5.0)
    assert recent.value(5.0) == 100
    assert recent.value(15.0) == pytest.approx(50)
    recent.add(50, now=15.0)
    assert recent.value(35.0) == pytest.approx(25)
