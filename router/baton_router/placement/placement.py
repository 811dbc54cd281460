"""Placement: chooses the workers of a request, as a pure function of the request and a snapshot.

A policy (`baton_router.placement.policy`) gives the cost of each candidate. The cheapest pair of
workers that may pair wins, or a decode worker alone if that costs less. Equal costs are decided by
rendezvous hashing, so that all routers agree and load spreads. Knows nothing of what the costs
mean.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh64_intdigest

from baton_router.fleet.candidate import Candidate, Role
from baton_router.placement.cost_model import PULL
from baton_router.placement.policy import Policy, Terms, baton

__all__ = [
    "Candidate",
    "Placement",
    "Role",
    "Scored",
    "has_version_gap",
    "place",
    "place_again",
    "ready_versions",
    "why_none",
]


class Scored(NamedTuple):
    """A candidate with its cost, which is the sum of the terms.

    Attributes:
        rank: its place among candidates of equal cost; another one for each request.
    """

    candidate: Candidate
    terms: Terms
    cost: float
    rank: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen workers, and every candidate: first those that can take work, the cheapest one
    first.

    Attributes:
        prefill: empty: the decode worker computes the prompt itself.
        alone: every decode worker, as one that would compute the prompt itself; empty where none
            was to.
        chosen: the prefill and the decode worker, or the one that does both.
    """

    prefill: str
    decode: str
    scored: tuple[Scored, ...]
    alone: tuple[Scored, ...]
    chosen: tuple[Scored, ...]

    @property
    def num_cached_tokens(self) -> int:
        """Leading prompt tokens that the worker which computes the rest is thought to hold, or to
        get."""
        computing = self.chosen[0].candidate
        return computing.num_source_tokens if self.source else computing.num_cached_tokens

    @property
    def source(self) -> str:
        """The worker that the prefill worker gets a cached beginning of the prompt from, where that
        is thought to be worth it; empty for none."""
        computing = self.chosen[0]
        return computing.candidate.source if PULL in computing.terms else ""


def place(
    request_id: str,
    num_tokens: int,
    candidates: Collection[Candidate],
    broken: Collection[tuple[str, str]] = (),
    policy: Policy = baton,
    alone: Policy | None = None,
) -> Placement | None:
    """Chooses a prefill and a decode worker, or a decode worker alone; None if nobody may.

    Args:
        broken: prefill and decode workers that have just failed to work together.
        alone: what a decode worker costs that computes the prompt itself; None: none is to.
    """
    seed = xxh64_intdigest(request_id.encode())
    scored = [_score(candidate, num_tokens, policy, seed) for candidate in candidates]
    scored.sort(key=_order)
    pairs = [p for ready in _by_pairing(scored) for p in _pairs(*ready, broken)]
    singles = _alone(scored, num_tokens, alone)
    single = singles[0] if singles and not singles[0].candidate.excluded else None
    if pairs:
        prefill, decode = min(pairs, key=_pair_order)
        if single is None or prefill.cost + decode.cost <= single.cost:
            names = prefill.candidate.worker, decode.candidate.worker
            return Placement(*names, tuple(scored), singles, (prefill, decode))
    if single is None:
        return None
    return Placement("", single.candidate.worker, tuple(scored), singles, (single,))


def place_again(
    request_id: str,
    num_tokens: int,
    candidates: Collection[Candidate],
    decode: str,
    policy: Policy = baton,
) -> str | None:
    """Chooses a decode worker to go on with what runs on `decode`, or None if no other one can."""
    seed = xxh64_intdigest(request_id.encode())
    pairings = {c.pairing for c in candidates if c.worker == decode}
    scored = [
        _score(c, num_tokens, policy, seed)
        for c in candidates
        if c.role == "decode" and c.worker != decode and not c.excluded and c.pairing in pairings
    ]
    return min(scored, key=_order).candidate.worker if scored else None


def ready_versions(candidates: Iterable[Candidate], role: Role) -> frozenset[str]:
    """Of those in this role that can take work."""
    return frozenset(c.version for c in candidates if c.role == role and not c.excluded)


def has_version_gap(candidates: Collection[Candidate]) -> bool:
    """Whether there are workers of both roles that can take work, and no two of one version: a
    moment of an upgrade in which nobody can hand over to anybody."""
    prefills, decodes = (ready_versions(candidates, role) for role in ("prefill", "decode"))
    return bool(prefills and decodes) and prefills.isdisjoint(decodes)


def why_none(candidates: list[Candidate]) -> str:
    """A sentence on why no placement is possible."""
    for role in ("prefill", "decode"):
        reasons = {c.excluded for c in candidates if c.role == role}
        if not reasons:
            return f"no {role} worker is known"
        if "" not in reasons:
            return f"no {role} worker can take work: {', '.join(sorted(reasons))}"
    if has_version_gap(candidates):
        return "no prefill and decode worker are of one version; finish the upgrade"
    return "no prefill and decode worker serve the same model with the same KV layout"


def _score(candidate: Candidate, num_tokens: int, policy: Policy, seed: int) -> Scored:
    terms = policy(candidate, num_tokens)
    rank = xxh64_intdigest(candidate.worker.encode(), seed)
    return Scored(candidate, terms, sum(terms.values()), rank)


def _alone(scored: list[Scored], num_tokens: int, alone: Policy | None) -> tuple[Scored, ...]:
    """The decode workers as ones that compute the prompt themselves, in order."""
    if alone is None:
        return ()
    singles = []
    for one in scored:
        if one.candidate.role == "decode":
            terms = alone(one.candidate, num_tokens)
            singles.append(Scored(one.candidate, terms, sum(terms.values()), one.rank))
    return tuple(sorted(singles, key=_order))


def _order(scored: Scored) -> tuple[bool, float, int, str]:
    candidate = scored.candidate
    return candidate.excluded != "", scored.cost, scored.rank, candidate.worker


def _pair_order(pair: tuple[Scored, Scored]) -> tuple[float, int, int]:
    prefill, decode = pair
    return prefill.cost + decode.cost, prefill.rank, decode.rank


def _by_pairing(scored: list[Scored]) -> Iterator[tuple[list[Scored], list[Scored]]]:
    """The prefill and the decode workers that can take work, for each pairing."""
    groups: dict[bytes, tuple[list[Scored], list[Scored]]] = {}
    for one in scored:
        if not one.candidate.excluded:
            candidate = one.candidate
            group = groups.get(candidate.pairing)
            if group is None:
                group = groups[candidate.pairing] = ([], [])
            group[candidate.role == "decode"].append(one)
    return iter(groups.values())


def _pairs(
    prefills: list[Scored], decodes: list[Scored], broken: Collection[tuple[str, str]]
) -> Iterator[tuple[Scored, Scored]]:
    """Each prefill worker with the best decode worker for it, as far as they may be the best pair.

    Both lists are in order. A pair's cost is the sum of its workers', so once a prefill worker with
    the first decode worker of all is dearer than a pair that was found, so are all that follow.
    """
    least = math.inf
    for prefill in prefills:
        if decodes and prefill.cost + decodes[0].cost > least:
            return
        for decode in decodes:
            if (prefill.candidate.worker, decode.candidate.worker) not in broken:
                least = min(least, prefill.cost + decode.cost)
                yield prefill, decode
                break
