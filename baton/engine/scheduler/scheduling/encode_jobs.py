"""Encode jobs: encoder outputs that are held, or expected, on behalf of other workers.

A job belongs to no sequence. It is either of:

    encode    holds an output until it is released; the encoder computes it unless it is cached
    arrival   holds blocks that its caller fills with another worker's output; from the beginning to
              the commit or release, no sequence and no other job computes this content

Jobs wait in the policy's order for blocks and for the encoder's budget, of which they take their
part before the sequences of a step do.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from baton.engine.scheduler.kv.encoder_cache import EncoderCache, HeldOutput
from baton.engine.scheduler.scheduling.policy import Ranker
from baton.errors import InvalidArgumentError
from baton.models.images.encoder_input import EncoderInput


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Encoder input whose output a job holds or expects.

    Attributes:
        encoder_input: `start` is ignored; `tensors` may be missing if nothing is to be computed.
        priority, arrival_time, first_token_deadline: as of the `Request` that needs the output.
    """

    encoder_input: EncoderInput
    priority: int = 0
    arrival_time: float = 0.0
    first_token_deadline: float | None = None

    @property
    def num_tokens(self) -> int:
        return self.encoder_input.length


@dataclass(frozen=True, slots=True)
class _Job:
    encoder_input: EncoderInput
    is_arrival: bool
    rank: tuple[float, int]


class EncodeJobs:
    """Encode jobs by their numbers, which are unique, over an encoder cache.

    Attributes:
        cache: the encoder cache.
        is_paused: nothing is computed for a job that waits; others continue.
    """

    def __init__(self, cache: EncoderCache, encoder_budget: int, ranker: Ranker) -> None:
        """`encoder_budget`: tokens that the encoder may compute in a step. `ranker`: that of the
        requests."""
        self.cache = cache
        self.is_paused = False
        self._budget = encoder_budget
        self._ranker = ranker
        self._waiting: dict[int, _Job] = {}
        self._active: dict[int, _Job] = {}
        self._awaited: Counter[bytes] = Counter()
        self._answers: dict[int, HeldOutput] = {}

    # Commands, between steps.

    def check_length(self, encoder_input: EncoderInput) -> None:
        """Raises `InvalidArgumentError` for the content hash of an output of another length."""
        known = self.cache.num_tokens_of(encoder_input.content_hash)
        if known is not None and known != encoder_input.length:
            raise InvalidArgumentError(
                "encoder_input.length",
                f"is {encoder_input.length}; the output of this content hash has {known} rows",
            )

    def encode(self, number: int, wanted: EncodeJob) -> None:
        """Adds a job for an output that is to be held: from now on if it is cached."""
        job = self._ranked(wanted, is_arrival=False)
        if job.encoder_input.content_hash in self.cache:
            self._start(number, job)
        else:
            self._waiting[number] = job

    def expect(self, number: int, wanted: EncodeJob) -> None:
        """Adds a job for an output of another worker."""
        job = self._waiting[number] = self._ranked(wanted, is_arrival=True)
        self._awaited[job.encoder_input.content_hash] += 1

    def commit(self, number: int) -> None:
        """Caches the output whose blocks an arrival has filled, and ends the job. Does nothing if
        it has no blocks."""
        job = self._active.get(number)
        if job is not None and job.is_arrival:
            self.cache.commit(job.encoder_input.content_hash)
            self.release(number)

    def release(self, *numbers: int) -> None:
        """Ends jobs, in any state. Idempotent."""
        for number in numbers:
            job = self._waiting.pop(number, None) or self._active.pop(number, None)
            self._answers.pop(number, None)
            if job is not None:
                self.cache.release_all(number)
                self._end_arrival(job)

    def release_everything(self) -> None:
        """Ends all jobs."""
        self.release(*self._waiting, *self._active)

    # The step.

    def schedule(self) -> None:
        """Allocates the outputs of waiting jobs, in the policy's order, as far as blocks and the
        encoder's budget suffice. Call before sequences are scheduled, with no step in flight: the
        blocks of an arrival have no other writer then."""
        is_short = False  # of blocks or budget, for a job that ranks before
        for number, job in sorted(self._waiting.items(), key=_rank_of):
            content_hash = job.encoder_input.content_hash
            if job.is_arrival and content_hash in self.cache:
                del self._waiting[number]
                self._end_arrival(job)
                self._answers[number] = HeldOutput(number, (), was_cached=True)
            elif self._awaits_content(job):
                continue
            elif self.cache.is_held(content_hash) or not (is_short or self._lacks_room(job)):
                del self._waiting[number]
                self._start(number, job)
            else:
                is_short = True

    def take_answers(self) -> tuple[HeldOutput, ...]:
        """Returns what jobs were given since the last call."""
        answers = tuple(self._answers.values())
        self._answers.clear()
        return answers

    # Queries.

    @property
    def awaited(self) -> Collection[bytes]:
        """Content hashes of arrivals, which are not computed here."""
        return self._awaited.keys()

    @property
    def has_work(self) -> bool:
        """True if a next step may do anything for a job: begin it, or answer it."""
        return bool(self._waiting or self._answers)

    @property
    def has_answers(self) -> bool:
        """True if `take_answers` returns any."""
        return bool(self._answers)

    @property
    def is_active(self) -> bool:
        """True if there are jobs at all: sequences may wait for what they hold, or await."""
        return self.num_jobs > 0

    @property
    def num_jobs(self) -> int:
        return len(self._waiting) + len(self._active)

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for the encoder or for blocks."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of outputs that the encoder has yet to compute for jobs."""
        return sum(job.encoder_input.length for job in self._waiting.values() if not job.is_arrival)

    def check_integrity(self) -> None:
        """Asserts that jobs and what they hold agree."""
        assert not self._waiting.keys() & self._active.keys(), "a job in two places"
        for number, job in self._active.items():
            assert self.cache.held_by(number) == (job.encoder_input,), "a job without its output"
        arrivals = [j for j in (*self._waiting.values(), *self._active.values()) if j.is_arrival]
        awaited = Counter(job.encoder_input.content_hash for job in arrivals)
        assert awaited == self._awaited, "what is awaited differs from the arrivals"

    def _ranked(self, wanted: EncodeJob, *, is_arrival: bool) -> _Job:
        encoder_input = replace(wanted.encoder_input, start=0)
        return _Job(encoder_input, is_arrival, self._ranker.rank(wanted))

    def _awaits_content(self, job: _Job) -> bool:
        """Returns True for a job that could not begin, whatever is free: its output arrives for
        another one, or may not be computed now."""
        content_hash = job.encoder_input.content_hash
        if job.is_arrival:
            return self.cache.is_held(content_hash)
        may_compute = not self.is_paused and content_hash not in self._awaited
        return content_hash not in self.cache and not may_compute

    def _lacks_room(self, job: _Job) -> bool:
        cache, encoder_input = self.cache, job.encoder_input
        if not cache.can_allocate(encoder_input):
            return True
        is_computed = not job.is_arrival and encoder_input.content_hash not in cache
        return is_computed and cache.num_due_tokens + encoder_input.length > self._budget

    def _start(self, number: int, job: _Job) -> None:
        self._active[number] = job
        content_hash, was_cached = job.encoder_input.content_hash, False
        if job.is_arrival:
            self.cache.receive(number, job.encoder_input)
        else:
            was_cached = not self.cache.allocate(number, job.encoder_input)
        block_ids = self.cache.blocks_of(content_hash)
        self._answers[number] = HeldOutput(number, block_ids, was_cached)

    def _end_arrival(self, job: _Job) -> None:
        if job.is_arrival:
            content_hash = job.encoder_input.content_hash
            self._awaited[content_hash] -= 1
            if not self._awaited[content_hash]:
                del self._awaited[content_hash]


def _rank_of(waiting: tuple[int, _Job]) -> tuple[float, int]:
    _, job = waiting
    return job.rank
