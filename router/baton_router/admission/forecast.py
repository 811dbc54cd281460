"""Forecasts of TTFT and of decode KV occupancy, the input of admission control.

The prompt's part is told by the fitted rates of the worker that it would be placed on. Of answers
it is learned here how long they are, as a part of what was asked for at most, and how long a token
takes. Knows nothing of calls, nor of what a request is made of, so that the router and the
simulator have it in common.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.serving.deadline import Clock
from baton_router.admission.admission_queue import Forecast
from baton_router.admission.policy import (
    AdmissionPolicy,
    Arrival,
    DecodePool,
    InFlight,
    none,
    predicted,
)
from baton_router.fleet.candidate import Candidate
from baton_router.fleet.cost_rates import PRIOR, Rates
from baton_router.placement.cost_model import PULL
from baton_router.placement.decision import Decision
from baton_router.placement.placement import Placement
from baton_router.request import Demand

# Prompts that wait at a prefill worker for so long keep it busy; who comes later waits here, where
# tenants have shares.
QUEUE_SECONDS = 0.5

_WEIGHT = 0.05  # of one answer, in what is learned
_PRIOR_PART = 0.5  # of `max_tokens`
_PRIOR_TOKEN_SECONDS = 0.01

T = TypeVar("T")


class Forecasts(Generic[T]):
    """Expectations of one router.

    Args:
        decide: where a request would be placed now, given the last decision about it.
        demand: what a request asks for.
        admission: says whether the decode workers will have room; with `none` everybody goes.
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
        """Requests that were let in and have not ended."""
        return len(self._in_flight)

    @property
    def num_tokens_in_flight(self) -> int:
        """Tokens whose KV those are expected to hold at their ends."""
        return sum(one.num_tokens for one in self._in_flight.values())

    def forecast(
        self, request: T, num_tokens_ahead: int = 0, earlier: Decision | None = None
    ) -> Forecast:
        """Forecasts the request's TTFT and room if it were placed now, after queued prompts of
        `num_tokens_ahead` tokens. `earlier` is the last decision about it.

        Where no worker can take it, that is not for admission to say: there is room. So there is
        where nothing is in flight, whatever is expected: only by trying is it learned better.
        """
        if not self._in_flight and not num_tokens_ahead:
            return Forecast(True, 0.0)
        demand = self._demand(request)
        decision = self._decide(request, earlier)
        ready = [c for c in decision.question.candidates if not c.excluded]
        prefills = [c for c in ready if c.role == "prefill"]
        decodes = [c for c in ready if c.role == "decode"]
        if not prefills or not decodes or decision.placement is None:
            return Forecast(True, 0.0, decision=decision)
        queue = min(map(_queue_seconds, prefills))
        ahead = min(_rates(c).queue_seconds(num_tokens_ahead) for c in prefills) / len(prefills)
        ttft = _prefill_seconds(decision.placement, demand.num_tokens) + ahead
        if self._admission is none:
            return Forecast(True, ttft, decision=decision)
        drain = max(0.0, queue - QUEUE_SECONDS)
        room = [c.max_held_tokens for c in decodes if c.max_held_tokens is not None]
        if len(room) < len(decodes):
            return Forecast(drain == 0.0, ttft, drain, decision)
        pool = DecodePool(tuple(self._in_flight.values()), sum(room))
        arrival = Arrival(self._clock(), ttft, self._num_held(demand))
        verdict = self._admission(arrival, pool)
        has_room = verdict.is_admitted and drain == 0.0
        return Forecast(has_room, ttft, max(drain, verdict.retry_after), decision)

    def begin(self, request: T, forecast: Forecast) -> None:
        """The request is in flight from now on, as `forecast` has it."""
        demand, prefill_ends = self._demand(request), self._clock() + forecast.ttft_seconds
        self._in_flight[id(request)] = InFlight(
            prefill_ends,
            prefill_ends + self._num_output(demand) * self._token_seconds,
            self._num_held(demand),
        )

    def end(self, request: T, num_output_tokens: int, first_token_at: float | None) -> None:
        """The request is not in flight any more, and its answer is learned from.

        Args:
            first_token_at: when its first token came, in seconds of the clock; None: none did.
        """
        del self._in_flight[id(request)]
        if first_token_at is not None and num_output_tokens > 0:
            self._learn(self._demand(request), num_output_tokens, first_token_at)

    def _learn(self, demand: Demand, num_output_tokens: int, first_token_at: float) -> None:
        most = demand.max_tokens * demand.num_answers
        self._part += _WEIGHT * (min(1.0, num_output_tokens / most) - self._part)
        if num_output_tokens > demand.num_answers:
            seconds = self._clock() - first_token_at
            per_token = seconds * demand.num_answers / num_output_tokens
            self._token_seconds += _WEIGHT * (per_token - self._token_seconds)

    def _num_output(self, demand: Demand) -> float:
        """Tokens that each of its sequences is expected to have."""
        return self._part * demand.max_tokens

    def _num_held(self, demand: Demand) -> int:
        """Tokens whose KV it will hold at its end."""
        return demand.num_tokens + round(demand.num_sequences * self._num_output(demand))


def _rates(candidate: Candidate) -> Rates:
    return candidate.rates or PRIOR


def _queue_seconds(candidate: Candidate) -> float:
    return _rates(candidate).queue_seconds(candidate.num_queued_tokens)


def _prefill_seconds(placement: Placement, num_tokens: int) -> float:
    """Until the first token of a prompt that is placed so now."""
    computing = placement.chosen[0]
    cached = min(placement.num_cached_tokens, num_tokens)
    own = _rates(computing.candidate).prefill_seconds(num_tokens - cached, cached)
    return _queue_seconds(computing.candidate) + computing.terms.get(PULL, 0.0) + own
