from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from baton_router.routing.placement.placement import (
    Candidate,
    Placement,
    has_version_gap,
    place,
    why_none,
)
from tests.support.strategies import clusters, request_ids

NUM_TOKENS = 256


def cost(placement: Placement, *workers: str) -> float:
    return sum(s.cost for s in placement.scored if s.candidate.worker in workers)


@given(request_ids, clusters(NUM_TOKENS), st.data())
def test_placement_cost_never_grows_with_cached_prefix(request_id, candidates, data):
    assume(candidates)
    before = place(request_id, NUM_TOKENS, candidates)
    assume(before is not None)
    one = data.draw(st.sampled_from(candidates))
    more = one._replace(num_cached_tokens=min(NUM_TOKENS, one.num_cached_tokens + 16))
    after = place(request_id, NUM_TOKENS, [more if c is one else c for c in candidates])
    assert after is not None
    assert cost(after, one.worker) <= cost(before, one.worker)
    if one.worker in (before.prefill, before.decode):
        assert one.worker in (after.prefill, after.decode)


def equals(number: int) -> list[Candidate]:
    return [
        Candidate(f"{role}-{i}", role, b"a")
        for role in ("prefill", "decode")
        for i in range(number)
    ]


def test_placement_spreads_equal_costs_over_all_pairs():
    placements = [place(f"request-{i}", 10, equals(2)) for i in range(64)]
    assert len({(p.prefill, p.decode) for p in placements if p}) == 4


def test_placement_moves_only_requests_of_worker_that_left():
    names = [f"request-{i}" for i in range(64)]
    before = {name: place(name, 10, equals(4)) for name in names}
    left = [c for c in equals(4) if c.worker != "decode-3"]
    for name, placement in before.items():
        assert placement is not None
        if placement.decode != "decode-3":
            assert place(name, 10, left) == replace(placement, scored=place(name, 10, left).scored)


def test_placement_says_why_no_worker_can_be_chosen():
    prefill, decode = equals(1)
    drained = decode._replace(excluded="draining")
    assert why_none([]) == "no prefill worker is known"
    assert why_none([prefill]) == "no decode worker is known"
    assert why_none([prefill, drained]) == "no decode worker can take work: draining"
    assert "same KV layout" in why_none([prefill, decode._replace(pairing=b"b")])
    assert why_none([], ("decode",)) == "no decode worker is known"
    alone = why_none([drained], ("decode",))
    assert alone == "no decode worker can take work: draining"


def test_placement_blames_version_gap_when_versions_differ():
    prefill, decode = equals(1)
    newer = decode._replace(pairing=b"b", version="1.3")
    assert has_version_gap([prefill, newer])
    assert "one version; finish the upgrade" in why_none([prefill, newer])
    for others in ([newer], [decode, newer, prefill._replace(excluded="draining")], []):
        assert not has_version_gap(others)
    assert not has_version_gap([prefill, newer, decode])
    assert has_version_gap([prefill, newer, decode._replace(excluded="draining")])


def test_placement_blames_dtypes_of_which_no_two_pair():
    prefill, decode = (one._replace(kv_dtype="float32") for one in equals(1))
    narrow = decode._replace(pairing=b"b", kv_dtype="bfloat16")
    said = why_none([prefill, narrow])
    assert said.startswith(
        "no prefill and decode worker have KV of one dtype: float32 and bfloat16; "
    )
    assert "the same --dtype" in said
    assert "dtype" not in why_none([prefill, narrow._replace(kv_dtype="")])


@given(request_ids, clusters(NUM_TOKENS))
def test_placement_avoids_pairs_that_failed_together(request_id, candidates):
    first = place(request_id, NUM_TOKENS, candidates)
    assume(first is not None)
    broken = {(first.prefill, first.decode)}
    second = place(request_id, NUM_TOKENS, candidates, broken)
    if second is not None:
        assert (second.prefill, second.decode) not in broken
    assert place(request_id, NUM_TOKENS, candidates, {("another", first.decode)}) == first
