"""Admission policies: whether the decode workers will have room for a request after its prefill.

Pure functions of a request and a snapshot, by name, as placement policies are. A prompt takes a
while to be computed, and only then takes its place among the decodes. Who looks at the decodes of
this moment lets in too many while they are few, and nobody once those have arrived: prefill and
decode are then busy in turns. `predicted` looks at the moment at which the prompt will be computed,
and counts the prompts that will be by then.

Knows nothing of workers, nor of how the expectations came about.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request that was let in and has not ended. Moments in seconds, on one clock.

    Attributes:
        prefill_ends: when its prompt is expected to be computed, or was.
        decode_ends: when its last token is expected.
        num_tokens: tokens whose KV it holds among the decodes.
    """

    prefill_ends: float
    decode_ends: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that asks to be let in.

    Attributes:
        now: the moment, in seconds.
        prefill_seconds: until its prompt is expected to be computed, its wait included.
        num_tokens: tokens whose KV it will hold among the decodes.
    """

    now: float
    prefill_seconds: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DecodePool:
    """The decode workers together, at one moment.

    Attributes:
        in_flight: what was let in and has not ended, on its way to them or there.
        max_held_tokens: tokens whose KV they may hold together, above 0.
    """

    in_flight: tuple[InFlight, ...]
    max_held_tokens: int

    def occupancy(self, now: float, at: float) -> float:
        """The part of their room that is expected to be taken at a moment that is not before `now`.

        A request that should have ended by now has not: nothing says when it will, so it counts.
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
        occupancy: what the decision was made by, the request included.
        retry_after: seconds until it is expected to be let in; 0 if it is.
    """

    is_admitted: bool
    occupancy: float
    retry_after: float = 0.0


AdmissionPolicy = Callable[[Arrival, DecodePool], AdmissionDecision]

AdmissionName = Literal["none", "naive", "predicted"]
ADMISSION_NAMES: tuple[AdmissionName, ...] = get_args(AdmissionName)

LIMIT = 0.9
"""The part of the decode workers' room that requests may be expected to take."""

_MAX_MOMENTS = 32  # that are looked at for the time to retry


def admission_named(name: AdmissionName) -> AdmissionPolicy:
    """The policy of that name."""
    policies: dict[AdmissionName, AdmissionPolicy] = {
        "none": none,
        "naive": naive,
        "predicted": predicted,
    }
    return policies[name]


def none(arrival: Arrival, pool: DecodePool) -> AdmissionDecision:
    """Everybody is let in."""
    at = arrival.now + arrival.prefill_seconds
    return AdmissionDecision(True, pool.occupancy(arrival.now, at) + _share(arrival, pool))


def naive(arrival: Arrival, pool: DecodePool) -> AdmissionDecision:
    """Who would not fit among the decodes of this moment is not let in."""
    return _judge(arrival, pool, 0.0)


def predicted(arrival: Arrival, pool: DecodePool) -> AdmissionDecision:
    """Who would not fit among the decodes of the moment at which it joins them is not let in."""
    return _judge(arrival, pool, arrival.prefill_seconds)


def _judge(arrival: Arrival, pool: DecodePool, ahead: float) -> AdmissionDecision:
    """By the decodes so many seconds ahead. A pool that is empty then takes anybody."""
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
    """Moments from which a request that comes then finds others gone; the last one is among them,
    and of many only some are."""
    moments = sorted(max(now, one.decode_ends - ahead) for one in pool.in_flight)
    stride = -(-len(moments) // _MAX_MOMENTS) or 1
    return moments[::-stride][::-1]


def _first(holds: Callable[[float], bool], now: float, moments: Iterable[float]) -> float:
    """Seconds until the first of the moments for which it holds; until the last if for none."""
    moment = now
    for moment in moments:
        if holds(moment):
            break
    return moment - now
