"""Forecasts of TTFT and of decode KV occupancy, the input of admission control.

Prefill time comes from the fitted rates of the worker that would get the request, and from its
encoder work, if it has any. Output length, as
a fraction of `max_tokens`, and seconds per output token are learned here from ended requests.
Independent of RPCs and of the request's type, so that the router and the simulator share this code.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.serving.deadline import Clock
from baton_router.call.request import Demand
from baton_router.routing.admission.admission_queue import Forecast
from baton_router.routing.admission.policy import (
    AdmissionPolicy,
    Arrival,
    DecodePool,
    InFlight,
    none,
    predicted,
)
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import PRIOR, Rates
from baton_router.routing.placement.cost_model import ENCODE, FETCH
from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.fit import TOO_SMALL
from baton_router.routing.placement.placement import Placement

# Queue of a prefill worker, in seconds, that keeps it busy. Beyond it requests wait in the router's
# admission queue, which is fair across tenants.
QUEUE_SECONDS = 0.5

_WEIGHT = 0.05  # of one ended request, in the moving averages
_PRIOR_PART = 0.5  # output length before any observation, as a fraction of `max_tokens`
_PRIOR_TOKEN_SECONDS = 0.01

T = TypeVar("T")


class Forecasts(Generic[T]):
    """Forecasts of one router, and the requests that it has in flight.

    Args:
        decide: returns a request's placement decision now, given the last decision about it.
        demand: returns the demand of a request.
        admission: policy for the decode workers' KV capacity; `none` admits every request.
    """

    def __init__(
        self,
        decide: Callable[[T, Decision | None], Decision],
        demand: Callable[[T], Demand],
        admission: AdmissionPolicy = predicted,
        clock: Clock = time.monotonic,
    ) -> None:
        self._decide = decide
        self._demand = demand
        self._admission = admission
        self._clock = clock
        self._in_flight: dict[int, InFlight] = {}
        self._part = _PRIOR_PART
        self._token_seconds = _PRIOR_TOKEN_SECONDS

    @property
    def num_in_flight(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._in_flight)

    @property
    def num_tokens_in_flight(self) -> int:
        """Tokens whose KV the requests in flight are expected to hold at their ends."""
        return sum(one.num_tokens for one in self._in_flight.values())

    def forecast(
        self, request: T, num_tokens_ahead: int = 0, earlier: Decision | None = None
    ) -> Forecast:
        """Forecasts the request's TTFT and capacity if it were placed now, after queued prompts of
        `num_tokens_ahead` tokens. `earlier` is the last decision about it.

        Reports capacity if no worker can take the request, since placement rejects it, and if
        nothing is in flight or queued, since only a trial corrects a wrong estimate.
        """
        if not self._in_flight and not num_tokens_ahead:
            return Forecast(True, 0.0)
        demand = self._demand(request)
        decision = self._decide(request, earlier)
        ready = [c for c in decision.inputs.candidates if not c.excluded]
        decodes = [c for c in ready if c.role == "decode"]
        # Without prefill workers decode workers compute the prompt themselves.
        prefills = [c for c in ready if c.role == "prefill"] or decodes
        needs_decode = not decision.inputs.prefill_alone
        if not prefills or (needs_decode and not decodes) or decision.placement is None:
            return Forecast(True, 0.0, decision=decision)
        queue = min(one.queue_seconds() for one in prefills)
        ahead = min(_rates(c).queue_seconds(num_tokens_ahead) for c in prefills) / len(prefills)
        prefill = _prefill_seconds(decision.placement, demand.num_tokens)
        ttft = prefill + ahead
        if self._admission is none:
            return Forecast(True, ttft, decision=decision)
        # A decode worker that computes the prompt itself may be sooner than any queue is short.
        drain = max(0.0, min(queue, prefill) - QUEUE_SECONDS)
        room = [c.max_held_tokens for c in decodes if c.max_held_tokens is not None]
        if len(room) < len(decodes) or not needs_decode:
            return Forecast(drain == 0.0, ttft, drain, decision)
        pool = DecodePool(self._in_flight_beside(decision), sum(room))
        arrival = Arrival(self._clock(), ttft, self._num_held(demand))
        admission = self._admission(arrival, pool)
        has_room = admission.is_admitted and drain == 0.0
        return Forecast(has_room, ttft, max(drain, admission.retry_after), decision)

    def begin(self, request: T, forecast: Forecast) -> None:
        """Counts the request as in flight, with the times of its `forecast`."""
        demand, prefill_ends = self._demand(request), self._clock() + forecast.ttft_seconds
        placement = None if forecast.decision is None else forecast.decision.placement
        self._in_flight[id(request)] = InFlight(
            prefill_ends,
            prefill_ends + self._num_output(demand) * self._token_seconds,
            self._num_held(demand),
            "" if placement is None else placement.decode,
        )

    def end(self, request: T, num_output_tokens: int, first_token_at: float | None) -> None:
        """Stops counting the request as in flight, and learns from its output.

        Args:
            first_token_at: time of its first token, in seconds of the clock; None: it had none.
        """
        del self._in_flight[id(request)]
        if first_token_at is not None and num_output_tokens > 0:
            self._learn(self._demand(request), num_output_tokens, first_token_at)

    def _in_flight_beside(self, decision: Decision) -> tuple[InFlight, ...]:
        """Returns the requests in flight, without those on workers too small for this one."""
        small = {c.worker for c in decision.inputs.candidates if c.excluded == TOO_SMALL}
        return tuple(one for one in self._in_flight.values() if one.worker not in small)

    def _learn(self, demand: Demand, num_output_tokens: int, first_token_at: float) -> None:
        most = demand.max_tokens * demand.num_answers
        self._part += _WEIGHT * (min(1.0, num_output_tokens / most) - self._part)
        if num_output_tokens > demand.num_answers:
            seconds = self._clock() - first_token_at
            per_token = seconds * demand.num_answers / num_output_tokens
            self._token_seconds += _WEIGHT * (per_token - self._token_seconds)

    def _num_output(self, demand: Demand) -> float:
        """Returns the expected output tokens of each of the request's sequences."""
        return self._part * demand.max_tokens

    def _num_held(self, demand: Demand) -> int:
        """Returns the tokens whose KV the request is expected to hold at its end."""
        return demand.num_tokens + round(demand.num_sequences * self._num_output(demand))


def _rates(candidate: Candidate) -> Rates:
    return candidate.rates or PRIOR


def _prefill_seconds(placement: Placement, num_tokens: int) -> float:
    """Returns the seconds until the first token of a prompt with this placement."""
    computing = placement.chosen[0]
    cached = min(placement.num_cached_tokens, num_tokens)
    own = _rates(computing.candidate).prefill_seconds(num_tokens - cached, cached)
    others = computing.terms.get(FETCH, 0.0) + computing.terms.get(ENCODE, 0.0)
    return computing.candidate.queue_seconds() + others + own
