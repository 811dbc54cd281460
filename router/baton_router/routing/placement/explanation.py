"""Explanation of a placement decision, as sentences. Pure."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from baton.rpc.worker_role import Role
from baton_router.routing.fleet.candidate import ONE_DTYPE
from baton_router.routing.fleet.cost_rates import PRIOR
from baton_router.routing.placement.decision import Decision, PlacementInputs
from baton_router.routing.placement.placement import (
    Placement,
    Scored,
    has_version_gap,
    ready_dtypes,
    ready_versions,
)

Choice = tuple[Scored, ...]
"""Workers that run a request: a prefill and a decode worker, or one of them alone."""

_NUM_TERMS = 3  # cost terms named, those with the largest difference
_MOST_NAMED = 4  # workers or versions named in a list
_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


def why(decision: Decision) -> str:
    """Returns the reason why the chosen workers won, and by how much, or why no worker can."""
    placement, inputs = decision.placement, decision.inputs
    if placement is None:
        return decision.why_none
    sentences = _why_chosen(decision, placement), *_of_encoders(placement), *_of_versions(inputs)
    return " ".join([*sentences, *_of_dtypes(inputs)])


def _why_chosen(decision: Decision, placement: Placement) -> str:
    inputs = decision.inputs
    unit = _unit(decision)
    winner = placement.chosen
    num_others, second = other_choices(placement, inputs)
    summary = f"{_names(winner)} cost{_verb(winner)} {_amount(_cost(winner), unit)}"
    if second is None:
        return f"{summary}. No other choice could take it."
    margin = _cost(second) - _cost(winner)
    if margin <= 0:
        return f"{summary}. {_names(second)} as much: the request's id breaks the tie."
    because = ", ".join(_differences(winner, second, unit))
    rank = f"Next best of {num_others} other choices" if num_others > 1 else "The only other choice"
    return f"{summary}. {rank}: {_names(second)}, {_amount(margin, unit)} more ({because})."


def other_choices(placement: Placement, inputs: PlacementInputs) -> tuple[int, Choice | None]:
    """Returns how many choices of workers could have run the request beside the chosen ones, and
    the cheapest of them."""
    num_others, cheapest = -1, list[Choice]()  # the chosen one is counted, too
    ready = [s for s in placement.scored if not s.is_excluded]
    prefills = [s for s in ready if s.candidate.role == "prefill"]
    if inputs.prefill_alone:
        num_others += len(prefills)
        cheapest += [(prefill,) for prefill in prefills[:2]]
    else:
        decodes: dict[bytes, list[Scored]] = {}
        for one in ready:
            if one.candidate.role == "decode":
                decodes.setdefault(one.candidate.pairing, []).append(one)
        barred: dict[str, set[str]] = {}
        for worker, partner in inputs.broken:
            barred.setdefault(worker, set()).add(partner)
        for prefill in prefills:
            partners = decodes.get(prefill.candidate.pairing, [])
            avoided = barred.get(prefill.candidate.worker)
            if avoided:
                partners = [s for s in partners if s.candidate.worker not in avoided]
            num_others += len(partners)
            # Its cheapest pairs; the third and later ones cost more than another choice.
            cheapest += [(prefill, decode) for decode in partners[:2]]
    singles = [(s,) for s in placement.alone if not s.is_excluded]
    num_others += len(singles)
    others = [choice for choice in (*cheapest, *singles) if choice != placement.chosen]
    return num_others, min(others, key=_cost, default=None)


class Candidacy(NamedTuple):
    """Candidate of a decision, with its cost. `computes_prompt`: as a decode worker alone."""

    scored: Scored
    computes_prompt: bool = False


def candidacies(decision: Decision) -> list[Candidacy]:
    """Returns all candidates of a decision: for pairs, alone, and of the encode pool. If there was
    no choice, they have no terms."""
    placement = decision.placement
    if placement is None:
        return [Candidacy(Scored(True, 0.0, 0, c, {})) for c in decision.inputs.candidates]
    return [
        *map(Candidacy, placement.scored),
        *(Candidacy(single, computes_prompt=True) for single in placement.alone),
        *map(Candidacy, encode_pool(decision)),
    ]


def encode_pool(decision: Decision) -> list[Scored]:
    """Returns the workers of the encode pool, those that can take requests first, with the seconds
    to encode what is queued there, and what the computing worker lacks and no worker has cached."""
    placement = decision.placement
    choices = () if placement is None else placement.encoders
    num_tokens = sum(choice.num_tokens for choice in choices if not choice.only_cached)
    scored = []
    for candidate in decision.inputs.candidates:
        if candidate.role == "encode":
            seconds = num_tokens * (candidate.rates or PRIOR).encoder_seconds_per_token
            terms = {"queue": candidate.queue_seconds(), "encode": seconds}
            scored.append(
                Scored(candidate.excluded != "", sum(terms.values()), 0, candidate, terms)
            )
    return sorted(scored)


def _of_encoders(placement: Placement) -> Iterator[str]:
    """Yields a sentence on the sources of encoder outputs, if any are needed."""
    computing = placement.chosen[0].candidate.worker
    sources = [
        f"{choice.input + 1} from {choice.worker}{' (cached)' if choice.only_cached else ''}"
        if choice.worker
        else f"{choice.input + 1} encoded by {computing} itself"
        for choice in placement.encoders
    ]
    if sources:
        yield f"Images: {_listed(sources)}."


def _of_versions(inputs: PlacementInputs) -> Iterator[str]:
    """Yields a sentence on the effect of a rolling upgrade, if there is any."""
    candidates = inputs.candidates
    versions = {role: ready_versions(candidates, role) for role in _OTHER}
    if has_version_gap(candidates):
        prefills, decodes = (_listed(map(_version_text, sorted(versions[role]))) for role in _OTHER)
        yield (
            f"Prefill workers are of version {prefills}, decode workers of {decodes}, and exchange "
            "blocks with their like alone: until the upgrade is finished, decode workers compute "
            "prompts themselves."
        )
        return
    left_out = [
        f"{c.worker} ({_version_text(c.version)})"
        for c in candidates
        if not c.excluded and c.role in _OTHER and c.version not in versions[_OTHER[c.role]]
    ]
    if left_out and all(versions.values()):
        yield f"Without a partner of the same version: {_listed(left_out)}."


def _of_dtypes(inputs: PlacementInputs) -> Iterator[str]:
    """Yields a sentence on workers whose KV dtype no worker of the other role has, if any."""
    candidates = inputs.candidates
    dtypes = {role: ready_dtypes(candidates, role) for role in _OTHER}
    ready = [c for c in candidates if not c.excluded and c.role in _OTHER and c.kv_dtype]
    left_out = [
        f"{c.worker} ({c.kv_dtype})" for c in ready if c.kv_dtype not in dtypes[_OTHER[c.role]]
    ]
    if left_out and all(dtypes.values()):
        yield f"Without a partner of the same KV dtype: {_listed(left_out)}; {ONE_DTYPE}."


def _listed(names: Iterable[str]) -> str:
    some = list(names)
    more = [f"{len(some) - _MOST_NAMED} more"] if len(some) > _MOST_NAMED else []
    return ", ".join(some[:_MOST_NAMED] + more)


def _version_text(version: str) -> str:
    return version or "not said"


def _cost(choice: Choice) -> float:
    return sum(scored.cost for scored in choice)


def _names(choice: Choice) -> str:
    names = " with ".join(scored.candidate.worker for scored in choice)
    return f"{names} alone" if len(choice) == 1 else names


def _verb(choice: Choice) -> str:
    return "s" if len(choice) == 1 else ""


def _differences(winner: Choice, other: Choice, unit: str) -> list[str]:
    """Returns the largest differences of cost terms, the other choice's less the winner's."""
    less, more = _terms(winner), _terms(other)
    changes = {name: more.get(name, 0.0) - less.get(name, 0.0) for name in less | more}
    ordered = sorted(changes.items(), key=lambda change: -abs(change[1]))
    return [
        f"{name} {'+' if change > 0 else '-'}{_amount(abs(change), unit)}"
        for name, change in ordered[:_NUM_TERMS]
        if change
    ]


def _terms(choice: Choice) -> dict[str, float]:
    """Returns the cost terms of all workers of a choice, summed by name."""
    terms: dict[str, float] = {}
    for scored in choice:
        for name, cost in scored.terms.items():
            terms[name] = terms.get(name, 0.0) + cost
    return terms


def _unit(decision: Decision) -> str:
    """Returns "ms" for the default policy, whose costs are seconds; else an empty string."""
    return "ms" if decision.rules.policy == "baton" else ""


def _amount(cost: float, unit: str) -> str:
    return f"{cost * 1000:.3g} ms" if unit else f"{cost:.6g}"
