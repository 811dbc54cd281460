"""Sources of a remote prefix fetch: workers that could give a prefill worker the beginning of a
prompt. A pure function of the snapshot.

Whether that is worth it is the policy's to say.
"""

from collections.abc import Iterable
from dataclasses import replace

from baton_router.fleet.candidate import Candidate


def with_sources(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates; of the prefill workers each one with the worker, of either role, that holds
    most of the prompt and more than it does itself, if there is one that it may pair with."""
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
            return replace(
                candidate,
                source=holder.worker,
                num_source_tokens=holder.num_cached_tokens,
                num_source_recent_tokens=holder.num_recent_tokens,
            )
    return candidate


def _order(holder: Candidate) -> tuple[int, int, int, str]:
    """Who holds most, and of those the one with least to do."""
    return (
        -holder.num_cached_tokens,
        holder.num_queued_tokens,
        holder.num_sequences,
        holder.worker,
    )
