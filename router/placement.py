"""Which workers a request runs on, and why: a pure function of the request and a snapshot.

A policy (`router.policy`) says what each candidate costs. The pair of least cost wins, among
workers that may pair. Equal costs are decided by rendezvous hashing, so that all routers agree and
load spreads. Knows nothing of what the costs mean.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from xxhash import xxh64_intdigest

from router.candidate import Candidate, Role
from router.policy import Policy, Terms, baton

__all__ = ["Candidate", "Placement", "Role", "Scored", "place", "why_none"]


@dataclass(frozen=True, slots=True)
class Scored:
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
    first."""

    prefill: str
    decode: str
    scored: tuple[Scored, ...]

    @property
    def chosen(self) -> tuple[Scored, ...]:
        """The prefill and the decode worker."""
        by_worker = {s.candidate.worker: s for s in self.scored}
        return by_worker[self.prefill], by_worker[self.decode]

    @property
    def num_cached_tokens(self) -> int:
        """Leading prompt tokens that the prefill worker is thought to hold."""
        return self.chosen[0].candidate.num_cached_tokens


def place(
    request_id: str,
    num_tokens: int,
    candidates: Collection[Candidate],
    broken: Collection[tuple[str, str]] = (),
    policy: Policy = baton,
) -> Placement | None:
    """Chooses a prefill and a decode worker, or None if no two workers may pair.

    `broken`: prefill and decode workers that have just failed to work together.
    """
    seed = xxh64_intdigest(request_id.encode())
    scored = [_score(candidate, num_tokens, policy, seed) for candidate in candidates]
    scored.sort(key=_order)
    pairs = [p for ready in _by_pairing(scored) for p in _pairs(*ready, broken)]
    if not pairs:
        return None
    prefill, decode = min(pairs, key=_pair_order)
    return Placement(prefill.candidate.worker, decode.candidate.worker, tuple(scored))


def why_none(candidates: list[Candidate]) -> str:
    """A sentence on why no placement is possible."""
    for role in ("prefill", "decode"):
        reasons = {c.excluded for c in candidates if c.role == role}
        if not reasons:
            return f"no {role} worker is known"
        if "" not in reasons:
            return f"no {role} worker can take work: {', '.join(sorted(reasons))}"
    return "no prefill and decode worker serve the same model with the same KV layout"


def _score(candidate: Candidate, num_tokens: int, policy: Policy, seed: int) -> Scored:
    terms = policy(candidate, num_tokens)
    rank = xxh64_intdigest(candidate.worker.encode(), seed)
    return Scored(candidate, terms, sum(terms.values()), rank)


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
            group = groups.setdefault(one.candidate.pairing, ([], []))
            group[one.candidate.role == "decode"].append(one)
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
