"""Timeline of an answer, for clients that ask for it: stages, workers, and the reasons of the
placement."""

from collections.abc import Sequence

from baton.errors import NotFoundError
from baton.role_wire import role_of
from baton.serving.tenant import Caller, Tenants
from baton.v1 import admin_pb2
from baton.v1 import inference_pb2 as pb
from baton_router.apis.answers.answer_writer import Extra, Json
from baton_router.apis.answers.sequence_reader import Reader
from baton_router.apis.grpc import admin_wire
from baton_router.lifecycle import worker_wire
from baton_router.routing.placement.placer import Placer

_USAGE = pb.Usage.DESCRIPTOR.fields


def timeline_for(caller: Caller, tenants: Tenants, placer: Placer) -> Extra:
    """Returns the function that makes the timeline of each request from `Finished` and
    `ExplainPlacement`."""
    tenant = tenants.of(caller).name

    def timeline(readers: Sequence[Reader]) -> Json:
        return {"requests": [_timeline(reader, placer, tenant) for reader in readers]}

    return timeline


def _timeline(reader: Reader, placer: Placer, tenant: str) -> Json:
    accepted, finished = reader.accepted, reader.finished
    assert accepted is not None, "an answer that was not accepted"
    assert finished is not None, "an answer that has not finished"
    try:
        decision = admin_wire.explanation(placer.decision_of(accepted.request_id, tenant))
    except NotFoundError:  # the placer has dropped it since
        decision = admin_pb2.ExplainPlacementResponse()
    return {
        "request_id": accepted.request_id,
        "seconds": _seconds(finished.timings),
        "usage": {field.name: getattr(finished.usage, field.name) for field in _USAGE},
        "prefill_worker": accepted.placement.prefill_worker,
        "decode_worker": accepted.placement.decode_worker,
        "prefix_source": accepted.placement.prefix_source,
        "reason": decision.reason,
        "candidates": [_candidate(candidate) for candidate in decision.placement.candidates],
    }


def _seconds(timings: pb.Timings) -> Json:
    """Returns every duration by name; None of what did not happen, such as a handoff."""
    return {
        field.name: round(worker_wire.seconds(getattr(timings, field.name)), 6)
        if timings.HasField(field.name)  # type: ignore[arg-type] # a name of its own
        else None
        for field in pb.Timings.DESCRIPTOR.fields
    }


def _candidate(candidate: pb.PlacementCandidate) -> Json:
    """Returns a candidate with its cost terms, in seconds under the default policy."""
    return {
        "worker": candidate.worker,
        "role": role_of(candidate.role),
        "computes_prompt": candidate.computes_prompt,
        "num_cached_tokens": candidate.num_cached_tokens,
        "terms": dict(candidate.terms),
        "excluded": candidate.excluded,
    }
