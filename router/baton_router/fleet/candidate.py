"""A worker as placement sees it: one moment's snapshot, from which everything is decided.

Knows nothing of how the snapshot came about, nor of what is made of it.
"""

from dataclasses import dataclass
from typing import Literal

from baton_router.fleet.cost_rates import Rates

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker at this moment.

    Attributes:
        pairing: workers hand blocks to each other only if theirs is equal.
        num_cached_tokens: leading prompt tokens whose KV it holds.
        num_queued_tokens: prompt tokens it was given and has not finished.
        num_recent_tokens: prompt tokens it was given to compute recently, decayed
            (`baton_router.fleet.decayed_counter`).
        num_sequences: sequences it was given and has not finished.
        num_held_tokens: tokens whose KV those sequences hold or were promised.
        max_held_tokens: tokens whose KV it has room for; None: not known.
        last_turn: grows from request to request that it is given; 0 before the first.
        rates: how long things take there; None: nothing was learned.
        version: of Baton; part of `pairing`. Empty: not said.
        source: another worker that holds more of the prompt and could give it to this one; empty if
            there is none, or nobody has looked (`baton_router.placement.prefix_source`).
        num_source_tokens: how much that one holds.
        num_source_recent_tokens: what that one was given to compute of late.
        excluded: why it cannot be chosen; empty if it can.
    """

    worker: str
    role: Role
    pairing: bytes
    num_cached_tokens: int = 0
    num_queued_tokens: int = 0
    num_recent_tokens: float = 0.0
    num_sequences: int = 0
    num_held_tokens: int = 0
    max_held_tokens: int | None = None
    last_turn: int = 0
    source: str = ""
    num_source_tokens: int = 0
    num_source_recent_tokens: float = 0.0
    excluded: str = ""
    rates: Rates | None = None
    version: str = ""
