"""Sources of a remote prefix fetch: workers that could lend a prefill worker a cached prefix of the
prompt. A pure function of the snapshot.

The placement policy decides if a fetch is cheaper than computing the prefix.
"""

from collections.abc import Iterable
from operator import attrgetter

from baton_router.routing.fleet.candidate import Candidate

_num_cached_tokens = attrgetter("num_cached_tokens")
_load = attrgetter("num_queued_tokens", "num_sequences", "worker")


def with_sources(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates; each prefill worker with the source of its pairing, in either role,
    that has the longest cached prefix, if that is longer than its own."""
    candidates = list(candidates)
    # The longest cached prefix first, then the least load: sorts are stable.
    holders = sorted((c for c in candidates if c.num_cached_tokens and not c.excluded), key=_load)
    holders.sort(key=_num_cached_tokens, reverse=True)
    best: dict[bytes, list[Candidate]] = {}
    for holder in holders:
        of_pairing = best.setdefault(holder.pairing, [])
        if len(of_pairing) < 2:
            of_pairing.append(holder)
    return [
        _with_source(c, best.get(c.pairing, ())) if c.role == "prefill" else c for c in candidates
    ]


def _with_source(candidate: Candidate, holders: Iterable[Candidate]) -> Candidate:
    for holder in holders:
        if holder.num_cached_tokens <= candidate.num_cached_tokens:
            break
        if holder.worker != candidate.worker:
            source = holder.worker, holder.num_cached_tokens, holder.num_recent_tokens
            return Candidate._make(candidate[: -len(source)] + source)
    return candidate
