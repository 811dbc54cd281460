"""Fit of a request on workers by their limits for a single request. Pure.

A worker without limits is one that does not report them: every request fits. Capacity now, beside
other requests, is a matter of costs and of the worker's own admission.
"""

from collections.abc import Collection, Iterable
from operator import attrgetter

from baton.context_length import ContextLength
from baton.errors import EngineLimitError
from baton.rpc.worker_role import Role
from baton_router.call.request import Demand
from baton_router.routing.fleet.candidate import Candidate, WorkerLimits

TOO_SMALL = "too small for the request"
"""Reason of a candidate whose own limits exclude the request. It counts before others, since the
others may pass."""


def fitting(
    candidates: tuple[Candidate, ...], num_tokens: int, demand: Demand
) -> tuple[Candidate, ...]:
    """Returns the candidates, with those excluded that are too small for a request of `num_tokens`
    so far and its `demand`."""
    return tuple(
        c if c.limits is None or _fits(c.role, c.limits, num_tokens, demand) else as_too_small(c)
        for c in candidates
    )


def as_too_small(candidate: Candidate) -> Candidate:
    """Returns the candidate excluded as too small."""
    return candidate._replace(excluded=TOO_SMALL)


def are_too_small(candidates: Iterable[Candidate], role: Role) -> bool:
    """Returns whether there are workers of this role and all are too small."""
    return {c.excluded for c in candidates if c.role == role} == {TOO_SMALL}


def ready_are_too_small(candidates: Iterable[Candidate], role: Role) -> bool:
    """Returns whether workers of this role are too small and no other one can take requests."""
    reasons = {c.excluded for c in candidates if c.role == role}
    return TOO_SMALL in reasons and "" not in reasons


def limit_error(
    candidates: Collection[Candidate], role: Role, num_tokens: int, demand: Demand
) -> EngineLimitError:
    """Returns the error of a request for which all workers of this role are too small. It says the
    largest there is."""
    limits = [c.limits for c in candidates if c.role == role and c.limits is not None]
    if role == "prefill":
        longest = _longest(limits)
        most = min(longest.num_tokens, longest.model - 1)
        problem = f"has {num_tokens} tokens; the largest prefill worker takes {most}"
        advice = f"Shorten the prompt. {longest.remedy}".rstrip()
        return EngineLimitError("token_ids", f"{problem}. {advice}")
    wide = [one for one in limits if _runs(one, demand)]
    field, number = f"sampling.{demand.sequences_field}", demand.num_sequences
    if not wide:
        most = max((one.max_num_seqs or 0 for one in limits), default=0)
        problem = f"asks for {number} sequences; the largest decode worker runs {most} at once"
        return EngineLimitError(field, f"{problem}. Ask for fewer.")
    longest = _longest(wide, demand.num_together)
    return EngineLimitError(
        "sampling.max_tokens",
        f"is {demand.max_tokens}, and the prompt has {demand.num_tokens} tokens; the largest "
        f"decode worker takes {longest.num_tokens} in each of {number} sequences. Lower it, "
        f"shorten the prompt, or lower {field}. {longest.remedy}".rstrip(),
    )


def _fits(role: Role, limits: WorkerLimits, num_tokens: int, demand: Demand) -> bool:
    if role == "prefill":
        return num_tokens < limits.max_model_len and num_tokens <= _prompt_len(limits)
    if role == "encode":
        return True
    if demand.max_len > limits.max_model_len or not _runs(limits, demand):
        return False
    held = limits.held_tokens(demand.num_together)
    return held is None or demand.max_len - 1 <= held  # the last token's KV is never computed


def _runs(limits: WorkerLimits, demand: Demand) -> bool:
    """Returns whether a worker runs all sequences of a request at once."""
    return limits.max_num_seqs is None or demand.num_sequences <= limits.max_num_seqs


def _longest(limits: Iterable[WorkerLimits], num_together: int = 1) -> ContextLength:
    """Returns the context length of the largest of these workers."""
    lengths = [each.context_length(num_together) for each in limits]
    return max(lengths, key=attrgetter("num_tokens"), default=ContextLength(1))


def _prompt_len(limits: WorkerLimits) -> int:
    """Returns the maximum tokens of a prompt in a worker's pool."""
    held = limits.held_tokens()
    return limits.max_model_len if held is None else held
