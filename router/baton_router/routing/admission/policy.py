"""Admission policies: decide whether decode workers will have KV capacity after the prefill.

A policy has a name and is a pure function of a request and a snapshot, like placement policies. A
request holds decode capacity only once its prompt is computed. A policy that checks the present
occupancy (`naive`) admits too many requests while few decode, and none once those have arrived, so
that prefill and decode workers are busy alternately. `predicted` checks the occupancy expected at
the end of the request's prefill, which includes prompts computed by then.

Independent of workers and of the source of the forecasts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args


@dataclass(frozen=True, slots=True)
class InFlight:
    """Admitted request that has not ended. Times are in seconds, on one clock.

    Attributes:
        prefill_ends: expected or actual end of its prefill.
        decode_ends: expected time of its last token.
        num_tokens: tokens whose KV it holds on a decode worker.
        worker: that decode worker, as far as it was known at admission; empty: any.
    """

    prefill_ends: float
    decode_ends: float
    num_tokens: int
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request to be admitted or rejected.

    Attributes:
        now: current time, in seconds.
        prefill_seconds: expected seconds until its prompt is computed, queueing included.
        num_tokens: tokens whose KV it will hold on a decode worker.
    """

    now: float
    prefill_seconds: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodePool:
    """Snapshot of all decode workers that are large enough for a request, as one pool.

    Attributes:
        in_flight: admitted requests that have not ended, in prefill or decode.
        max_held_tokens: tokens whose KV the pool can hold, above 0.
    """

    in_flight: tuple[InFlight, ...]
    max_held_tokens: int

    def occupancy(self, now: float, at: float) -> float:
        """Returns the fraction of the pool expected to be occupied at time `at`, at least `now`.

        A request still in flight after its expected end counts: its real end is unknown.
        """
        held = sum(
            one.num_tokens
            for one in self.in_flight
            if one.prefill_ends <= at and not now < one.decode_ends <= at
        )
        return held / self.max_held_tokens


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """Decision of an admission policy.

    Attributes:
        occupancy: the fraction that the policy compared with `LIMIT`, the request included.
        retry_after: seconds until the request is expected to be admitted; 0 if it is.
    """

    is_admitted: bool
    occupancy: float
    retry_after: float = 0.0


AdmissionPolicy = Callable[[Arrival, DecodePool], AdmissionDecision]

AdmissionName = Literal["none", "naive", "predicted"]
ADMISSION_NAMES: tuple[AdmissionName, ...] = get_args(AdmissionName)

LIMIT = 0.9
"""Maximum expected KV occupancy of the decode workers, as a fraction."""

_MAX_MOMENTS = 32  # times that are checked to find `retry_after`


def admission_named(name: AdmissionName) -> AdmissionPolicy:
    """Returns the admission policy called `name`."""
    policies: dict[AdmissionName, AdmissionPolicy] = {
        "none": none,
        "naive": naive,
        "predicted": predicted,
    }
    return policies[name]


def none(arrival: Arrival, pool: DecodePool) -> AdmissionDecision:
    """Admits every request."""
    at = arrival.now + arrival.prefill_seconds
    return AdmissionDecision(True, pool.occupancy(arrival.now, at) + _share(arrival, pool))


def naive(arrival: Arrival, pool: DecodePool) -> AdmissionDecision:
    """Admits a request if it fits beside the present decodes."""
    return _decide(arrival, pool, 0.0)


def predicted(arrival: Arrival, pool: DecodePool) -> AdmissionDecision:
    """Admits a request if it fits beside the decodes expected when its prefill ends."""
    return _decide(arrival, pool, arrival.prefill_seconds)


def _decide(arrival: Arrival, pool: DecodePool, ahead: float) -> AdmissionDecision:
    """Decides by the occupancy `ahead` seconds from now. A pool empty then admits any request."""
    now, own = arrival.now, _share(arrival, pool)

    def is_room(moment: float) -> bool:
        others = pool.occupancy(now, moment + ahead)
        return others == 0 or others + own <= LIMIT

    occupancy = pool.occupancy(now, now + ahead) + own
    if is_room(now):
        return AdmissionDecision(True, occupancy)
    return AdmissionDecision(False, occupancy, _first(is_room, now, _endings(pool, now, ahead)))


def _share(arrival: Arrival, pool: DecodePool) -> float:
    return arrival.num_tokens / pool.max_held_tokens


def _endings(pool: DecodePool, now: float, ahead: float) -> list[float]:
    """Returns the times from which an arriving request finds others ended, in order: at most
    `_MAX_MOMENTS`, evenly sampled, the last one included."""
    moments = sorted(max(now, one.decode_ends - ahead) for one in pool.in_flight)
    stride = -(-len(moments) // _MAX_MOMENTS) or 1
    return moments[::-stride][::-1]


def _first(holds: Callable[[float], bool], now: float, moments: Iterable[float]) -> float:
    """Returns the seconds until the first of `moments` that satisfies `holds`, else the last."""
    moment = now
    for moment in moments:
        if holds(moment):
            break
    return moment - now
