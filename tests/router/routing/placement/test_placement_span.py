"""A trace shows of each placement what `baton explain` says: the workers, and all terms."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.sampling import SamplingParams
from baton.serving.telemetry import stages
from baton_router.call.prompt import Prompt
from baton_router.call.request import Request, work_of
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.placement.decision import DEFAULT_RULES, Decision, PlacementInputs
from baton_router.routing.placement.explanation import why
from baton_router.routing.placement.placement_span import MAX_CANDIDATES, placing
from baton_router.routing.placement.placer import Placer
from tests.support.spans import kept_spans

PREFILLS = [Candidate(f"p{i}", "prefill", b"", num_cached_tokens=16 * i) for i in range(3)]
DECODE = Candidate("d", "decode", b"")


def decided(*candidates: Candidate) -> Decision:
    inputs = PlacementInputs("r", 1024, candidates)
    return Decision(DEFAULT_RULES, inputs, DEFAULT_RULES.decide(inputs))


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    """The spans of the test, which is in a trace."""
    with kept_spans() as exporter, stages.stage_of_call("generate"):
        yield exporter


def span_of(exported: InMemorySpanExporter, decision: Decision) -> ReadableSpan:
    with placing("r") as span:
        span.decided(decision)
    (finished,) = exported.get_finished_spans()
    return finished


def test_placement_span_has_workers_and_every_cost_term(exported):
    decision = decided(*PREFILLS, DECODE)
    span = span_of(exported, decision)
    assert (span.name, span.attributes["baton.request.id"]) == ("place", "r")
    assert span.attributes["baton.placement.prefill_worker"] == "p2"
    assert span.attributes["baton.placement.decode_worker"] == "d"
    assert span.attributes["baton.placement.num_cached_tokens"] == 32
    assert span.attributes["baton.placement.why"] == why(decision)
    for scored in decision.placement.chosen:
        prefix = f"baton.placement.{scored.candidate.role}"
        assert span.attributes[f"{prefix}.cost"] == scored.cost
        said = {name: span.attributes[f"{prefix}.{name}"] for name in scored.terms}
        assert said == scored.terms
        assert sum(said.values()) == pytest.approx(scored.cost)


def test_placement_span_lists_candidates_cheapest_first(exported):
    draining = PREFILLS[0]._replace(worker="gone", excluded="draining")
    span = span_of(exported, decided(*PREFILLS, draining, DECODE))
    told = [dict(event.attributes) for event in span.events]
    assert {one["worker"] for one in told} == {"p0", "p1", "p2", "gone", "d"}
    prefills = [one["worker"] for one in told if one["role"] == "prefill" and not one["excluded"]]
    assert prefills == ["p2", "p1", "p0"]
    assert next(one["excluded"] for one in told if one["worker"] == "gone") == "draining"


def test_placement_span_limits_candidates_of_large_fleet(exported):
    many = [PREFILLS[0]._replace(worker=f"p{i}") for i in range(100)]
    span = span_of(exported, decided(*many, DECODE))
    assert span.attributes["baton.placement.num_candidates"] == 101
    assert len(span.events) == MAX_CANDIDATES


def test_placement_span_has_the_sources_of_encoder_outputs(exported):
    image, encoder = (0, 576, b"i" * 16), Candidate("e", "encode", b"")
    inputs = PlacementInputs("r", 1024, (PREFILLS[0], DECODE, encoder), images=(image,))
    span = span_of(exported, DEFAULT_RULES.decision(inputs))
    assert span.attributes["baton.placement.encoder_inputs"] == (0,)
    assert span.attributes["baton.placement.encoder_sources"] in (("e",), ("p0",), ("d",))
    assert any(name.endswith(".encode") for name in span.attributes)


def test_placement_span_says_why_no_worker_was_chosen(exported):
    span = span_of(exported, decided(*PREFILLS))
    assert span.attributes["baton.placement.why"] == "no decode worker is known"
    assert "baton.placement.prefill_worker" not in span.attributes


def test_placement_span_is_not_built_outside_trace():
    unread: Any = object()
    with placing("r") as span:
        span.decided(unread)


class Cluster:
    """As a placer sees it."""

    def candidates(self, prompt: Prompt) -> list[Candidate]:
        return [*PREFILLS, DECODE]


def test_placer_makes_span_of_placement_but_not_of_dry_run(exported):
    placer = Placer(Cluster())  # type: ignore[arg-type]
    work = work_of(Request("r7", tuple(range(64)), SamplingParams()))
    placer.explain(work)
    assert exported.get_finished_spans() == ()
    decision = placer.place(work)
    (span,) = exported.get_finished_spans()
    assert span.attributes["baton.request.id"] == "r7"
    assert span.attributes["baton.placement.decode_worker"] == decision.placement.decode
