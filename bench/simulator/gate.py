"""The simulated router's admission: what it expects of the requests that it has let in.

The decision is the router's own (`router.admission`). What the decision is made by, how long a
prompt and an answer take, is reckoned here from the machine and from what has ended; each request
is expected to take as long to decode as those before it took in the mean.
"""

from bench.simulator.job import Job
from bench.simulator.rates import rates_of
from bench.simulator.setup import Setup
from router.admission import Arrival, DecodePool, InFlight, Verdict, admission_named, admit
from router.candidate import Candidate

_FIRST_DECODE_SECONDS = 5.0  # of an answer, before any has ended
_WEIGHT = 0.05  # of the last answer in the mean


class Gate:
    """Lets requests in or not, and keeps what is expected of those that are."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._policy = admission_named(setup.admission)
        self._rates = rates_of(setup.machine)
        self._max_held_tokens = setup.num_decode * setup.max_len
        self._in_flight: dict[int, InFlight] = {}
        self._decode_seconds = _FIRST_DECODE_SECONDS

    def ask(self, job: Job, prefill: Candidate, now: float) -> Verdict:
        """Whether a job may be placed on a prefill worker; if so, it is expected from now on."""
        num_cached = min(prefill.num_cached_tokens, job.num_prompt_tokens)
        num_uncached = job.num_prompt_tokens - num_cached
        seconds = self._rates.prefill_seconds(num_uncached, num_cached)
        seconds += self._rates.queue_seconds(prefill.num_queued_tokens)
        deadline = self._setup.ttft_deadline
        arrival = Arrival(now, seconds, job.num_prompt_tokens, deadline)
        pool = DecodePool(tuple(self._in_flight.values()), self._max_held_tokens)
        verdict = admit(self._policy, arrival, pool)
        if verdict.is_admitted:
            self._expect(job, now + seconds)
        return verdict

    def note_first_token(self, job: Job, now: float) -> None:
        self._expect(job, now)

    def note_end(self, job: Job) -> None:
        """The job has ended, or was not taken after all."""
        self._in_flight.pop(job.number, None)
        if job.prefilled_at is not None:
            seconds = job.last_token_at - job.prefilled_at
            self._decode_seconds += _WEIGHT * (seconds - self._decode_seconds)

    def _expect(self, job: Job, prefill_ends: float) -> None:
        decode_ends = prefill_ends + self._decode_seconds
        self._in_flight[job.number] = InFlight(prefill_ends, decode_ends, job.num_prompt_tokens)
