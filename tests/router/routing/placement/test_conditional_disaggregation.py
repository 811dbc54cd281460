"""Conditional disaggregation: decode workers that compute a prompt themselves."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InternalError, UnavailableError
from baton.v1 import decode_pb2, inference_pb2, prefill_pb2
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.placement.cost_model import CostModel
from baton_router.routing.placement.decision import DEFAULT_RULES, PlacementInputs, Rules
from baton_router.routing.placement.policy import POLICY_NAMES
from tests.support.router.scripted import (
    ADMITTED,
    READY,
    Cue,
    Forever,
    Scripts,
    decode,
    finished,
    first,
    fleet_of,
    letter_ids,
    lifecycle_of,
    messages_of,
    prefill,
    run,
    run_on,
    seen_of,
    tokens,
)
from tests.support.strategies import candidates, clusters

NUM_TOKENS = 1024
PREFILL = Candidate("p", "prefill", b"")
DECODE = Candidate("d", "decode", b"")


def decided(*candidates: Candidate, needs_prefill: bool = False, rules: Rules = DEFAULT_RULES):
    inputs = PlacementInputs("r", NUM_TOKENS, candidates, needs_prefill=needs_prefill)
    return rules.decide(inputs)


def chosen(*candidates: Candidate, **how: object) -> tuple[str, str]:
    placement = decided(*candidates, **how)
    assert placement is not None
    return placement.prefill, placement.decode


def holding(candidate: Candidate, num_missing: int, **fields: object) -> Candidate:
    return candidate._replace(num_cached_tokens=NUM_TOKENS - num_missing, **fields)


def test_decode_worker_computes_prompt_shorter_than_handoff():
    short, long = (tuple(holding(c, n) for c in (PREFILL, DECODE)) for n in (16, 200))
    assert chosen(*short) == ("", "d")
    assert chosen(*long) == ("p", "d")
    placement = decided(*short)
    assert placement.num_cached_tokens == NUM_TOKENS - 16
    (single,) = placement.chosen
    assert single.cost == sum(single.terms.values()) == single.terms["congestion"] * 17 / 15


def test_busy_decode_worker_computes_no_prompt():
    cluster = holding(PREFILL, 16), holding(DECODE, 16, num_sequences=20)
    assert chosen(*cluster) == ("p", "d")
    queued = holding(PREFILL, 16), holding(DECODE, 16, num_queued_tokens=500)
    assert chosen(*queued) == ("p", "d")


def test_disaggregation_threshold_follows_learned_rates():
    cluster = holding(PREFILL, 200), holding(DECODE, 200)
    fast, slow = Rates(handoff_seconds=0.1), Rates(0.0, 1e-2)
    assert chosen(*(c._replace(rates=fast) for c in cluster)) == ("", "d")
    cluster = holding(PREFILL, 16), holding(DECODE, 16)
    assert chosen(*(c._replace(rates=slow) for c in cluster)) == ("p", "d")


def test_noise_between_pools_moves_no_prompt_to_decode_worker():
    noisy = DECODE._replace(rates=Rates(0.0, 1.4e-3), num_sequences=4)
    assert chosen(PREFILL._replace(rates=Rates(0.0, 1.9e-3)), noisy) == ("p", "d")


def test_disaggregation_weighs_cached_prefix_of_both_roles():
    assert chosen(PREFILL, holding(DECODE, 100)) == ("", "d")
    assert chosen(holding(PREFILL, 100), DECODE) == ("p", "d")


def test_decode_worker_computes_prompt_without_prefill_worker():
    assert chosen(DECODE) == ("", "d")
    assert chosen(PREFILL._replace(excluded="not answering"), DECODE) == ("", "d")
    assert chosen(PREFILL._replace(pairing=b"another"), DECODE) == ("", "d")


def test_conditional_disaggregation_can_be_disabled():
    near = holding(DECODE, 1)
    assert chosen(PREFILL, near, rules=Rules(conditional_disaggregation=False)) == ("p", "d")
    assert chosen(PREFILL, near, needs_prefill=True) == ("p", "d")


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("needed", [{}, {"needs_prefill": True}, {"prefill_alone": True}])
def test_decode_worker_serves_all_requests_among_its_like(name, needed):
    """Whatever the policy, and what requests need of prefill workers, where there are any."""
    inputs = PlacementInputs("r", NUM_TOKENS, (DECODE, DECODE._replace(worker="e")), **needed)
    placement = Rules(name).decide(inputs)
    assert placement is not None
    assert (placement.prefill, placement.decode in "de") == ("", True)
    assert Rules(name, conditional_disaggregation=False).decide(inputs) is None
    away = replace(inputs, candidates=(PREFILL._replace(excluded="draining"), DECODE))
    assert (Rules(name).decide(away) is None) == (bool(needed) or name != "baton")
    draining = replace(inputs, candidates=(DECODE._replace(excluded="draining"),))
    assert Rules(name).decision(draining).why_none == "no decode worker can take work: draining"


NEWER = {"pairing": b"newer", "version": "1.3"}


@pytest.mark.parametrize("rules", [Rules(p, c) for p in POLICY_NAMES for c in (True, False)])
def test_decode_worker_computes_prompt_during_version_gap(rules):
    newer = PREFILL._replace(worker="new", **NEWER)
    old = PREFILL._replace(excluded="draining")
    assert chosen(newer, DECODE, rules=rules) == ("", "d")
    assert chosen(newer, old, DECODE, rules=rules) == ("", "d")
    decided_for_prefill = decided(newer, DECODE, needs_prefill=True, rules=rules)
    assert decided_for_prefill is None


def test_disaggregation_resumes_once_two_workers_share_version():
    rules = Rules(conditional_disaggregation=False)
    newer = [c._replace(worker=f"{c.worker}-new", **NEWER) for c in (PREFILL, DECODE)]
    assert chosen(newer[0], DECODE, newer[1], rules=rules) == ("p-new", "d-new")
    assert chosen(PREFILL, DECODE, newer[1], rules=rules) == ("p", "d")
    unlike = PREFILL._replace(pairing=b"another")  # model of the same version: no upgrade
    assert decided(unlike, DECODE, rules=rules) is None


def test_lone_placements_are_stable_when_decode_worker_leaves():
    workers = [DECODE._replace(worker=f"d{i}") for i in range(4)]
    names = [f"request-{i}" for i in range(64)]
    before, after = (
        [DEFAULT_RULES.decide(PlacementInputs(n, NUM_TOKENS, tuple(these))).decode for n in names]
        for these in (workers, workers[:3])
    )
    assert set(before) == {"d0", "d1", "d2", "d3"}
    assert all(now == was for was, now in zip(before, after, strict=True) if was != "d3")


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name != "baton"])
def test_baseline_policies_always_disaggregate(name):
    assert chosen(PREFILL, holding(DECODE, 1), rules=Rules(name)) == ("p", "d")


@given(clusters(NUM_TOKENS), st.randoms(), st.booleans())
def test_placement_uses_only_available_workers_in_any_order(cluster, shuffled, needs):
    placement = decided(*cluster, needs_prefill=needs)
    other = list(cluster)
    shuffled.shuffle(other)
    assert decided(*other, needs_prefill=needs) == placement
    usable = {c.worker: c for c in cluster if not c.excluded}
    are_alike = {c.role for c in cluster} - {"encode"} == {"decode"}
    if placement is None:
        assert (needs and not are_alike) or not any(c.role == "decode" for c in usable.values())
        return
    workers = [usable[w] for w in (placement.prefill, placement.decode) if w]
    assert len({w.pairing for w in workers}) == 1
    assert [w.role for w in workers] == ["prefill", "decode"][-len(workers) :]
    assert are_alike or not (needs and len(workers) == 1)


@given(clusters(NUM_TOKENS))
def test_decode_worker_is_alone_only_when_cheaper_than_pair(cluster):
    placement = decided(*cluster)
    pair = decided(*cluster, rules=Rules(conditional_disaggregation=False))
    if placement is None:
        return
    cost = sum(s.cost for s in placement.chosen)
    if pair is not None:
        of_pair = sum(s.cost for s in pair.chosen)
        assert cost < of_pair if not placement.prefill else cost == of_pair
    ready = [s.cost for s in placement.alone if not s.candidate.excluded]
    assert cost <= min(ready)


@given(candidates("decode", NUM_TOKENS), st.integers(0, NUM_TOKENS))
def test_cost_alone_never_grows_with_cached_prefix(one, num_tokens):
    more = one._replace(num_cached_tokens=one.num_cached_tokens + 16)
    before, after = (CostModel().alone_terms(c, num_tokens) for c in (one, more))
    assert all(after[term] <= before[term] for term in before)


def started(num_cached: int = 2) -> decode_pb2.DecodeGenerateResponse:
    message = prefill_pb2.PrefillStarted(num_cached_tokens=num_cached)
    message.queue_time.FromMilliseconds(5)
    return decode_pb2.DecodeGenerateResponse(prefill_started=message)


ALL = [tokens(0, 0), tokens(1, 1, 2, 3, 4), finished()]


async def test_lone_decode_worker_answers_from_first_token():
    only = decode(started(), *ALL)
    seen = await run_on(only, rules=DEFAULT_RULES)
    assert seen.token_ids == letter_ids()
    assert seen.accepted.placement.prefill_worker == ""
    assert seen.accepted.placement.decode_worker == "d0"
    (chosen_one,) = seen.accepted.placement.candidates
    assert chosen_one.computes_prompt
    (request,) = only.requests
    assert not request.HasField("handle")
    usage, timings = seen.finished.usage, seen.finished.timings
    assert (usage.num_cached_prompt_tokens, usage.num_transferred_blocks) == (2, 0)
    assert timings.prefill_queue.ToMilliseconds() == 5
    assert not timings.HasField("exposed_transfer")


async def test_lone_decode_worker_is_replaced_without_repeats():
    dying = decode(started(), tokens(0, 0), tokens(1, 1), InternalError("it broke"), name="d0")
    other = decode(started(), tokens(2, 2, 3, 4), finished(), name="d1")
    seen = await run_on(dying, other, rules=DEFAULT_RULES)
    assert seen.token_ids == letter_ids()
    assert seen.finished.usage.num_migrations == 1
    (request,) = other.requests
    assert list(request.token_ids) == [5, 6, 7, *letter_ids()[:2]]


async def test_lone_decode_worker_that_breaks_is_not_called_again():
    breaking = decode(started(), tokens(0, 0), UnavailableError("gone"), name="d0")
    other = decode(started(), tokens(1, 1, 2, 3, 4), finished(), name="d1")
    assert (await run_on(breaking, other, rules=DEFAULT_RULES)).token_ids == letter_ids()
    assert [len(one.requests) for one in (breaking, other)] == [1, 1]


async def test_only_decode_worker_that_breaks_is_called_again():
    only = decode()
    breaks = [ADMITTED, started(), tokens(0, 0), UnavailableError("gone")]
    only.script = Scripts([breaks, [ADMITTED, started(), tokens(1, 1, 2, 3, 4), finished()]])
    assert (await run_on(only, rules=DEFAULT_RULES)).token_ids == letter_ids()


async def test_lifecycle_falls_back_from_pair_to_lone_decode_worker():
    """Workers are preferred in their order, so the pair is asked where it is the cheaper one."""
    refusing = prefill(name="p0")
    refusing.script = [UnavailableError("draining")]
    both = decode(name="d0")
    both.script = Scripts([[ADMITTED, Forever()], [ADMITTED, started(), *ALL]])
    async with fleet_of(refusing, both) as fleet:
        fleet.candidates = lambda *_: [  # type: ignore[method-assign]
            PREFILL._replace(worker="p0"),
            DECODE._replace(worker="d0", num_queued_tokens=10**6),
        ]
        seen = await run(fleet, rules=DEFAULT_RULES)
    assert seen.token_ids == letter_ids()
    assert [r.HasField("handle") for r in both.requests] == [True, False]


async def test_prompt_counts_as_decode_load_until_first_token():
    cue = Cue()
    only = decode(started(), cue, *ALL)
    async with fleet_of(only) as fleet:
        lifecycle = lifecycle_of(fleet, rules=DEFAULT_RULES)
        running = messages_of(lifecycle)
        await anext(running)
        assert (only.load, only.num_queued) == (1, 3)
        cue.event.set()
        queued = [only.num_queued async for event in running if event.HasField("tokens")]
        assert queued[-1] == 0
    assert (only.load, only.num_queued) == (0, 0)


async def test_prompt_logprobs_always_use_prefill_worker():
    source = prefill(first())
    other = decode(READY, *ALL)
    async with fleet_of(source, other) as fleet:
        seen = await seen_of(lifecycle_of(fleet, rules=DEFAULT_RULES, prompt_logprobs=0))
    assert seen.accepted.placement.prefill_worker == "p0"
    assert other.requests[0].HasField("handle")


def scored(position: int, *logprobs: float) -> decode_pb2.DecodeGenerateResponse:
    scores = inference_pb2.PromptLogprobs(position=position, logprobs=logprobs)
    return decode_pb2.DecodeGenerateResponse(prompt_logprobs=scores)


SCORES = scored(1, -1.0), scored(2, -2.0)


@pytest.mark.parametrize(("num_scores", "num_tokens"), [(1, 0), (2, 0), (2, 1)])
async def test_lone_decode_worker_scores_prompt(num_scores, num_tokens):
    """A worker that is lost amid the scores, or after them, is replaced without repeats."""
    said = *SCORES[:num_scores], *[tokens(0, 0)][:num_tokens]
    lost = decode(started(0), *said, InternalError("it broke"), name="d0")
    rest = [tokens(num_tokens, *range(num_tokens, 5)), finished()]
    scores = SCORES if num_scores < 2 else ()
    other = decode(started(0), *scores, *rest, name="d1")
    async with fleet_of(lost, other) as fleet:
        lifecycle = lifecycle_of(fleet, rules=DEFAULT_RULES, prompt_logprobs=0)
        events = [event async for event in messages_of(lifecycle)]
    shown = [e.prompt_logprobs for e in events if e.HasField("prompt_logprobs")]
    assert [(s.position, list(s.logprobs)) for s in shown] == [(1, [-1.0]), (2, [-2.0])]
    assert [i for e in events for i in e.tokens.token_ids] == letter_ids()
    asked = [one.requests[0].sampling.HasField("prompt_logprobs") for one in (lost, other)]
    assert asked == [True, num_scores < 2]


async def test_lone_decode_worker_scores_prompt_of_one_token():
    async with fleet_of(decode(started(0), *ALL)) as fleet:
        one = lifecycle_of(fleet, rules=DEFAULT_RULES, prompt=(5,), prompt_logprobs=0)
        assert (await seen_of(one)).token_ids == letter_ids()
