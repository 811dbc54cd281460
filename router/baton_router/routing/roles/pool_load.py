"""Load of the encode, prefill and decode pools, relative to latency objectives.

The demand of several routers adds up. Independent of the transport between them.
"""

from collections.abc import Collection
from dataclasses import dataclass

from baton.rpc.worker_role import Role
from baton.settings import setting
from baton_router.routing.admission.policy import LIMIT
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import PRIOR, Rates

# Queue of each prefill worker, in seconds, from which requests queued at the router count as
# waiting for prefill (they wait above `baton_router.routing.admission.forecast.QUEUE_SECONDS`).
BUSY_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives."""

    ttft_ms: float = setting(
        2000.0,
        "TTFT objective in milliseconds: the load of prefill workers relative to it decides about "
        "changes of roles; workers with --policy deadline are told when each first token is due by "
        "it.",
        gt=0,
    )
    itl_ms: float = setting(
        50.0,
        "Inter-token latency objective in milliseconds: as --slo-ttft-ms, for decode workers.",
        gt=0,
    )

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.ttft_ms / 1000

    @property
    def itl(self) -> float:
        """Inter-token latency, in seconds."""
        return self.itl_ms / 1000


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """Demand of one or more routers on all pools.

    Attributes:
        prefill_seconds: seconds that one worker would take to compute all pending prompts, with the
            images that prefill workers encode.
        num_held_tokens: tokens whose KV the decoding sequences hold, or will hold at their ends.
        num_sequences: sequences that decode.
        encoder_seconds: seconds that one worker would take to encode the pending images of the
            encode pool; without encode workers, those of the prefill pool.
    """

    prefill_seconds: float = 0.0
    num_held_tokens: float = 0.0
    num_sequences: float = 0.0
    encoder_seconds: float = 0.0

    def __add__(self, other: "PoolDemand") -> "PoolDemand":
        return PoolDemand(
            self.prefill_seconds + other.prefill_seconds,
            self.num_held_tokens + other.num_held_tokens,
            self.num_sequences + other.num_sequences,
            self.encoder_seconds + other.encoder_seconds,
        )


@dataclass(frozen=True, slots=True)
class Backlog:
    """Backlog of one router.

    Attributes:
        num_waiting: requests in its admission queue.
        num_waiting_tokens: prompt tokens of those.
        num_waiting_encoder_tokens: tokens of the images of those.
        num_in_flight: admitted requests that have not ended.
        num_tokens_in_flight: tokens whose KV those will hold on decode workers at their ends.
    """

    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_in_flight: int = 0
    num_tokens_in_flight: int = 0
    num_waiting_encoder_tokens: int = 0


def demand_of(workers: Collection[Candidate], backlog: Backlog) -> PoolDemand:
    """Returns the demand of this router: requests on the workers and queued ones. Queued requests
    count if they wait for decode capacity or a prefill worker, not if they wait for their tenant's
    quota."""
    prefills, decodes = _ready(workers, "prefill"), _ready(workers, "decode")
    encodes = _ready(workers, "encode")
    encoders = encodes or prefills
    queues = [one.queue_seconds() for one in prefills]
    seconds = sum(queues)
    encoder_seconds = sum(_encoder_seconds(one, one.num_queued_encoder_tokens) for one in encoders)
    # Some sequences assigned to decode workers are still in prefill.
    num_given = sum(one.num_sequences for one in decodes)
    num_decoding = max(0, num_given - sum(one.num_sequences for one in prefills))
    held = backlog.num_tokens_in_flight * num_decoding / num_given if num_given else 0.0
    if _is_full(decodes, backlog):
        held += backlog.num_waiting * backlog.num_tokens_in_flight / backlog.num_in_flight
    elif queues and min(queues) >= BUSY_SECONDS:
        num_tokens, num_encoder = backlog.num_waiting_tokens, backlog.num_waiting_encoder_tokens
        at_prefill = 0 if encodes else num_encoder
        seconds += min(_rates(one).queue_seconds(num_tokens, at_prefill) for one in prefills)
        encoder_seconds += min(_encoder_seconds(one, num_encoder) for one in encoders)
    return PoolDemand(seconds, held, num_decoding, encoder_seconds)


def _is_full(decodes: Collection[Candidate], backlog: Backlog) -> bool:
    """Returns whether decode workers lack KV capacity for one more average request."""
    room = _room(decodes)
    if room is None or not backlog.num_in_flight:
        return False
    tokens = backlog.num_tokens_in_flight
    return tokens + tokens / backlog.num_in_flight > LIMIT * room


def pressures_of(
    workers: Collection[Candidate], demand: PoolDemand, objectives: Objectives
) -> dict[Role, float]:
    """Returns the pressure of each pool: its load as a fraction of its objective."""
    return {
        "encode": encode_pressure(workers, demand, objectives),
        "prefill": prefill_pressure(workers, demand, objectives),
        "decode": decode_pressure(workers, demand, objectives),
    }


def encode_pressure(
    workers: Collection[Candidate], demand: PoolDemand, objectives: Objectives
) -> float:
    """Returns the wait of a new image as a fraction of the TTFT objective; without encode workers,
    the wait if one of them had to encode what prefill workers have queued."""
    num_workers = len(_ready(workers, "encode"))
    return demand.encoder_seconds / max(1, num_workers) / objectives.ttft


def prefill_pressure(
    workers: Collection[Candidate], demand: PoolDemand, objectives: Objectives
) -> float:
    """Returns the wait of a new prompt as a fraction of the TTFT objective; 0 without workers."""
    num_workers = len(_ready(workers, "prefill"))
    return demand.prefill_seconds / num_workers / objectives.ttft if num_workers else 0.0


def decode_pressure(
    workers: Collection[Candidate], demand: PoolDemand, objectives: Objectives
) -> float:
    """Returns the KV occupancy of the decode workers or their inter-token latency as a fraction of
    its objective, whichever is larger; 0 without workers or sequences."""
    decodes = _ready(workers, "decode")
    if not decodes or not demand.num_sequences:
        return 0.0
    room = _room(decodes)
    occupancy = demand.num_held_tokens / room if room else 0.0
    each = demand.num_sequences / len(decodes)
    between = sum(_rates(one).decode_seconds(each) for one in decodes) / len(decodes)
    return max(occupancy, between / objectives.itl)


def _encoder_seconds(worker: Candidate, num_tokens: int) -> float:
    return num_tokens * _rates(worker).encoder_seconds_per_token


def _ready(workers: Collection[Candidate], role: str) -> list[Candidate]:
    return [one for one in workers if one.role == role and not one.excluded]


def _room(decodes: Collection[Candidate]) -> int | None:
    """Returns the KV capacity of all of `decodes`, in tokens; None if one is unknown."""
    rooms = [one.max_held_tokens for one in decodes if one.max_held_tokens is not None]
    return sum(rooms) if len(rooms) == len(decodes) else None


def _rates(candidate: Candidate) -> Rates:
    return candidate.rates or PRIOR
