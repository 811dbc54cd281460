"""Choice of a prefix source, and when a fetch is worth its cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.placement.cost_model import FETCH, CostModel
from baton_router.routing.placement.placement import place, place_again
from baton_router.routing.placement.policy import POLICY_NAMES, policy_named
from baton_router.routing.placement.prefix_source import with_sources

NUM_TOKENS = 1024

candidates = st.lists(
    st.builds(
        lambda **fields: Candidate(**fields),  # by itself it would draw other fields, too
        worker=st.integers(0, 20).map(lambda i: f"w{i}"),
        role=st.sampled_from(["prefill", "decode"]),
        pairing=st.sampled_from([b"a", b"b"]),
        num_cached_tokens=st.integers(0, NUM_TOKENS // 16).map(lambda blocks: blocks * 16),
        num_queued_tokens=st.integers(0, 9),
        num_sequences=st.integers(0, 9),
        excluded=st.sampled_from(["", "", "draining"]),
    ),
    max_size=6,
    unique_by=lambda c: c.worker,
)


@given(candidates)
def test_prefix_source_holds_more_can_pair_and_is_available(cluster):
    by_name = {c.worker: c for c in cluster}
    for one, before in zip(with_sources(cluster), cluster, strict=True):
        none = {"source": "", "num_source_tokens": 0, "num_source_recent_tokens": 0.0}
        assert one._replace(**none) == before
        others = [
            c.num_cached_tokens
            for c in cluster
            if c.worker != one.worker and c.pairing == one.pairing and not c.excluded
        ]
        most = max(others, default=0)
        if one.role == "decode" or most <= one.num_cached_tokens:
            assert (one.source, one.num_source_tokens) == ("", 0)
        else:
            source = by_name[one.source]
            assert source.worker != one.worker
            assert (source.pairing, source.excluded) == (one.pairing, "")
            assert one.num_source_tokens == source.num_cached_tokens == most


def test_prefix_source_is_least_busy_of_equal_holders():
    busy = Candidate("p1", "prefill", b"", 512, num_queued_tokens=100)
    idle = Candidate("d9", "decode", b"", 512)
    (one, *_) = with_sources([Candidate("p0", "prefill", b""), busy, idle])
    assert one.source == "d9"


MODEL = CostModel(prefill_seconds_per_token=1e-3, transfer_seconds_per_token=1e-5, congestion=2.0)


@pytest.mark.parametrize(("num_lacking", "is_worth_it"), [(4, False), (6, True), (600, True)])
def test_prefix_is_fetched_when_cheaper_than_computing(num_lacking, is_worth_it):
    one = Candidate("p", "prefill", b"", 400, source="d", num_source_tokens=400 + num_lacking)
    terms = MODEL.terms(one, NUM_TOKENS)
    assert (FETCH in terms) == is_worth_it
    left = NUM_TOKENS - 400 - (num_lacking if is_worth_it else 0)
    assert terms["uncached"] == pytest.approx(left * 1e-3)
    assert terms["congestion"] == pytest.approx(2 * left * 1e-3)
    if is_worth_it:
        assert terms[FETCH] == pytest.approx(5e-3 + num_lacking * 1e-5)


def test_prefix_fetch_cost_includes_engine_steps():
    rates = Rates(0.25, 1e-2, transfer_seconds_per_token=0.0)
    one = Candidate("p", "prefill", b"", source="d", num_source_tokens=64, rates=rates)
    assert MODEL.terms(one, NUM_TOKENS)[FETCH] == pytest.approx(5e-3 + 2 * 0.25)


def test_prefix_fetch_is_bounded_by_prompt_length():
    one = Candidate("p", "prefill", b"", 0, source="d", num_source_tokens=2000)
    terms = MODEL.terms(one, NUM_TOKENS)
    assert (terms["uncached"], terms[FETCH]) == (0.0, pytest.approx(5e-3 + NUM_TOKENS * 1e-5))


def test_placement_names_source_and_counts_its_tokens():
    cluster = with_sources(
        [
            Candidate("p", "prefill", b"", 16),
            Candidate("d", "decode", b"", 512),
            Candidate("e", "decode", b""),
        ]
    )
    placement = place("r", NUM_TOKENS, cluster)
    assert placement is not None
    assert (placement.source, placement.num_cached_tokens) == ("d", 512)
    for name in set(POLICY_NAMES) - {"baton"}:  # which look at what they are named for
        other = place("r", NUM_TOKENS, cluster, policy=policy_named(name))
        assert other is not None
        assert (other.source, other.num_cached_tokens) == ("", 16)


def test_placement_lets_idle_worker_fetch_from_busy_holder():
    held = Candidate("p0", "prefill", b"", 512, num_queued_tokens=2000)
    cluster = [held, Candidate("p1", "prefill", b""), Candidate("d", "decode", b"")]
    placement = place("r", NUM_TOKENS, with_sources(cluster))
    assert placement is not None
    assert (placement.prefill, placement.source) == ("p1", "p0")
    alone = place("r", NUM_TOKENS, cluster)
    assert alone is not None
    assert (alone.prefill, alone.source) == ("p0", "")


@given(candidates, st.text(max_size=4))
def test_place_again_chooses_other_decode_worker_of_pairing(cluster, request_id):
    for here in (c for c in cluster if c.role == "decode"):
        chosen = place_again(request_id, NUM_TOKENS, cluster, here.worker)
        able = {
            c.worker
            for c in cluster
            if c.role == "decode" and not c.excluded and c.pairing == here.pairing
        } - {here.worker}
        assert chosen in able if able else chosen is None
    assert place_again(request_id, NUM_TOKENS, cluster, "unknown") is None
