"""What becomes of requests: when those in flight are expected to end, and how one would fare that
asks now.

The prompt's part is told by the fitted rates of the worker that it would be placed on. Of answers
it is learned here how long they are, as a part of what was asked for at most, and how long a token
takes. Knows nothing of calls, nor of what a request is made of, so that the router and the
simulator have it in common.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.serving.deadline import Clock
from router.admission import AdmissionPolicy, Arrival, DecodePool, InFlight, none, predicted
from router.candidate import Candidate
from router.cost_model import PULL
from router.decision import Decision
from router.placement import Placement
from router.rates import PRIOR, Rates
from router.turns import Forecast

# Prompts that wait at a prefill worker for so long keep it busy; who comes later waits here, where
# tenants have shares.
QUEUE_SECONDS = 0.5

# A request is asked about several times in a row while it is let through. For so long nothing
# changes but by what is placed and what ends here.
_SAME_MOMENT = 0.002

_WEIGHT = 0.05  # of one answer, in what is learned
_PRIOR_PART = 0.5  # of `max_tokens`
_PRIOR_TOKEN_SECONDS = 0.01

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for.

    Attributes:
        num_tokens: of its prompt.
        max_tokens: of each answer.
        num_answers: that it is to have.
        num_sequences: that are generated for them.
    """

    num_tokens: int
    max_tokens: int
    num_answers: int = 1
    num_sequences: int = 1

    @property
    def most_tokens(self) -> int:
        """That it may come to: the prompt, and all sequences as long as they may be."""
        return self.num_tokens + self.max_tokens * self.num_sequences

    def tokens_with(self, num_output_tokens: int) -> int:
        """That it has come to where so many are in the answers: sequences that are in none of them
        are as long."""
        return self.num_tokens + num_output_tokens * self.num_sequences // self.num_answers


@dataclass(slots=True)
class Answered:
    """What is seen of an answer: filled in while it is written.

    Attributes:
        first_token: when its first token came, in monotonic seconds.
    """

    num_output_tokens: int = 0
    first_token: float | None = None


class Prospects(Generic[T]):
    """Expectations of one router.

    Args:
        decide: where a request would be placed at this moment.
        demand: what a request asks for.
        admission: says whether the decode workers will have room; with `none` everybody goes.
    """

    def __init__(
        self,
        decide: Callable[[T], Decision],
        demand: Callable[[T], Demand],
        admission: AdmissionPolicy = predicted,
        clock: Clock = time.monotonic,
    ) -> None:
        self._decide = decide
        self._demand = demand
        self._admission = admission
        self._clock = clock
        self._in_flight: dict[int, InFlight] = {}
        self._last: tuple[T, float, Decision] | None = None  # who was asked about, and when
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

    def forecast(self, request: T, num_tokens_ahead: int = 0) -> Forecast:
        """How the request would fare if it went now, behind prompts of so many tokens.

        Where no worker can take it, that is not for admission to say: there is room. So there is
        where nothing is in flight, whatever is expected: only by trying is it learned better.
        """
        if not self._in_flight and not num_tokens_ahead:
            return Forecast(True, 0.0)
        demand = self._demand(request)
        decision = self._decision(request)
        ready = [c for c in decision.question.candidates if not c.excluded]
        prefills = [c for c in ready if c.role == "prefill"]
        decodes = [c for c in ready if c.role == "decode"]
        if not prefills or not decodes or decision.placement is None:
            return Forecast(True, 0.0)
        queue = min(map(_queue_seconds, prefills))
        ahead = min(_rates(c).queue_seconds(num_tokens_ahead) for c in prefills) / len(prefills)
        ttft = _prefill_seconds(decision.placement, demand.num_tokens) + ahead
        if self._admission is none:
            return Forecast(True, ttft)
        drain = max(0.0, queue - QUEUE_SECONDS)
        room = [c.max_held_tokens for c in decodes if c.max_held_tokens is not None]
        if len(room) < len(decodes):
            return Forecast(drain == 0.0, ttft, drain)
        pool = DecodePool(tuple(self._in_flight.values()), sum(room))
        arrival = Arrival(self._clock(), ttft, self._num_held(demand))
        verdict = self._admission(arrival, pool)
        return Forecast(verdict.is_admitted and drain == 0.0, ttft, max(drain, verdict.retry_after))

    @contextmanager
    def placed(self, request: T) -> Iterator[Answered]:
        """The request is in flight for the length of the block; what is seen of its answer by then
        is learned from."""
        demand, prefill_ends = self._demand(request), self._clock()
        if self._admission is not none:  # which never looks at it
            prefill_ends += self.forecast(request).ttft_seconds
        self._last = None
        answered, key = Answered(), id(request)
        self._in_flight[key] = InFlight(
            prefill_ends,
            prefill_ends + self._num_output(demand) * self._token_seconds,
            self._num_held(demand),
        )
        try:
            yield answered
        finally:
            del self._in_flight[key]
            self._last = None
            self._learn(demand, answered)

    def _decision(self, request: T) -> Decision:
        """Where it would be placed now."""
        now = self._clock()
        if self._last is not None:
            asked, then, decision = self._last
            if asked is request and now - then <= _SAME_MOMENT:
                return decision
        self._last = request, now, self._decide(request)
        return self._last[2]

    def _learn(self, demand: Demand, answered: Answered) -> None:
        count = answered.num_output_tokens
        if answered.first_token is None or count == 0:
            return
        most = demand.max_tokens * demand.num_answers
        self._part += _WEIGHT * (min(1.0, count / most) - self._part)
        if count > demand.num_answers:
            took = (self._clock() - answered.first_token) * demand.num_answers / count
            self._token_seconds += _WEIGHT * (took - self._token_seconds)

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
