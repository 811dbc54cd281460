"""Placement: chooses the workers of a request, as a pure function of the request and a snapshot.

A policy (`baton_router.routing.placement.policy`) returns the cost of each candidate. The cheapest
prefill and decode worker of equal pairing win, or a decode worker alone if that costs less; for a
pooled output, the cheapest prefill worker. Rendezvous hashing breaks ties, so that all routers
agree and load spreads. Independent of the meaning of the costs.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh64_intdigest

from baton.rpc.worker_role import Role
from baton_router.routing.fleet.candidate import ONE_DTYPE, Candidate
from baton_router.routing.placement.cost_model import ENCODE, FETCH
from baton_router.routing.placement.encoder_sources import EncoderChoice, EncoderSources
from baton_router.routing.placement.policy import Policy, Terms, baton

__all__ = [
    "Candidate",
    "Placement",
    "Scored",
    "encoder_choices",
    "has_only_decode",
    "has_version_gap",
    "place",
    "place_again",
    "ready_dtypes",
    "ready_versions",
    "why_none",
]


class Scored(NamedTuple):
    """Candidate with its cost, the sum of the terms. In order as tuples: by the first three fields,
    then by the worker's name.

    Attributes:
        is_excluded: it cannot be chosen.
        rank: rendezvous hash that orders candidates of equal cost; differs per request.
    """

    is_excluded: bool
    cost: float
    rank: int
    candidate: Candidate
    terms: Terms


@dataclass(frozen=True, slots=True)
class Placement:
    """Chosen workers of a request, with the costs of every candidate.

    Attributes:
        prefill: chosen prefill worker; empty: the decode worker computes the prompt itself.
        decode: chosen decode worker; empty: none is needed.
        scored: all prefill and decode workers, those that can take requests first, then by
            ascending cost.
        alone: all decode workers, with their costs of computing the prompt themselves; empty if
            that was not allowed.
        chosen: the prefill and the decode worker, or one of them alone.
        encoders: sources of the encoder outputs that the computing worker, the first one chosen,
            needs after its cached prefix and does not have cached, in the order of the prompt.
    """

    prefill: str
    decode: str
    scored: tuple[Scored, ...]
    alone: tuple[Scored, ...]
    chosen: tuple[Scored, ...]
    encoders: tuple[EncoderChoice, ...] = ()

    @property
    def num_cached_tokens(self) -> int:
        """Leading prompt tokens that the computing worker is expected to have cached or to fetch
        from `source`."""
        computing = self.chosen[0].candidate
        return computing.num_source_tokens if self.source else computing.num_cached_tokens

    @property
    def source(self) -> str:
        """Worker from which the prefill worker fetches a cached prefix; empty if no fetch is worth
        its cost."""
        computing = self.chosen[0]
        return computing.candidate.source if FETCH in computing.terms else ""


def place(
    request_id: str,
    num_tokens: int,
    candidates: Collection[Candidate],
    broken: Collection[tuple[str, str]] = (),
    policy: Policy = baton,
    alone: Policy | None = None,
    *,
    prefill_alone: bool = False,
) -> Placement | None:
    """Returns the cheapest prefill and decode worker, or decode worker alone; None if none may.

    Args:
        broken: pairs of prefill and decode workers that have recently failed to work together; one
            name is empty where the other worker has failed alone.
        alone: policy for decode workers that compute the prompt themselves; None: not allowed.
        prefill_alone: a prefill worker is all that the request needs.
    """
    seed = xxh64_intdigest(request_id.encode())
    scored = sorted(_scores(candidates, num_tokens, policy, seed))
    if prefill_alone:
        return _prefill_alone(scored, broken)
    pairs = [p for ready in _by_pairing(scored) for p in _pairs(*ready, broken)]
    singles = _alone(scored, num_tokens, alone, broken)
    single = singles[0] if singles and not singles[0].is_excluded else None
    if pairs:
        prefill, decode = min(pairs, key=_pair_order)
        if single is None or prefill.cost + decode.cost <= single.cost:
            names = prefill.candidate.worker, decode.candidate.worker
            return Placement(*names, tuple(scored), singles, (prefill, decode))
    if single is None:
        return None
    return Placement("", single.candidate.worker, tuple(scored), singles, (single,))


def _prefill_alone(scored: list[Scored], broken: Collection[tuple[str, str]]) -> Placement | None:
    for one in scored:
        candidate = one.candidate
        is_broken = (candidate.worker, "") in broken
        if candidate.role == "prefill" and not candidate.excluded and not is_broken:
            return Placement(candidate.worker, "", tuple(scored), (), (one,))
    return None


def encoder_choices(placement: Placement, encoders: EncoderSources) -> tuple[EncoderChoice, ...]:
    """Returns the sources of the encoder outputs that the computing worker lacks. Policies without
    a cost for encoding fetch none."""
    computing = placement.chosen[0]
    terms, num_cached = computing.terms, placement.num_cached_tokens
    begins = terms.get("queue", 0.0) + terms.get(FETCH, 0.0)
    encoding = encoders.encoding(computing.candidate, num_cached, begins)
    if ENCODE not in terms:
        encoding = encoding._replace(fetched=frozenset())
    return encoders.choices(computing.candidate, encoding)


def place_again(
    request_id: str,
    num_tokens: int,
    candidates: Collection[Candidate],
    decode: str,
    policy: Policy = baton,
) -> str | None:
    """Returns the cheapest other decode worker of its pairing to replace `decode`, or None."""
    seed = xxh64_intdigest(request_id.encode())
    pairings = {c.pairing for c in candidates if c.worker == decode}
    others = [
        c
        for c in candidates
        if c.role == "decode" and c.worker != decode and not c.excluded and c.pairing in pairings
    ]
    scored = _scores(others, num_tokens, policy, seed)
    return min(scored).candidate.worker if scored else None


def has_only_decode(candidates: Iterable[Candidate]) -> bool:
    """Returns whether decode workers are known and no prefill workers, whatever their state: the
    decode workers of this cluster compute all prompts."""
    return {c.role for c in candidates if c.role != "encode"} == {"decode"}


def ready_versions(candidates: Iterable[Candidate], role: Role) -> frozenset[str]:
    """Returns the versions of the workers of this role that can take requests."""
    return frozenset(c.version for c in candidates if c.role == role and not c.excluded)


def ready_dtypes(candidates: Iterable[Candidate], role: Role) -> frozenset[str]:
    """Returns the KV dtypes of the workers of this role that can take requests, as far as they are
    known."""
    ready = (c for c in candidates if c.role == role and not c.excluded)
    return frozenset(c.kv_dtype for c in ready if c.kv_dtype)


def has_version_gap(candidates: Collection[Candidate]) -> bool:
    """Returns whether workers of both roles can take requests, but no two are of one version: a
    phase of an upgrade in which no prefill worker can hand over to a decode worker."""
    prefills, decodes = (ready_versions(candidates, role) for role in ("prefill", "decode"))
    return bool(prefills and decodes) and prefills.isdisjoint(decodes)


def why_none(
    candidates: Collection[Candidate], needed: Collection[Role] = ("prefill", "decode")
) -> str:
    """Returns the reason why no placement is possible, as a sentence. `needed`: roles without whose
    workers the request cannot be served."""
    for role in needed:
        reasons = {c.excluded for c in candidates if c.role == role}
        if not reasons:
            return f"no {role} worker is known"
        if "" not in reasons:
            return f"no {role} worker can take work: {', '.join(sorted(reasons))}"
    if "decode" not in needed:
        return "no prefill worker has answered the request"
    if has_version_gap(candidates):
        return "no prefill and decode worker are of one version; finish the upgrade"
    prefills, decodes = (ready_dtypes(candidates, role) for role in ("prefill", "decode"))
    if prefills and decodes and prefills.isdisjoint(decodes):
        return (
            f"no prefill and decode worker have KV of one dtype: {', '.join(sorted(prefills))} and "
            f"{', '.join(sorted(decodes))}; {ONE_DTYPE}"
        )
    return "no prefill and decode worker serve the same model with the same KV layout"


def _scores(
    candidates: Iterable[Candidate], num_tokens: int, policy: Policy, seed: int
) -> list[Scored]:
    scores = []
    for candidate in candidates:
        if candidate.role == "encode":
            continue
        terms = policy(candidate, num_tokens)
        rank = xxh64_intdigest(candidate.worker.encode(), seed)
        scores.append(Scored(candidate.excluded != "", sum(terms.values()), rank, candidate, terms))
    return scores


def _alone(
    scored: list[Scored],
    num_tokens: int,
    alone: Policy | None,
    broken: Collection[tuple[str, str]],
) -> tuple[Scored, ...]:
    """Returns the decode workers in order, scored as computing the prompt themselves."""
    if alone is None:
        return ()
    singles = []
    for is_excluded, _, rank, candidate, _ in scored:
        if candidate.role == "decode":
            terms = alone(candidate, num_tokens)
            barred = is_excluded or ("", candidate.worker) in broken
            singles.append(Scored(barred, sum(terms.values()), rank, candidate, terms))
    singles.sort()
    return tuple(singles)


def _pair_order(pair: tuple[Scored, Scored]) -> tuple[float, int, int]:
    prefill, decode = pair
    return prefill.cost + decode.cost, prefill.rank, decode.rank


def _by_pairing(scored: list[Scored]) -> Iterator[tuple[list[Scored], list[Scored]]]:
    """Returns the prefill and the decode workers that can take requests, for each pairing."""
    groups: dict[bytes, tuple[list[Scored], list[Scored]]] = {}
    for one in scored:
        if not one.is_excluded:
            candidate = one.candidate
            group = groups.get(candidate.pairing)
            if group is None:
                group = groups[candidate.pairing] = ([], [])
            group[candidate.role == "decode"].append(one)
    return iter(groups.values())


def _pairs(
    prefills: list[Scored], decodes: list[Scored], broken: Collection[tuple[str, str]]
) -> Iterator[tuple[Scored, Scored]]:
    """Yields each prefill worker with its cheapest decode worker, while they may be the best pair.

    Both lists are in order. A pair's cost is the sum of its workers', so once a prefill worker with
    the cheapest decode worker costs more than a pair already found, all later ones do, too.
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
