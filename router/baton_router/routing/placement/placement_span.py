"""OpenTelemetry span of a placement decision.

A request that is not traced gets no attributes and no events.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.explanation import why
from baton_router.routing.placement.placement import Scored
from baton_router.telemetry import request_trace

Attributes = dict[str, AttributeValue]

# Maximum number of candidate events per span, the cheapest first.
MAX_CANDIDATES = 32


class PlacementSpan:
    """OpenTelemetry span of one placement."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def decided(self, decision: Decision) -> None:
        """Adds the decision to the span: the chosen workers with their terms as attributes, and the
        cheapest `MAX_CANDIDATES` candidates as events."""
        if not self._span.is_recording():
            return
        self._span.set_attributes(_of_decision(decision))
        placement = decision.placement
        for scored in (placement.scored if placement else ())[:MAX_CANDIDATES]:
            self._span.add_event("candidate", _of_candidate(scored))


@contextmanager
def placing(request_id: str) -> Iterator[PlacementSpan]:
    """Yields a span `place` for the `with` block."""
    with request_trace.placing() as span:
        span.set_attribute("baton.request.id", request_id)
        yield PlacementSpan(span)


def _of_decision(decision: Decision) -> Attributes:
    attributes: Attributes = {
        "baton.placement.policy": decision.rules.policy,
        "baton.placement.num_tokens": decision.inputs.num_tokens,
        "baton.placement.num_candidates": len(decision.inputs.candidates),
        "baton.placement.why": why(decision),
    }
    placement = decision.placement
    if placement is None:
        return attributes
    attributes |= {
        "baton.placement.prefill_worker": placement.prefill,
        "baton.placement.decode_worker": placement.decode,
        "baton.placement.prefix_source": placement.source,
        "baton.placement.num_cached_tokens": placement.num_cached_tokens,
    }
    for scored in placement.chosen:
        role = scored.candidate.role
        attributes[f"baton.placement.{role}.cost"] = scored.cost
        attributes |= {f"baton.placement.{role}.{n}": cost for n, cost in scored.terms.items()}
    if placement.encoders:
        computing = placement.chosen[0].candidate.worker
        attributes["baton.placement.encoder_inputs"] = [c.input for c in placement.encoders]
        sources = [choice.worker or computing for choice in placement.encoders]
        attributes["baton.placement.encoder_sources"] = sources
    return attributes


def _of_candidate(scored: Scored) -> Attributes:
    candidate = scored.candidate
    return {
        "worker": candidate.worker,
        "role": candidate.role,
        "excluded": candidate.excluded,
        "cost": scored.cost,
        **scored.terms,
    }
