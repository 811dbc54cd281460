"""Sources of a remote prefix fetch: workers that could lend a prefill worker a cached prefix of the
prompt. A pure function of the snapshot.

The placement policy decides if a fetch is cheaper than computing the prefix.
"""

from collections.abc import Iterable

from baton_router.fleet.candidate import Candidate


def with_sources(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates; each prefill worker with the source of its pairing, in either role,
    that has the longest cached prefix, if that is longer than its own."""
    candidates = list(candidates)
    holders = sorted((c for c in candidates if c.num_cached_tokens and not c.excluded), key=_order)
    best: dict[bytes, list[Candidate]] = {}
    for holder in holders:
        best.setdefault(holder.pairing, []).append(holder)
    return [_with_source(c, best.get(c.pairing, [])[:2]) for c in candidates]


def _with_source(candidate: Candidate, holders: list[Candidate]) -> Candidate:
    for holder in holders if candidate.role == "prefill" else ():
        if holder.num_cached_tokens <= candidate.num_cached_tokens:
            break
        if holder.worker != candidate.worker:
            return candidate._replace(
                source=holder.worker,
                num_source_tokens=holder.num_cached_tokens,
                num_source_recent_tokens=holder.num_recent_tokens,
            )
    return candidate


def _order(holder: Candidate) -> tuple[int, int, int, str]:
    """Sorts by the longest cached prefix, then by the least load."""
    return (
        -holder.num_cached_tokens,
        holder.num_queued_tokens,
        holder.num_sequences,
        holder.worker,
    )
