"""Which workers a request runs on, and why: a pure function of the request and a snapshot.

Costs are in tokens of prefill work. The terms:

    prefill worker   uncached       prompt tokens it would have to compute
                     queue          prompt tokens it has been given and not finished
    decode worker    transfer       prompt tokens whose KV it lacks, times `TRANSFER_WEIGHT`
                     interference   sequences it runs, times `INTERFERENCE_WEIGHT`

The pair of least cost wins, among workers that may pair. Equal costs are decided by rendezvous
hashing, so that all routers agree and load spreads.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

# Moving a token's KV costs about this part of computing it.
TRANSFER_WEIGHT = 0.05
# A sequence more slows the others of a decode worker about as much as this many prefill tokens.
INTERFERENCE_WEIGHT = 8.0

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker at this moment.

    Attributes:
        pairing: workers hand blocks to each other only if theirs is equal.
        num_cached_tokens: leading prompt tokens whose KV it holds.
        num_queued_tokens: prompt tokens it was given and has not finished.
        num_sequences: sequences it was given and has not finished.
        excluded: why it cannot be chosen; empty if it can.
    """

    worker: str
    role: Role
    pairing: bytes
    num_cached_tokens: int = 0
    num_queued_tokens: int = 0
    num_sequences: int = 0
    excluded: str = ""


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate with its cost, term by term."""

    candidate: Candidate
    terms: dict[str, float]

    @property
    def cost(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen workers, and every candidate in the order of its cost."""

    prefill: str
    decode: str
    scored: tuple[Scored, ...]


def place(
    request_id: str,
    num_tokens: int,
    candidates: list[Candidate],
    broken: Collection[tuple[str, str]] = (),
) -> Placement | None:
    """Chooses a prefill and a decode worker, or None if no two workers may pair.

    `broken`: prefill and decode workers that have just failed to work together.
    """
    scored = [Scored(c, _terms(c, num_tokens)) for c in candidates]
    usable = [s for s in scored if not s.candidate.excluded]
    prefills, decodes = (
        [s for s in usable if s.candidate.role == role] for role in ("prefill", "decode")
    )
    pairs = [
        (p, d)
        for p in prefills
        for d in decodes
        if p.candidate.pairing == d.candidate.pairing
        and (p.candidate.worker, d.candidate.worker) not in broken
    ]
    if not pairs:
        return None

    def order(pair: tuple[Scored, Scored]) -> tuple[float, bytes]:
        prefill, decode = pair
        names = (request_id, prefill.candidate.worker, decode.candidate.worker)
        return prefill.cost + decode.cost, _rendezvous(*names)

    prefill, decode = min(pairs, key=order)
    by_cost = sorted(scored, key=lambda s: (bool(s.candidate.excluded), s.cost, s.candidate.worker))
    return Placement(prefill.candidate.worker, decode.candidate.worker, tuple(by_cost))


def why_none(candidates: list[Candidate]) -> str:
    """A sentence on why no placement is possible."""
    for role in ("prefill", "decode"):
        reasons = {c.excluded for c in candidates if c.role == role}
        if not reasons:
            return f"no {role} worker is known"
        if "" not in reasons:
            return f"no {role} worker can take work: {', '.join(sorted(reasons))}"
    return "no prefill and decode worker serve the same model with the same KV layout"


def _terms(candidate: Candidate, num_tokens: int) -> dict[str, float]:
    missing = float(max(0, num_tokens - candidate.num_cached_tokens))
    if candidate.role == "prefill":
        return {"uncached": missing, "queue": float(candidate.num_queued_tokens)}
    return {
        "transfer": missing * TRANSFER_WEIGHT,
        "interference": candidate.num_sequences * INTERFERENCE_WEIGHT,
    }


def _rendezvous(*names: str) -> bytes:
    return hashlib.sha256("\0".join(names).encode()).digest()
