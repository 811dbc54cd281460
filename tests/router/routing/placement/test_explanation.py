"""Explanations of placements, which change nothing."""

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from baton.client.router_messages import explanation_of
from baton.errors import NotFoundError
from baton.sampling import SamplingParams
from baton_router.apis.grpc.admin_wire import explanation
from baton_router.call.prompt import Prompt
from baton_router.call.request import Request, Work, work_of
from baton_router.cli.explain import print_tables
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.placement.decision import DEFAULT_RULES, Decision, PlacementInputs, Rules
from baton_router.routing.placement.exclusions import Exclusions
from baton_router.routing.placement.explanation import other_choices, why
from baton_router.routing.placement.placement import Scored
from baton_router.routing.placement.placer import Placer

HOLDER = Candidate("holder", "prefill", b"", num_cached_tokens=512)
OTHER = Candidate("other", "prefill", b"")
DECODE = Candidate("decode", "decode", b"")


HANDOFFS = Rules(conditional_disaggregation=False)


def decided(*candidates: Candidate, broken=frozenset(), rules=HANDOFFS) -> Decision:
    inputs = PlacementInputs("r", 1024, candidates, broken)
    return Decision(rules, inputs, rules.decide(inputs))


def test_explanation_names_winner_runner_up_and_deciding_terms():
    said = why(decided(HOLDER, OTHER, DECODE))
    assert said.startswith("holder with decode cost ")
    assert "The only other choice: other with decode, " in said
    assert "uncached +51.2 ms" in said
    assert "congestion +768 ms" in said


def test_explanation_counts_the_choices_that_lost():
    third = OTHER._replace(worker="third", num_queued_tokens=4096)
    assert "Next best of 2 other choices: other with decode, " in why(
        decided(HOLDER, OTHER, third, DECODE)
    )


def test_explanation_says_when_no_other_choice_exists():
    assert why(decided(HOLDER, DECODE)).endswith("No other choice could take it.")
    pair = (OTHER.worker, DECODE.worker)
    assert "No other choice" in why(decided(HOLDER, OTHER, DECODE, broken=frozenset({pair})))


def test_explanation_message_has_encoders_and_the_encode_pool():
    encoder = Candidate("e", "encode", b"", cached_inputs=(0,))
    image = (0, 576, b"i" * 16)
    inputs = PlacementInputs("r", 1024, (OTHER, DECODE, encoder), images=(image,))
    explained = explanation_of(explanation(HANDOFFS.decision(inputs)))
    placement = explained.placement
    ((choice,), (*_, last)) = placement.encoders, placement.candidates
    assert (choice.input, choice.num_tokens, choice.only_cached) == (0, 576, True)
    assert (choice.worker, last.worker, last.role) == ("e", "e", "encode")
    assert set(choice.terms) == {"fetch"}
    assert last.terms == {"queue": 0.0, "encode": 0.0}, "it has the output cached"
    console = Console(file=StringIO(), width=200)
    print_tables(explained, console)
    shown = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert "encode workers" in shown
    assert any(line.startswith(" >  e ") for line in shown)


def test_explanation_says_when_request_id_breaks_tie():
    assert "the request's id breaks the tie" in why(
        decided(OTHER, OTHER._replace(worker="twin"), DECODE)
    )


def test_explanation_says_why_no_worker_can_take_request():
    assert why(decided(HOLDER)) == "no decode worker is known"


def test_explanation_says_when_decode_worker_is_alone():
    near = DECODE._replace(num_cached_tokens=1020)
    said = why(decided(HOLDER, near, rules=DEFAULT_RULES))
    assert said.startswith("decode alone costs ")
    assert "The only other choice: holder with decode, " in said
    far = why(decided(HOLDER, DECODE, rules=DEFAULT_RULES))
    assert far.startswith("holder with decode cost ")
    assert "The only other choice: decode alone, " in far
    assert "stall" in far


def test_explanation_names_workers_without_partner_of_version():
    newer = OTHER._replace(worker="newer", pairing=b"newer", version="1.3")
    said = why(decided(HOLDER, newer, DECODE))
    assert said.startswith("holder with decode cost ")
    assert said.endswith("Without a partner of the same version: newer (1.3).")
    lonely = DECODE._replace(worker="lonely", pairing=b"older", version="1.1")
    assert "newer (1.3), lonely (1.1)" in why(decided(HOLDER, newer, DECODE, lonely))
    assert "version" not in why(decided(HOLDER, newer._replace(excluded="draining"), DECODE))


def test_explanation_names_workers_without_partner_of_dtype():
    holder, decode = (one._replace(kv_dtype="float32") for one in (HOLDER, DECODE))
    narrow = OTHER._replace(worker="narrow", pairing=b"narrow", kv_dtype="bfloat16")
    said = why(decided(holder, narrow, decode))
    assert "Without a partner of the same KV dtype: narrow (bfloat16); start all with" in said
    assert "dtype" not in why(decided(holder, narrow._replace(kv_dtype=""), decode))


def test_explanation_blames_version_gap_for_lone_decode_worker():
    newer = OTHER._replace(worker="newer", pairing=b"newer", version="1.3")
    said = why(decided(newer, DECODE._replace(version="1.2")))
    assert said.startswith("decode alone costs ")
    assert "Prefill workers are of version 1.3, decode workers of 1.2" in said
    assert "until the upgrade is finished" in said


def test_explanation_omits_seconds_for_policies_without_them():
    said = why(decided(HOLDER, OTHER, DECODE, rules=Rules("prefix-only")))
    assert "uncached +512" in said
    assert "ms" not in said


def all_choices(decision: Decision) -> list[tuple[Scored, ...]]:
    """Every choice of workers that could run the request."""
    placement, inputs = decision.placement, decision.inputs
    assert placement is not None
    ready = [s for s in placement.scored if not s.candidate.excluded]
    prefills, decodes = ([s for s in ready if s.candidate.role == r] for r in ("prefill", "decode"))
    singles = [(s,) for s in placement.alone if not s.candidate.excluded]
    if inputs.prefill_alone:
        return [(prefill,) for prefill in prefills] + singles
    pairs = [
        (prefill, decode)
        for prefill in prefills
        for decode in decodes
        if prefill.candidate.pairing == decode.candidate.pairing
        and (prefill.candidate.worker, decode.candidate.worker) not in inputs.broken
    ]
    return pairs + singles


workers = st.builds(
    lambda **fields: Candidate(**fields),  # by itself it would draw other fields, too
    worker=st.just(""),
    role=st.sampled_from(["prefill", "decode"]),
    pairing=st.sampled_from([b"", b"newer"]),
    num_cached_tokens=st.integers(0, 1024),
    num_queued_tokens=st.integers(0, 3),
    num_sequences=st.integers(0, 3),
    excluded=st.sampled_from(["", "", "", "draining"]),
)


@given(
    st.lists(workers, max_size=8),
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=8),
    st.sampled_from([HANDOFFS, DEFAULT_RULES]),
    st.booleans(),
)
def test_explanation_knows_cheapest_other_choice(cluster, broken, rules, prefill_alone):
    named = tuple(one._replace(worker=f"w{at}") for at, one in enumerate(cluster))
    pairs = frozenset((f"w{a}", f"w{b}") for a, b in broken)
    inputs = PlacementInputs("r", 1024, named, pairs, prefill_alone=prefill_alone)
    decision = Decision(rules, inputs, rules.decide(inputs))
    if decision.placement is None:
        return
    found = all_choices(decision)
    assert decision.placement.chosen in found
    others = [choice for choice in found if choice != decision.placement.chosen]
    num_others, second = other_choices(decision.placement, inputs)
    assert num_others == len(others)
    assert (second is None) == (not others)
    if second is not None:
        assert second in others
        least = min(sum(s.cost for s in choice) for choice in others)
        assert sum(s.cost for s in second) == least
        assert sum(s.cost for s in decision.placement.chosen) <= least


class Cluster:
    """Two workers, as a placer sees them."""

    def __init__(self) -> None:
        self.workers = [HOLDER, DECODE]

    def candidates(self, prompt: Prompt) -> list[Candidate]:
        return list(self.workers)


def work(request_id: str) -> Work:
    return work_of(Request(request_id, tuple(range(64)), SamplingParams()))


def test_placer_explains_next_placement_and_remembers_nothing():
    placer = Placer(Cluster())  # type: ignore[arg-type]
    dry = placer.explain(work("r"))
    with pytest.raises(NotFoundError, match="'r'"):
        placer.decision_of("r")
    assert placer.place(work("r")) == dry
    assert placer.decision_of("r") == dry


def test_placer_remembers_bounded_number_of_placements():
    placer = Placer(Cluster())  # type: ignore[arg-type]
    for i in range(200):
        placer.place(work(f"r{i}"))
    placer.decision_of("r199")
    placer.decision_of("r72")
    with pytest.raises(NotFoundError):
        placer.decision_of("r71")


def test_placer_keeps_earlier_decision_until_the_cluster_changes():
    cluster = Cluster()
    placer = Placer(cluster)  # type: ignore[arg-type]
    admitted_by = placer.explain(work("r"))
    assert placer.place(work("r"), earlier=admitted_by) is admitted_by
    assert placer.decision_of("r") is admitted_by
    assert placer.place(work("another"), earlier=admitted_by).inputs.request_id == "another"
    without = placer.place(work("r"), Exclusions(refused={"holder"}), admitted_by)
    assert [c.excluded for c in without.inputs.candidates] == ["refused the request", ""]
    neither = placer.place(work("r"), Exclusions(refused={"holder", "decode"}))
    assert (
        neither.why_none == why(neither) == ("no decode worker can take work: refused the request")
    )
    cluster.workers[0] = HOLDER._replace(num_queued_tokens=1)
    decision = placer.place(work("r"), earlier=admitted_by)
    assert decision.inputs.candidates[0].num_queued_tokens == 1
