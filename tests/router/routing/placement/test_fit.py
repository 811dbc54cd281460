"""Fit of requests on workers of unlike sizes: placement, its reasons, refusals with numbers."""

from types import SimpleNamespace

import pytest

from baton.errors import EngineLimitError, UnavailableError
from baton.sampling import SamplingParams
from baton_router.call.request import Demand, Request, work_of
from baton_router.routing.fleet.candidate import Candidate, WorkerLimits
from baton_router.routing.placement.decision import Decision, PlacementInputs, Rules
from baton_router.routing.placement.exclusions import Exclusions
from baton_router.routing.placement.explanation import candidacies, why
from baton_router.routing.placement.fit import TOO_SMALL
from baton_router.routing.placement.placer import Placer

BLOCK = 16
RULES = Rules(conditional_disaggregation=False)


def worker(name: str, num_blocks: int, max_num_seqs: int | None = 16) -> Candidate:
    """A worker; those of large pools are busy, so that the others cost less."""
    role = "prefill" if name.startswith("p") else "decode"
    limits = WorkerLimits(2048, BLOCK, num_blocks, max_num_seqs)
    queue = {"num_queued_tokens": 50 * num_blocks, "num_sequences": num_blocks}
    return Candidate(name, role, b"", limits=limits, **queue)


def decided(
    demand: Demand, *candidates: Candidate, rules: Rules = RULES, **inputs: bool
) -> Decision:
    question = PlacementInputs("r", demand.num_tokens, candidates, demand=demand, **inputs)
    return rules.decision(question)


def chosen(demand: Demand, *candidates: Candidate, **options: object) -> tuple[str, str] | None:
    placement = decided(demand, *candidates, **options).placement
    return placement and (placement.prefill, placement.decode)


SMALL, LARGE = worker("p-small", 10), worker("p-large", 100)
SHORT, LONG = worker("d-short", 60, 2), worker("d-long", 100)
ALL = SMALL, LARGE, SHORT, LONG


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (Demand(100, 8), ("p-small", "d-short")),
        (Demand(160, 8), ("p-small", "d-short")),
        (Demand(161, 8), ("p-large", "d-short")),
        (Demand(400, 561), ("p-large", "d-short")),
        (Demand(400, 562), ("p-large", "d-long")),
        (Demand(100, 8, 2, 2), ("p-small", "d-short")),
        (Demand(100, 8, 8, 8), ("p-small", "d-long")),
        (Demand(100, 8, 1, 8, sequences_field="best_of"), ("p-small", "d-long")),
        (Demand(100, 301, 4, 4, 4, "beam_width"), ("p-small", "d-long")),
        (Demand(300, 102, 4, 4, 4, "beam_width"), None),
        (Demand(100, 1502), None),
    ],
)
def test_placement_chooses_only_workers_that_fit(demand, expected):
    assert chosen(demand, *ALL) == expected


def test_placement_fits_request_on_workers_of_unknown_limits():
    """Older workers do not report how many sequences they run; other servers report nothing."""
    unknown = Candidate("d-unknown", "decode", b"")
    older = worker("d-older", 60, None)
    assert chosen(Demand(100, 8, 99, 99), LARGE, SHORT, older) == ("p-large", "d-older")
    assert chosen(Demand(100, 9999, 99, 99), LARGE, SHORT, unknown) == ("p-large", "d-unknown")
    window = WorkerLimits(2048, BLOCK, None, 16)
    seen_near = Candidate("d-window", "decode", b"", limits=window)
    assert chosen(Demand(100, 1948), LARGE, SHORT, seen_near) == ("p-large", "d-window")
    assert chosen(Demand(100, 1949), LARGE, SHORT, seen_near) is None


@pytest.mark.parametrize("rules", [RULES, Rules(), Rules("round-robin")])
def test_placement_lets_decode_compute_what_no_prefill_holds(rules):
    away = LARGE._replace(excluded="not answering")
    assert chosen(Demand(400, 8), SMALL, LONG, rules=rules) == ("", "d-long")
    assert chosen(Demand(400, 8), SMALL, away, LONG, rules=rules) == ("", "d-long")


def test_placement_explains_which_workers_are_too_small():
    reasons = {
        c.scored.candidate.worker: c.scored.candidate.excluded
        for c in candidacies(decided(Demand(400, 8, 8, 8), *ALL))
    }
    assert reasons == {"p-small": TOO_SMALL, "p-large": "", "d-short": TOO_SMALL, "d-long": ""}


@pytest.mark.parametrize(
    ("demand", "field", "numbers"),
    [
        (Demand(100, 8, 17, 17), "sampling.n", "asks for 17 sequences; .* runs 16 at once"),
        (Demand(100, 8, 1, 20, sequences_field="best_of"), "sampling.best_of", "runs 16 at once"),
        (
            Demand(300, 102, 4, 4, 4, "beam_width"),
            "sampling.max_tokens",
            "is 102, .* 300 tokens; .* takes 400 in each of 4 .* lower sampling.beam_width. .* KV "
            "pool .* has room for 400 tokens of a sequence; the model takes 2048. .* --num-blocks",
        ),
        (Demand(100, 1502), "sampling.max_tokens", "takes 1600 in each of 1"),
    ],
)
def test_placement_refuses_with_numbers_if_none_fits(demand, field, numbers):
    decision = decided(demand, *ALL)
    refusal = decision.refusal
    assert isinstance(refusal, EngineLimitError)
    assert (refusal.field, why(decision)) == (field, str(refusal))
    with pytest.raises(EngineLimitError, match=numbers):
        raise refusal


def test_placement_names_scored_prompt_that_fits_nowhere():
    refusal = decided(Demand(400, 8), SMALL, LONG, needs_prefill=True).refusal
    assert isinstance(refusal, EngineLimitError)
    assert str(refusal).startswith(
        "token_ids: has 400 tokens; the largest prefill worker takes 160. Shorten the prompt. The "
        "KV pool of the largest worker has room for 160 tokens of a sequence; the model takes 2048."
    )


def test_placement_is_unavailable_while_larger_worker_is_away():
    away = LONG._replace(excluded="draining")
    refusal = decided(Demand(100, 8, 8, 8), LARGE, SHORT, away).refusal
    assert isinstance(refusal, UnavailableError)
    assert str(refusal) == f"no decode worker can take work: draining, {TOO_SMALL}"


def test_worker_too_small_still_lends_its_cached_prefix():
    """By its record, and where it has refused the request itself."""
    holder = SMALL._replace(num_cached_tokens=160)
    fleet = SimpleNamespace(candidates=lambda _: [holder, LARGE, LONG])
    placer = Placer(fleet, RULES)  # type: ignore[arg-type]
    prompt, params = (7,) * 400, SamplingParams(max_tokens=8)
    for tokens, small in ((prompt, ()), (prompt[:160], ("p-small",))):
        decision = placer.place(work_of(Request("r", tokens, params)), Exclusions(too_small=small))
        assert decision.inputs.candidates[0].excluded == TOO_SMALL
        computing = decision.placement.chosen[0].candidate
        assert (computing.worker, computing.source) == ("p-large", "p-small")


def test_successor_of_draining_worker_is_large_enough():
    demand = Demand(400, 8, 8, 8)
    inputs = PlacementInputs("r", 400, (SHORT, LONG, worker("d-next", 90)), demand=demand)
    assert RULES.decide_again(inputs, "d-long") == "d-next"
