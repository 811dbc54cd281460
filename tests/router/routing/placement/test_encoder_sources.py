"""Choice of the source of each encoder output, and its part in the costs of a placement."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.support.router
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.placement.cost_model import CostModel
from baton_router.routing.placement.decision import DEFAULT_RULES, Decision, PlacementInputs, Rules
from baton_router.routing.placement.encoder_sources import EncoderChoice, EncoderSources
from baton_router.routing.placement.explanation import encode_pool, why
from baton_router.routing.placement.placement import place_again, why_none
from baton_router.routing.placement.policy import POLICY_NAMES
from baton_router.routing.placement.prefix_source import with_sources
from baton_router.routing.placement.record.replay import read_record, replay
from tests.support.strategies import clusters_with_images, images, rates, request_ids

RATES = Rates(prefill_seconds_per_token=1e-4, encoder_seconds_per_token=1e-3)
LONG, SHORT = (100, 676, b"long".ljust(16)), (700, 704, b"short".ljust(16))
NUM_TOKENS = 1024
HANDOFFS = Rules(conditional_disaggregation=False)

P0, P1 = (Candidate(name, "prefill", b"", rates=RATES) for name in ("p0", "p1"))
D = Candidate("d", "decode", b"", rates=RATES)
E0, E1 = (Candidate(name, "encode", b"", rates=RATES) for name in ("e0", "e1"))


def decided(*candidates: Candidate, inputs=(LONG,), rules: Rules = HANDOFFS) -> Decision:
    asked = PlacementInputs("r", NUM_TOKENS, candidates, images=inputs)
    return Decision(rules, asked, rules.decide(asked))


def chosen(*candidates: Candidate, inputs=(LONG,)) -> tuple[EncoderChoice, ...]:
    placement = decided(*candidates, inputs=inputs).placement
    assert placement is not None
    return placement.encoders


def sources(*candidates: Candidate, inputs=(LONG,)) -> list[tuple[int, str, bool]]:
    return [(c.input, c.worker, c.only_cached) for c in chosen(*candidates, inputs=inputs)]


def test_output_cached_on_computing_worker_needs_no_source():
    assert sources(P0._replace(cached_inputs=(0,)), D, E0) == []


def test_output_of_cached_prefix_needs_no_source():
    inputs = (LONG, SHORT)
    assert sources(P0._replace(num_cached_tokens=676), D, E0, inputs=inputs) == [(1, "e0", False)]
    assert sources(P0._replace(num_cached_tokens=704), D, E0, inputs=inputs) == []


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
def test_output_is_fetched_from_any_role_that_has_it(role):
    # Behind so long a queue that it does not compute the prompt itself.
    holder = Candidate("h", role, b"", rates=RATES, num_queued_tokens=10**6, cached_inputs=(0,))
    assert sources(P0, D, E0, holder) == [(0, "h", True)]


def test_output_is_fetched_from_least_busy_holder():
    one, other = (d._replace(cached_inputs=(0,)) for d in (E0, E1))
    assert sources(P0, D, one._replace(num_queued_encoder_tokens=9), other) == [(0, "e1", True)]


@pytest.mark.parametrize("change", [{"excluded": "draining"}, {"pairing": b"other"}])
def test_no_output_comes_from_excluded_or_unpaired_worker(change):
    for cached in ((), (0,)):
        assert sources(P0, D, E0._replace(cached_inputs=cached, **change)) == [(0, "", False)]


def test_encode_pool_encodes_what_takes_longer_than_the_call():
    """The call takes 5 ms, which no text before the image hides. A token takes 1 ms, which costs
    four more on a prefill worker."""
    for num_tokens, source in ((1, ""), (2, "e0")):
        assert sources(P0, D, E0, inputs=((0, num_tokens, b"i" * 16),)) == [(0, source, False)]


def test_prefill_worker_encodes_itself_when_the_pool_is_busy():
    busy = E0._replace(num_queued_encoder_tokens=5000)
    assert sources(P0, D, busy) == [(0, "", False)]
    # Not if its own queue takes as long.
    assert sources(P0._replace(num_queued_tokens=50_000), D, busy) == [(0, "e0", False)]


def test_prefill_worker_encodes_itself_without_an_encode_pool():
    (choice,) = chosen(P0, D)
    assert (choice.worker, choice.terms) == ("", pytest.approx({"encode": 0.576}))


def test_output_queued_for_another_request_is_not_encoded_twice():
    # Though another worker is idle.
    busy = E0._replace(num_queued_encoder_tokens=576, pending_inputs=(0,))
    (choice,) = chosen(P0, D, busy, E1)
    assert (choice.worker, choice.only_cached) == ("e0", False)
    assert set(choice.terms) == {"queue", "fetch"}
    assert decided(P0, D, busy, E1).placement.chosen[0].terms["congestion"] == pytest.approx(
        decided(P0, D, inputs=()).placement.chosen[0].terms["congestion"]
    )
    # A prefill worker that will have it is no source of it, but needs none itself.
    assert sources(P0, P1._replace(pending_inputs=(0,), num_queued_tokens=10**6), D, E1) == [
        (0, "e1", False)
    ]
    assert sources(P0._replace(pending_inputs=(0,)), D, E1) == []


def test_images_of_a_request_spread_over_the_encode_pool():
    inputs = tuple((i * 100, i * 100 + 100, bytes([i]) * 16) for i in range(6))
    workers = [choice.worker for choice in chosen(P0, D, E0, E1, inputs=inputs)]
    assert sorted(workers) == ["e0"] * 3 + ["e1"] * 3


def test_equal_images_are_encoded_once():
    assert len(sources(P0, D, E0, inputs=(LONG, (700, 1000, LONG[2])))) == 1


def test_encode_term_is_what_the_queue_and_text_do_not_hide():
    def term(**fields: int) -> float:
        placement = decided(P0._replace(**fields), D, E0).placement
        return placement.chosen[0].terms["encode"]

    fetched = 0.576 + 5e-3 + 576 * RATES.transfer_seconds_per_token
    assert term() == pytest.approx(fetched - 100 * 1e-4)
    assert term(num_cached_tokens=96) == pytest.approx(fetched - 4 * 1e-4)
    assert term(num_queued_tokens=2000) == pytest.approx(fetched - 0.01 - 0.2)
    assert term(num_queued_tokens=50_000) == 0.0


def test_only_the_longest_wait_for_outputs_counts():
    inputs = ((0, 100, b"i" * 16), (100, 200, b"j" * 16))
    placement = decided(P0, D, E0, E1, inputs=inputs).placement
    (one, other) = (sum(choice.terms.values()) for choice in placement.encoders)
    assert placement.chosen[0].terms["encode"] == max(one, other - 100 * 1e-4)


def test_queued_images_delay_a_prompt_as_its_queue_does():
    one = decided(P0._replace(num_queued_encoder_tokens=100), D, inputs=()).placement
    assert one.chosen[0].terms["queue"] == pytest.approx(0.1)


def test_placement_prefers_worker_with_the_output_cached():
    """Also over one whose queue is a little shorter."""
    held = P1._replace(cached_inputs=(0,), num_queued_tokens=30)
    placement = decided(P0, held, D, inputs=((0, 576, LONG[2]),)).placement
    assert (placement.prefill, placement.encoders) == ("p1", ())


def test_prefix_is_fetched_where_it_saves_encoding():
    """Few tokens, which would not be worth it without the image."""
    rates = replace(RATES, prefill_seconds_per_token=1e-6)
    holder = P1._replace(num_cached_tokens=96, num_queued_tokens=10**6, rates=rates)
    cluster = with_sources([P0._replace(rates=rates), holder, D])
    image = (8, 90, b"i" * 16)
    with_image = decided(*cluster, inputs=(image,)).placement
    assert (with_image.source, with_image.encoders) == ("p1", ())
    assert decided(*cluster, inputs=()).placement.source == ""


def test_decode_worker_alone_uses_the_encode_pool_too():
    placement = decided(D, E0, rules=Rules(no_handoff=True)).placement
    assert placement.prefill == ""
    assert [choice.worker for choice in placement.encoders] == ["e0"]


def test_encode_workers_are_never_placed_on_nor_needed():
    assert decided(E0, E1).placement is None
    assert why_none([E0]) == "no prefill worker is known"
    assert why_none([P0, D, E0._replace(excluded="draining")]) == why_none([P0, D])
    assert place_again("r", NUM_TOKENS, [D, E0], "d") is None


def test_explanation_names_encoder_sources_and_the_pool():
    holder = D._replace(worker="h", cached_inputs=(1,), num_queued_tokens=1)
    decision = decided(P0, holder, E0, E1._replace(excluded="draining"), inputs=(LONG, SHORT))
    assert why(decision).endswith("Images: 1 from e0, 2 from h (cached).")
    pool = {one.candidate.worker: one.terms for one in encode_pool(decision)}
    assert pool == {worker: {"queue": 0.0, "encode": pytest.approx(0.576)} for worker in pool}
    assert list(pool) == ["e0", "e1"]


rules = st.builds(Rules, policy=st.sampled_from(POLICY_NAMES))
cluster = clusters_with_images(NUM_TOKENS)


@given(rules, request_ids, cluster, images(NUM_TOKENS), st.randoms())
def test_encoder_sources_are_ready_and_depend_on_snapshot_alone(
    used, request_id, drawn, inputs, shuffled
):
    asked = PlacementInputs(request_id, NUM_TOKENS, tuple(with_sources(drawn)), images=inputs)
    placement = used.decide(asked)
    if placement is None:
        return
    computing, known = placement.chosen[0].candidate, {c.worker: c for c in drawn}
    assert {"encode"} - {c.candidate.role for c in placement.chosen} == {"encode"}
    needed = {content for _, end, content in inputs if end > placement.num_cached_tokens}
    assert {inputs[choice.input][2] for choice in placement.encoders} <= needed
    for choice in placement.encoders:
        assert choice.input not in (*computing.cached_inputs, *computing.pending_inputs)
        if choice.worker:
            source = known[choice.worker]
            assert source.worker != computing.worker
            assert (source.pairing, source.excluded) == (computing.pairing, "")
            assert choice.only_cached == (choice.input in source.cached_inputs)
            assert choice.only_cached or source.role == "encode"
    other = list(asked.candidates)
    shuffled.shuffle(other)
    assert used.decide(replace(asked, candidates=tuple(other))) == placement


@given(request_ids, cluster, images(NUM_TOKENS))
def test_text_placement_is_same_with_images_cached_and_queued(request_id, drawn, inputs):
    """Images change no other decision."""
    drawn = [c._replace(num_queued_encoder_tokens=0) for c in drawn]
    asked = PlacementInputs(request_id, NUM_TOKENS, tuple(drawn))
    without = [c._replace(cached_inputs=(), pending_inputs=()) for c in drawn if c.role != "encode"]
    one, other = (
        DEFAULT_RULES.decide(asked),
        DEFAULT_RULES.decide(replace(asked, candidates=tuple(without))),
    )
    assert (one is None) == (other is None)
    if one is not None and other is not None:
        assert (one.prefill, one.decode, one.encoders) == (other.prefill, other.decode, ())
        assert [s.terms for s in one.scored] == [s.terms for s in other.scored]


@given(cluster, images(NUM_TOKENS), rates, st.integers(0, 3))
def test_cost_never_grows_with_cached_prefix_or_output(drawn, inputs, pool, index):
    # The encode pool is of one speed: a list schedule of machines of several has anomalies.
    drawn = [c._replace(rates=pool) if c.role == "encode" else c for c in drawn]
    for one in drawn:
        if one.role == "encode":
            continue
        more_prefix = one._replace(num_cached_tokens=one.num_cached_tokens + 16)
        more_outputs = one._replace(cached_inputs=(*one.cached_inputs, index))
        for more in (more_prefix, more_outputs):
            after = [more if c is one else c for c in drawn]
            assert cost(more, after, inputs) <= cost(one, drawn, inputs) * (1 + 1e-9)


def cost(one: Candidate, everyone: list[Candidate], inputs) -> float:
    model = CostModel()
    encoders = EncoderSources(inputs, everyone, model, model.fetch_seconds, model.encoding)
    terms = model.alone_terms if one.role == "decode" else model.terms
    return sum(terms(one, NUM_TOKENS, encoders=encoders).values())


RECORD = Path(tests.support.router.__file__).with_name("text_placements.jsonl")


def test_record_from_before_images_replays_with_equal_costs():
    """Written by a router that knew nothing of images, with the cost of every worker."""
    costs = [json.loads(line) for line in RECORD.read_text().splitlines()[1:]]
    redecided = list(replay(read_record(RECORD)))
    assert len(redecided) == len(costs) == 24
    for one, before in zip(redecided, costs, strict=True):
        assert one.is_same
        placement = one.decision.placement
        assert placement is not None
        assert {s.candidate.worker: s.cost for s in placement.scored} == before["costs"]
        assert {s.candidate.worker: s.cost for s in placement.alone} == before["alone"]
