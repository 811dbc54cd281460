"""Timeline of an answer, for clients that ask for it: stages, workers, and the reasons of the
placement."""

from collections.abc import Sequence

from baton.errors import NotFoundError
from baton.serving.tenant import Caller, Tenants
from baton_router.apis.answers.answer_writer import Extra, Json
from baton_router.apis.answers.sequence_reader import Reader
from baton_router.call.usage import Account
from baton_router.routing.placement.explanation import Candidacy, candidacies, why
from baton_router.routing.placement.placer import Placer

_USAGE = (
    "num_prompt_tokens",
    "num_output_tokens",
    "num_cached_prompt_tokens",
    "num_transferred_blocks",
    "num_transferred_bytes",
    "num_reused_decode_blocks",
    "num_migrations",
)


def timeline_for(caller: Caller, placer: Placer, tenants: Tenants) -> Extra:
    """Returns the function that makes the timeline of each request from how it ended and the
    decision about its placement."""
    tenant = tenants.of(caller).name

    def timeline(readers: Sequence[Reader]) -> Json:
        return {"requests": [_timeline(reader, placer, tenant) for reader in readers]}

    return timeline


def _timeline(reader: Reader, placer: Placer, tenant: str) -> Json:
    accepted, finished = reader.accepted, reader.finished
    assert accepted is not None, "an answer that was not accepted"
    assert finished is not None, "an answer that has not finished"
    request_id, placement, account = (
        accepted.request.request_id,
        accepted.placement,
        finished.account,
    )
    reason, candidates = "", list[Json]()
    try:
        decision = placer.decision_of(request_id, tenant)
        reason, candidates = why(decision), list(map(_candidate, candidacies(decision)))
    except NotFoundError:
        pass  # the placer has dropped it since
    return {
        "request_id": request_id,
        "seconds": _seconds(account),
        "usage": {name: getattr(account, name) for name in _USAGE},
        "prefill_worker": "" if placement is None else placement.prefill,
        "decode_worker": "" if placement is None else placement.decode,
        "prefix_source": "" if placement is None else placement.source,
        "reason": reason,
        "candidates": candidates,
    }


def _seconds(account: Account) -> Json:
    """Returns every duration by name; None of what did not happen, such as a handoff."""
    durations = account.timings.durations().items()
    return {name: None if last is None else round(last, 6) for name, last in durations}


def _candidate(candidacy: Candidacy) -> Json:
    """Returns a candidate with its cost terms, in seconds under the default policy."""
    candidate = candidacy.scored.candidate
    return {
        "worker": candidate.worker,
        "role": candidate.role,
        "computes_prompt": candidacy.computes_prompt,
        "num_cached_tokens": candidate.num_cached_tokens,
        "terms": dict(candidacy.scored.terms),
        "excluded": candidate.excluded,
    }
