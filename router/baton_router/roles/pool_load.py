"""Load of the prefill and decode pools, against what keeps latency good.

What one router has given them and what another one has add up. Knows nothing of how it is told.
"""

from collections.abc import Collection
from dataclasses import dataclass

from baton_router.admission.policy import LIMIT
from baton_router.fleet.candidate import Candidate
from baton_router.fleet.cost_rates import PRIOR, Rates

# While prompts wait at the router because prefill workers are busy, each of those has this much to
# do (`baton_router.admission.forecast.QUEUE_SECONDS` is what makes them wait).
BUSY_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives, in seconds.

    Attributes:
        ttft: until the first token.
        itl: from token to token.
    """

    ttft: float = 2.0
    itl: float = 0.05


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """Demand on the pools, from routers.

    Attributes:
        prefill_seconds: of prompts that are yet to be computed, on one worker.
        num_held_tokens: tokens whose KV is held among the decodes, or will be before they end.
        num_sequences: that decode.
    """

    prefill_seconds: float = 0.0
    num_held_tokens: float = 0.0
    num_sequences: float = 0.0

    def __add__(self, other: "PoolDemand") -> "PoolDemand":
        return PoolDemand(
            self.prefill_seconds + other.prefill_seconds,
            self.num_held_tokens + other.num_held_tokens,
            self.num_sequences + other.num_sequences,
        )


@dataclass(frozen=True, slots=True)
class Backlog:
    """Backlog of one router.

    Attributes:
        num_waiting: requests that wait there for their turn.
        num_waiting_tokens: of their prompts.
        num_in_flight: requests that it has placed.
        num_tokens_in_flight: tokens whose KV those will hold among the decodes at their ends.
    """

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_in_flight: int = 0
    num_tokens_in_flight: int = 0


def demand_of(workers: Collection[Candidate], backlog: Backlog) -> PoolDemand:
    """What this router has given the workers, and has waiting for them. What waits counts where it
    waits for room among the decodes, or for a prefill worker; not where it is for its tenant's
    allowance."""
    prefills, decodes = _ready(workers, "prefill"), _ready(workers, "decode")
    queues = [_rates(one).queue_seconds(one.num_queued_tokens) for one in prefills]
    seconds = sum(queues)
    # Of the sequences that decode workers were given, some are with a prefill worker yet.
    num_given = sum(one.num_sequences for one in decodes)
    num_decoding = max(0, num_given - sum(one.num_sequences for one in prefills))
    held = backlog.num_tokens_in_flight * num_decoding / num_given if num_given else 0.0
    if _is_full(decodes, backlog):
        held += backlog.num_waiting * backlog.num_tokens_in_flight / backlog.num_in_flight
    elif queues and min(queues) >= BUSY_SECONDS:
        seconds += min(_rates(one).queue_seconds(backlog.num_waiting_tokens) for one in prefills)
    return PoolDemand(seconds, held, num_decoding)


def _is_full(decodes: Collection[Candidate], backlog: Backlog) -> bool:
    """Whether decode workers have no room for one more request like those that are there."""
    room = _room(decodes)
    if room is None or not backlog.num_in_flight:
        return False
    tokens = backlog.num_tokens_in_flight
    return tokens + tokens / backlog.num_in_flight > LIMIT * room


def prefill_pressure(
    workers: Collection[Candidate], demand: PoolDemand, objectives: Objectives
) -> float:
    """How long a new prompt waits, as a part of what it may; 0 where there is no worker."""
    num_workers = len(_ready(workers, "prefill"))
    return demand.prefill_seconds / num_workers / objectives.ttft if num_workers else 0.0


def decode_pressure(
    workers: Collection[Candidate], demand: PoolDemand, objectives: Objectives
) -> float:
    """The part of their room that is taken, or the time between tokens as a part of what it may be,
    whichever is more; 0 where there is no worker, or nothing to do."""
    decodes = _ready(workers, "decode")
    if not decodes or not demand.num_sequences:
        return 0.0
    room = _room(decodes)
    occupancy = demand.num_held_tokens / room if room else 0.0
    each = demand.num_sequences / len(decodes)
    between = sum(_rates(one).decode_seconds(each) for one in decodes) / len(decodes)
    return max(occupancy, between / objectives.itl)


def _ready(workers: Collection[Candidate], role: str) -> list[Candidate]:
    return [one for one in workers if one.role == role and not one.excluded]


def _room(decodes: Collection[Candidate]) -> int | None:
    """Tokens that they hold together at most; None: not known."""
    rooms = [one.max_held_tokens for one in decodes if one.max_held_tokens is not None]
    return sum(rooms) if len(rooms) == len(decodes) else None


def _rates(candidate: Candidate) -> Rates:
    return candidate.rates or PRIOR
