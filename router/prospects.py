"""What becomes of requests: when those in flight are expected to end, and how one would fare that
asks now.

The prompt's part is told by the workers' fitted rates. Of answers it is learned here how long they
are, as a part of what was asked for at most, and how long a token takes. Knows nothing of calls.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.serving.deadline import Clock
from router.admission import AdmissionPolicy, Arrival, DecodePool, InFlight, none, predicted
from router.candidate import Candidate
from router.gate import Answered, Forecast
from router.intake import Request
from router.rates import PRIOR, Rates

# Prompts that wait at a prefill worker for so long keep it busy; who comes later waits here, where
# tenants have shares.
QUEUE_SECONDS = 0.5

_WEIGHT = 0.05  # of one answer, in what is learned
_PRIOR_PART = 0.5  # of `max_tokens`
_PRIOR_TOKEN_SECONDS = 0.01

Snapshot = Callable[[tuple[int, ...], bytes], list[Candidate]]
"""The workers, with what each has cached of a prompt under a salt."""


class Prospects:
    """Expectations of one router.

    Args:
        snapshot: of the workers at this moment.
        admission: says whether the decode workers will have room; with `none` everybody goes.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        admission: AdmissionPolicy = predicted,
        clock: Clock = time.monotonic,
    ) -> None:
        self._snapshot = snapshot
        self._admission = admission
        self._clock = clock
        self._in_flight: dict[int, InFlight] = {}
        self._part = _PRIOR_PART
        self._token_seconds = _PRIOR_TOKEN_SECONDS

    def forecast(self, request: Request, num_tokens_ahead: int = 0) -> Forecast:
        """How the request would fare if it went now, behind prompts of so many tokens.

        Where no worker can take it, that is not for admission to say: there is room. So there is
        where nothing is in flight, whatever is expected: only by trying is it learned better.
        """
        if self._admission is none or (not self._in_flight and not num_tokens_ahead):
            return Forecast(True, 0.0)
        workers = self._snapshot(request.token_ids, request.tenant.salt)
        ready = [c for c in workers if not c.excluded]
        prefills = [c for c in ready if c.role == "prefill"]
        decodes = [c for c in ready if c.role == "decode"]
        if not prefills or not decodes:
            return Forecast(True, 0.0)
        queue = min(map(_queue_seconds, prefills))
        ahead = min(_rates(c).queue_seconds(num_tokens_ahead) for c in prefills) / len(prefills)
        ttft = min(_prefill_seconds(c, len(request.token_ids)) for c in prefills) + ahead
        drain = max(0.0, queue - QUEUE_SECONDS)
        room = [c.max_held_tokens for c in decodes if c.max_held_tokens is not None]
        if len(room) < len(decodes):
            return Forecast(drain == 0.0, ttft, drain)
        pool = DecodePool(tuple(self._in_flight.values()), sum(room))
        arrival = Arrival(self._clock(), ttft, self._num_held(request))
        verdict = self._admission(arrival, pool)
        return Forecast(verdict.is_admitted and drain == 0.0, ttft, max(drain, verdict.retry_after))

    @contextmanager
    def placed(self, request: Request) -> Iterator[Answered]:
        """The request is in flight for the length of the block; what is seen of its answer by then
        is learned from."""
        prefill_ends = self._clock() + self.forecast(request).ttft_seconds
        answered, key = Answered(), id(request)
        self._in_flight[key] = InFlight(
            prefill_ends,
            prefill_ends + self._num_output(request) * self._token_seconds,
            self._num_held(request),
        )
        try:
            yield answered
        finally:
            del self._in_flight[key]
            self._learn(request, answered)

    def _learn(self, request: Request, answered: Answered) -> None:
        count = answered.num_output_tokens
        if answered.first_token is None or count == 0:
            return
        most = request.params.max_tokens * request.params.n
        self._part += _WEIGHT * (min(1.0, count / most) - self._part)
        if count > request.params.n:
            took = (self._clock() - answered.first_token) * request.params.n / count
            self._token_seconds += _WEIGHT * (took - self._token_seconds)

    def _num_output(self, request: Request) -> float:
        """Tokens that each of its sequences is expected to have."""
        return self._part * request.params.max_tokens

    def _num_held(self, request: Request) -> int:
        """Tokens whose KV it will hold at its end."""
        num_sequences = request.params.num_sequences
        return len(request.token_ids) + round(num_sequences * self._num_output(request))


def _rates(candidate: Candidate) -> Rates:
    return candidate.rates or PRIOR


def _queue_seconds(candidate: Candidate) -> float:
    return _rates(candidate).queue_seconds(candidate.num_queued_tokens)


def _prefill_seconds(candidate: Candidate, num_tokens: int) -> float:
    """Until the first token of a prompt that is given to this worker now."""
    cached = min(candidate.num_cached_tokens, num_tokens)
    own = _rates(candidate).prefill_seconds(num_tokens - cached, cached)
    return _queue_seconds(candidate) + own
