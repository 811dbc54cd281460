from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from router.placement import Candidate, Placement, has_version_gap, place, why_none

NUM_TOKENS = 256


def candidate(role: str) -> st.SearchStrategy[Candidate]:
    return st.builds(
        Candidate,
        worker=st.integers(0, 99).map(lambda i: f"{role}-{i}"),
        role=st.just(role),
        pairing=st.sampled_from([b"a", b"b"]),
        num_cached_tokens=st.integers(0, NUM_TOKENS // 16).map(lambda blocks: blocks * 16),
        num_queued_tokens=st.integers(0, 4096),
        num_sequences=st.integers(0, 64),
        excluded=st.sampled_from(["", "", "", "draining"]),
    )


def pool(role: str) -> st.SearchStrategy[list[Candidate]]:
    return st.lists(candidate(role), max_size=5, unique_by=lambda c: c.worker)


clusters = st.builds(lambda p, d: p + d, pool("prefill"), pool("decode"))
request_ids = st.text(max_size=8)


def by_name(candidates: list[Candidate]) -> dict[str, Candidate]:
    return {c.worker: c for c in candidates}


def cost(placement: Placement, *workers: str) -> float:
    return sum(s.cost for s in placement.scored if s.candidate.worker in workers)


@given(request_ids, clusters)
def test_only_workers_that_can_take_work_and_may_pair_are_chosen(request_id, candidates):
    placement = place(request_id, NUM_TOKENS, candidates)
    usable = [c for c in candidates if not c.excluded]
    pairs = [
        (p, d)
        for p in usable
        for d in usable
        if (p.role, d.role) == ("prefill", "decode") and p.pairing == d.pairing
    ]
    assert (placement is None) == (not pairs)
    if placement is not None:
        chosen = (by_name(candidates)[placement.prefill], by_name(candidates)[placement.decode])
        assert chosen in pairs


@given(request_ids, clusters, st.randoms())
def test_the_order_of_the_candidates_does_not_matter(request_id, candidates, shuffled):
    placement = place(request_id, NUM_TOKENS, candidates)
    other = list(candidates)
    shuffled.shuffle(other)
    assert place(request_id, NUM_TOKENS, other) == placement


@given(request_ids, clusters)
def test_no_other_pair_is_cheaper(request_id, candidates):
    placement = place(request_id, NUM_TOKENS, candidates)
    assume(placement is not None)
    chosen = cost(placement, placement.prefill, placement.decode)
    for p in candidates:
        for d in candidates:
            may_pair = (p.role, d.role) == ("prefill", "decode") and p.pairing == d.pairing
            if may_pair and not p.excluded and not d.excluded:
                assert chosen <= cost(placement, p.worker, d.worker)


@given(request_ids, clusters, st.data())
def test_a_longer_cached_prefix_never_makes_a_worker_dearer(request_id, candidates, data):
    assume(candidates)
    before = place(request_id, NUM_TOKENS, candidates)
    assume(before is not None)
    one = data.draw(st.sampled_from(candidates))
    more = replace(one, num_cached_tokens=min(NUM_TOKENS, one.num_cached_tokens + 16))
    after = place(request_id, NUM_TOKENS, [more if c is one else c for c in candidates])
    assert after is not None
    assert cost(after, one.worker) <= cost(before, one.worker)
    if one.worker in (before.prefill, before.decode):
        assert one.worker in (after.prefill, after.decode)


@given(request_ids, clusters)
def test_every_candidate_is_reported_the_usable_ones_first(request_id, candidates):
    placement = place(request_id, NUM_TOKENS, candidates)
    assume(placement is not None)
    assert sorted(s.candidate.worker for s in placement.scored) == sorted(by_name(candidates))
    is_excluded = [bool(s.candidate.excluded) for s in placement.scored]
    assert is_excluded == sorted(is_excluded)


def equals(number: int) -> list[Candidate]:
    return [
        Candidate(f"{role}-{i}", role, b"a")
        for role in ("prefill", "decode")
        for i in range(number)
    ]


def test_equal_costs_spread_over_all_pairs():
    placements = [place(f"request-{i}", 10, equals(2)) for i in range(64)]
    assert len({(p.prefill, p.decode) for p in placements if p}) == 4


def test_of_equal_workers_one_that_leaves_moves_only_its_own_requests():
    names = [f"request-{i}" for i in range(64)]
    before = {name: place(name, 10, equals(4)) for name in names}
    left = [c for c in equals(4) if c.worker != "decode-3"]
    for name, placement in before.items():
        assert placement is not None
        if placement.decode != "decode-3":
            assert place(name, 10, left) == replace(placement, scored=place(name, 10, left).scored)


def test_why_nothing_can_be_placed_is_a_sentence():
    prefill, decode = equals(1)
    drained = replace(decode, excluded="draining")
    assert why_none([]) == "no prefill worker is known"
    assert why_none([prefill]) == "no decode worker is known"
    assert why_none([prefill, drained]) == "no decode worker can take work: draining"
    assert "same KV layout" in why_none([prefill, replace(decode, pairing=b"b")])


def test_where_versions_differ_that_is_why_nothing_can_be_placed():
    prefill, decode = equals(1)
    newer = replace(decode, pairing=b"b", version="1.3")
    assert has_version_gap([prefill, newer])
    assert "one version; finish the upgrade" in why_none([prefill, newer])
    for others in ([newer], [decode, newer, replace(prefill, excluded="draining")], []):
        assert not has_version_gap(others)
    assert not has_version_gap([prefill, newer, decode])
    assert has_version_gap([prefill, newer, replace(decode, excluded="draining")])


@given(request_ids, clusters)
def test_workers_that_failed_together_are_chosen_with_others_alone(request_id, candidates):
    first = place(request_id, NUM_TOKENS, candidates)
    assume(first is not None)
    broken = {(first.prefill, first.decode)}
    second = place(request_id, NUM_TOKENS, candidates, broken)
    if second is not None:
        assert (second.prefill, second.decode) not in broken
    assert place(request_id, NUM_TOKENS, candidates, {("another", first.decode)}) == first
