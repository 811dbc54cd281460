"""Placement policies: common properties, and the purpose of each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.placement.placement import place
from baton_router.routing.placement.policy import POLICY_NAMES, policy_named
from tests.support.strategies import candidates, clusters, request_ids

NUM_TOKENS = 1024

names = st.sampled_from(POLICY_NAMES)
cluster = clusters(NUM_TOKENS)
# A pair that may always be chosen, so that some pair may.
SURE = (Candidate("prefill-sure", "prefill", b"a"), Candidate("decode-sure", "decode", b"a"))
with_a_pair = cluster.map(lambda drawn: [*drawn, *SURE])


@given(names, request_ids, cluster, st.data())
def test_policies_choose_only_live_and_paired_workers(name, request_id, cluster, data):
    pairs = {(p.worker, d.worker) for p in cluster for d in cluster if may_pair(p, d)}
    broken = data.draw(st.sets(st.sampled_from(sorted(pairs)))) if pairs else set()
    placement = place(request_id, NUM_TOKENS, cluster, broken, policy_named(name))
    assert (placement is None) == (pairs <= broken)
    if placement is not None:
        assert (placement.prefill, placement.decode) in pairs - broken
        (chosen,) = (c for c in cluster if c.worker == placement.prefill)
        assert placement.num_cached_tokens == chosen.num_cached_tokens


@given(names, request_ids, cluster, st.randoms())
def test_policies_depend_only_on_snapshot(name, request_id, cluster, shuffled):
    other = [c._replace() for c in cluster]
    shuffled.shuffle(other)
    policy = policy_named(name)
    first, second = (place(request_id, NUM_TOKENS, c, (), policy) for c in (cluster, other))
    assert first == second


@given(names, candidates("prefill") | candidates("decode"), st.integers(0, NUM_TOKENS))
def test_policy_cost_never_grows_with_cached_prefix(name, one, num_tokens):
    policy = policy_named(name)
    more = one._replace(num_cached_tokens=one.num_cached_tokens + 16)
    before, after = policy(one, num_tokens), policy(more, num_tokens)
    assert all(after[term] <= before[term] for term in before)


@given(names, request_ids, with_a_pair, st.data())
def test_placement_chooses_cheapest_pair_not_broken(name, request_id, cluster, data):
    pairs = [(p.worker, d.worker) for p in cluster for d in cluster if may_pair(p, d)]
    broken = data.draw(st.sets(st.sampled_from(pairs))) - {tuple(c.worker for c in SURE)}
    placement = place(request_id, NUM_TOKENS, cluster, broken, policy_named(name))
    assert placement is not None
    cost = {s.candidate.worker: s.cost for s in placement.scored}
    chosen = cost[placement.prefill] + cost[placement.decode]
    assert chosen == min(cost[p] + cost[d] for p, d in pairs if (p, d) not in broken)


@given(names, request_ids, with_a_pair)
def test_placement_scores_every_candidate_with_all_terms(name, request_id, cluster):
    placement = place(request_id, NUM_TOKENS, cluster, (), policy_named(name))
    assert placement is not None
    assert {s.candidate for s in placement.scored} == set(cluster)
    is_excluded = [bool(s.candidate.excluded) for s in placement.scored]
    assert is_excluded == sorted(is_excluded)
    for scored in placement.scored:
        assert scored.terms
        assert scored.cost == sum(scored.terms.values())


def may_pair(p: Candidate, d: Candidate) -> bool:
    roles = (p.role, d.role)
    return roles == ("prefill", "decode") and p.pairing == d.pairing and not p.excluded + d.excluded


def prefills(*candidates: Candidate) -> list[Candidate]:
    return [*candidates, Candidate("decode-0", "decode", b"")]


def chosen_by(name: str, *candidates: Candidate) -> str:
    placement = place("request", NUM_TOKENS, prefills(*candidates), (), policy_named(name))
    assert placement is not None
    return placement.prefill


HOLDER = Candidate("holder", "prefill", b"", num_cached_tokens=NUM_TOKENS // 2, last_turn=9)
OTHER = Candidate("other", "prefill", b"", last_turn=8)


@pytest.mark.parametrize(
    ("num_queued_tokens", "expected"),
    [
        (NUM_TOKENS // 4, {"baton": "holder", "prefix-only": "holder"}),
        (NUM_TOKENS * 16, {"baton": "other", "prefix-only": "holder"}),
    ],
)
def test_baton_policy_leaves_prefix_holder_when_its_queue_grows(num_queued_tokens, expected):
    busy = HOLDER._replace(num_queued_tokens=num_queued_tokens)
    chosen = {name: chosen_by(name, busy, OTHER) for name in POLICY_NAMES}
    assert chosen == {**expected, "least-loaded": "other", "round-robin": "other"}


def test_baton_policy_prefers_least_recently_loaded_equal():
    used = OTHER._replace(worker="used", num_recent_tokens=1000.0)
    assert chosen_by("baton", used, OTHER) == "other"


def test_round_robin_cycles_through_workers():
    turns = dict.fromkeys(("a", "b", "c"), 0)
    order = []
    for turn in range(1, 10):
        candidates = [Candidate(w, "prefill", b"", last_turn=last) for w, last in turns.items()]
        order.append(chosen_by("round-robin", *candidates))
        turns[order[-1]] = turn
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert order[:3] * 3 == order
