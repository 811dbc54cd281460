"""The encoder cache against a simple model, and against a runner that believes what it is told."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import event, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.scheduler.kv.encoder_cache import EncoderCache, EncoderOutput, HeldOutput, Holder
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob, EncodeJobs
from baton.engine.scheduler.scheduling.encoder_schedule import EncoderSchedule, limit_chunk
from baton.engine.scheduler.scheduling.policy import POLICIES, Ranker
from baton.engine.scheduler.sequences.encoder_inputs import (
    EncoderInput,
    check_encoder_inputs,
    passed,
    uncut_end,
)
from baton.errors import InvalidArgumentError

LENGTHS = {b"a": 1, b"b": 2, b"c": 3, b"d": 3, b"e": 5, b"f": 8}
SEQUENCES = ["s0", "s1", "s2"]


def item(content: bytes, start: int) -> EncoderInput:
    return EncoderInput(content, start, LENGTHS[content])


class Runner:
    """Has the latest output of each block."""

    def __init__(self, cache: EncoderCache) -> None:
        self.cache = cache
        self.blocks: dict[int, EncoderOutput] = {}

    def compute(self, outputs: Iterable[EncoderOutput]) -> None:
        for output in outputs:
            self.write(output)

    def write(self, output: EncoderOutput) -> None:
        content_hash, block_ids = output.encoder_input.content_hash, set(output.block_ids)
        assert (
            len(block_ids)
            == len(output.block_ids)
            == self.cache.num_blocks_of(LENGTHS[content_hash])
        )
        assert all(1 <= block_id <= self.cache.num_blocks for block_id in block_ids)
        for other in LENGTHS.keys() - {content_hash}:
            if self.cache.is_held(other):
                assert block_ids.isdisjoint(self.cache.blocks_of(other)), "a held block is reused"
        self.blocks.update(dict.fromkeys(output.block_ids, output))

    def has(self, content_hash: bytes) -> bool:
        """Returns whether all blocks of an output are as they were written, and known by it."""
        if content_hash not in self.cache:
            return False
        return all(
            block_id in self.blocks
            and self.blocks[block_id].encoder_input.content_hash == content_hash
            for block_id in self.cache.blocks_of(content_hash)
        )


class CacheMachine(RuleBasedStateMachine):
    """Sequences take and give back, outputs arrive, and steps are drained, in any order.

    The model keeps references, the outputs in each state, and the order of eviction.
    """

    @initialize(num_blocks=st.integers(1, 14), block_size=st.integers(1, 3))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.cache = EncoderCache(num_blocks, block_size)
        self.runner = Runner(self.cache)
        self.references: list[tuple[Holder, EncoderInput]] = []
        self.due: set[bytes] = set()
        self.planned: list[EncoderOutput] = []
        self.arriving: dict[bytes, int] = {}
        self.stored: set[bytes] = set()
        self.told: set[bytes] = set()
        self.freeable: list[bytes] = []  # the next victim first
        self.num_jobs = 0

    def held(self) -> set[bytes]:
        return {i.content_hash for _, i in self.references}

    def size(self, contents: set[bytes]) -> int:
        return sum(self.cache.num_blocks_of(LENGTHS[content]) for content in contents)

    def fits(self, content: bytes) -> bool:
        return self.size(self.held() | {content}) <= self.cache.num_blocks

    def note_reference(self, holder: Holder, encoder_input: EncoderInput) -> None:
        content = encoder_input.content_hash
        self.freeable = [h for h in self.freeable if h != content]
        self.references.append((holder, encoder_input))
        while self.size(self.held() | set(self.freeable)) > self.cache.num_blocks:
            self.stored.discard(self.freeable.pop(0))

    @rule(
        sequence=st.sampled_from(SEQUENCES),
        content=st.sampled_from(sorted(LENGTHS)),
        start=st.integers(0, 2).map(lambda i: 10 * i),
    )
    def allocate(self, sequence: str, content: bytes, start: int) -> None:
        encoder_input = item(content, start)
        if (sequence, encoder_input) in self.references:
            assert self.cache.holds(sequence, encoder_input)
            return
        if content in self.arriving:
            return
        assert self.cache.can_allocate(encoder_input) == self.fits(content)
        if not self.fits(content):
            return
        is_new = content not in self.held() | set(self.freeable)
        assert self.cache.allocate(sequence, encoder_input) == is_new
        if is_new:
            self.due.add(content)
        self.note_reference(sequence, encoder_input)

    @rule(content=st.sampled_from(sorted(LENGTHS)))
    def receive(self, content: bytes) -> None:
        if content in self.held() | set(self.freeable) or not self.fits(content):
            return
        self.num_jobs += 1
        arriving = EncoderInput(content, 0, LENGTHS[content])
        block_ids = self.cache.receive(self.num_jobs, arriving)
        self.arriving[content] = self.num_jobs
        self.note_reference(self.num_jobs, arriving)
        self.runner.write(EncoderOutput(arriving, block_ids))

    @precondition(lambda self: self.arriving)
    @rule(data=st.data(), is_committed=st.booleans())
    def end_arrival(self, data: st.DataObject, is_committed: bool) -> None:
        content = data.draw(st.sampled_from(sorted(self.arriving)))
        number = self.arriving.pop(content)
        if is_committed:
            self.cache.commit(content)
            self.stored.add(content)
            self.freeable.append(content)
        self.cache.release_all(number)
        self.references.remove((number, EncoderInput(content, 0, LENGTHS[content])))

    def give_back(self, sequence: Holder, encoder_input: EncoderInput) -> None:
        self.references.remove((sequence, encoder_input))
        content = encoder_input.content_hash
        if content in self.held():
            return
        if content in self.due:
            self.due.remove(content)
        else:
            self.freeable.append(content)

    @precondition(lambda self: len(self.references) > len(self.arriving))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        of_sequences = [each for each in self.references if each[0] in SEQUENCES]
        reference = data.draw(st.sampled_from(of_sequences))
        self.cache.release(*reference)
        self.give_back(*reference)
        self.cache.release(*reference)  # what it has not, it need not give

    @rule(sequence=st.sampled_from(SEQUENCES), num_computed=st.integers(0, 30))
    def release_passed(self, sequence: str, num_computed: int) -> None:
        self.cache.release_passed(sequence, num_computed)
        for holder, encoder_input in list(self.references):
            if holder == sequence and encoder_input.end <= num_computed:
                self.give_back(holder, encoder_input)

    @rule(sequence=st.sampled_from(SEQUENCES))
    def release_all(self, sequence: str) -> None:
        self.cache.release_all(sequence)
        for holder, encoder_input in list(self.references):
            if holder == sequence:
                self.give_back(holder, encoder_input)

    @rule()
    def drain(self) -> None:
        outputs = self.cache.drain()
        computed = [output.encoder_input.content_hash for output in outputs]
        assert sorted(computed) == sorted(self.due), "not each due input exactly once"
        assert {i for _, i in self.references}.issuperset(o.encoder_input for o in outputs)
        self.runner.compute(outputs)
        self.planned += outputs
        self.due.clear()
        assert not self.cache.drain()

    @rule()
    def apply(self) -> None:
        self.cache.note_computed(self.planned)
        here = (self.held() | set(self.freeable)) - self.due - self.arriving.keys()
        self.stored |= here
        self.planned.clear()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.stored -= set(self.freeable)
        self.freeable.clear()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        known = sorted({*self.freeable, *self.held(), b"unknown"})
        hashes = data.draw(st.lists(st.sampled_from(known), max_size=3))
        self.cache.evict(hashes)
        self.stored -= set(hashes) & set(self.freeable)
        self.freeable = [each for each in self.freeable if each not in hashes]

    @rule()
    def replay(self) -> None:
        events = self.cache.drain_events()
        assert not set(events.stored) & set(events.removed)
        if events.cleared:
            self.told.clear()
        self.told = (self.told - set(events.removed)) | set(events.stored)
        assert self.told == self.stored

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        held = self.held()
        for sequence in SEQUENCES:
            expected = tuple(i for s, i in self.references if s == sequence)
            assert self.cache.held_by(sequence) == expected
        for content in LENGTHS:
            is_here = content in held or content in self.freeable
            assert self.cache.is_held(content) == (content in held)
            assert (content in self.cache) == (is_here and content not in self.arriving)
            if content in self.cache and content not in self.due:
                assert self.runner.has(content), "an output was overwritten"
        assert self.cache.num_held_blocks == self.size(held)
        assert self.cache.num_cached_blocks == self.size(set(self.freeable))
        assert self.cache.num_due_tokens == sum(LENGTHS[content] for content in self.due)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=40)


@dataclass
class Stream:
    """A prompt being prefilled."""

    name: str
    inputs: tuple[EncoderInput, ...]
    num_tokens: int
    num_computed: int = 0
    chunk: tuple[int, int] = field(default=(0, 0))


@st.composite
def streams(draw: st.DrawFn, contents: list[bytes]) -> list[Stream]:
    """Prompts of texts and images in turn; either may be missing."""
    made = []
    for i in range(draw(st.integers(1, 4))):
        inputs: list[EncoderInput] = []
        position = draw(st.integers(0, 3))
        for content in draw(st.lists(st.sampled_from(contents), max_size=5)):
            inputs.append(item(content, position))
            position = inputs[-1].end + draw(st.integers(0, 3))
        made.append(Stream(f"s{i}", tuple(inputs), max(1, position)))
    return made


@dataclass
class Job:
    """A job that begins before a step, keeps its output for some steps, and may be cancelled."""

    content: bytes
    is_arrival: bool
    begin: int
    num_steps: int
    priority: int
    is_committed: bool
    cancelled: int | None
    number: int = 0
    end: int | None = None


JOBS = st.builds(
    Job,
    content=st.sampled_from(sorted(LENGTHS)),
    is_arrival=st.booleans(),
    begin=st.integers(0, 8),
    num_steps=st.integers(0, 5),
    priority=st.integers(0, 2),
    is_committed=st.booleans(),
    cancelled=st.none() | st.integers(0, 20),
)


class JobCaller:
    """Begins, commits, cancels and releases jobs, and fills the blocks of those that arrive."""

    def __init__(self, jobs: EncodeJobs, runner: Runner, calls: list[Job]) -> None:
        self.jobs, self.runner = jobs, runner
        self.waiting = calls
        self.open: dict[int, Job] = {}

    def command(self, step: int) -> None:
        """Runs the commands between two steps."""
        for job in [job for job in self.waiting if job.begin <= step]:
            self.waiting.remove(job)
            job.number = len(self.open) + 1000 * (step + 1)
            self.open[job.number] = job
            add = self.jobs.expect if job.is_arrival else self.jobs.encode
            add(job.number, EncodeJob(item(job.content, 0), job.priority))
        for number, job in tuple(self.open.items()):
            is_cancelled = job.cancelled is not None and job.cancelled <= step
            if not is_cancelled and (job.end is None or job.end > step):
                continue
            if not is_cancelled and job.is_arrival and job.is_committed:
                self.jobs.commit(number)
            self.jobs.release(number)
            self.jobs.release(number)  # does nothing
            del self.open[number]

    def take(self, step: int) -> None:
        """Takes the answers of a step that is done."""
        for held in self.jobs.take_answers():
            job = self.open[held.number]
            assert job.end is None, "answered twice"
            job.end = step + 1 + job.num_steps
            wanted = EncoderInput(job.content, 0, LENGTHS[job.content])
            if job.is_arrival and held.block_ids:
                assert not held.was_cached
                self.runner.write(EncoderOutput(wanted, held.block_ids))
            elif job.is_arrival:
                assert held.was_cached
            else:
                assert held.block_ids == self.jobs.cache.blocks_of(job.content)
                assert self.runner.has(job.content), "held, but not computed"


@settings(max_examples=150)
@given(
    data=st.data(),
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 3),
    budget=st.integers(1, 12),
    calls=st.lists(JOBS, max_size=8),
)
def test_encoder_cache_lets_every_prompt_and_job_finish(
    data, num_blocks, block_size, budget, calls
):
    capacity = num_blocks * block_size
    admissible = [h for h, length in LENGTHS.items() if length <= min(capacity, budget)]
    waiting = data.draw(streams(admissible))
    for stream in waiting:
        check_encoder_inputs(stream.inputs, stream.num_tokens, capacity, budget)
    cache = EncoderCache(num_blocks, block_size)
    runner, jobs = Runner(cache), EncodeJobs(cache, budget, Ranker(POLICIES["priority"]))
    caller = JobCaller(jobs, runner, [job for job in calls if job.content in admissible])
    max_chunk = data.draw(st.integers(1, 9), "max_chunk")
    step = num_idle = num_disturbances = 0
    while waiting or caller.waiting or caller.open:
        caller.command(step)
        jobs.schedule()
        planned: list[Stream] = []
        for stream in waiting:
            if plan_chunk(stream, jobs, budget, max_chunk):
                planned.append(stream)
            if num_disturbances < 5 and data.draw(st.integers(0, 9)) == 0:
                # A stream loses its blocks while the step is being planned, or was planned in vain.
                num_disturbances += 1
                victim = data.draw(st.sampled_from(waiting))
                cache.release_all(victim.name)
                victim.num_computed = data.draw(st.integers(0, victim.num_computed))
                planned = [s for s in planned if s is not victim]
        cache.check_integrity()
        jobs.check_integrity()
        assert cache.num_due_tokens <= budget
        outputs = cache.drain()
        runner.compute(outputs)
        for stream in planned:
            for encoder_input in touched(stream):
                assert runner.has(encoder_input.content_hash), "an output is not there"
            stream.num_computed = stream.chunk[1]
            cache.release_passed(stream.name, stream.num_computed)
        cache.note_computed(outputs)
        has_answers = jobs.has_answers
        caller.take(step)
        waiting = [s for s in waiting if s.num_computed < s.num_tokens]
        has_jobs = has_answers or caller.open or caller.waiting
        num_idle += bool(waiting) and not (planned or has_jobs)
        assert num_idle <= num_disturbances, "no stream can go on"
        assert step < 200, "a job never ends"
        step += 1
    assert cache.num_held_blocks == 0
    assert not jobs.is_active
    event(f"disturbances: {num_disturbances}")
    event(f"jobs: {len(calls)}")


def plan_chunk(stream: Stream, jobs: EncodeJobs, budget: int, max_chunk: int) -> bool:
    cache = jobs.cache
    start = stream.num_computed
    end = min(start + max_chunk, stream.num_tokens)
    left = budget - cache.num_due_tokens
    schedule = limit_chunk(stream.inputs, start, end, cache, stream.name, left, jobs.awaited)
    assert start <= schedule.end <= end
    assert schedule.budget_used == sum(i.length for i in schedule.to_compute) <= left
    if schedule.end == start:
        assert not schedule.to_hold
        return False
    cache.take(stream.name, schedule.to_hold)
    stream.chunk = (start, schedule.end)
    assert all(cache.holds(stream.name, i) for i in touched(stream))
    return True


def touched(stream: Stream) -> list[EncoderInput]:
    start, end = stream.chunk
    return [i for i in stream.inputs if i.start < end and i.end > start]


@given(
    content=st.sampled_from(sorted(LENGTHS)),
    slack=st.integers(0, 3),
    start=st.integers(0, 5),
    into=st.integers(0, 7),
)
def test_empty_encoder_cache_accepts_any_admissible_input(content, slack, start, into):
    """Wherever a chunk begins, even within the span where a prefix was found cached."""
    encoder_input = item(content, start)
    size = encoder_input.length + slack
    check_encoder_inputs([encoder_input], encoder_input.end, size, size)
    begin = min(start + into, encoder_input.end - 1)
    schedule = limit_chunk([encoder_input], begin, begin + 1, EncoderCache(size, 1), "s", size)
    assert schedule == EncoderSchedule(
        begin + 1, (encoder_input,), (encoder_input,), encoder_input.length
    )


def test_chunk_ends_before_an_input_beyond_the_encoder_cache():
    inputs = [item(b"c", 2), item(b"e", 6), item(b"a", 12)]
    schedule = limit_chunk(inputs, 0, 20, EncoderCache(7, 1), "s", 100)
    assert schedule == EncoderSchedule(6, (inputs[0],), (inputs[0],), 3)


def test_chunk_ends_before_an_input_beyond_the_encoder_budget():
    inputs = [item(b"c", 2), item(b"e", 6), item(b"a", 12)]
    assert limit_chunk(inputs, 0, 20, EncoderCache(100, 1), "s", 7).end == 6
    assert limit_chunk(inputs, 0, 20, EncoderCache(100, 1), "s", 9).end == 20
    assert limit_chunk(inputs, 0, 20, EncoderCache(100, 1), "s", 2).end == 2


def test_chunk_within_an_input_is_empty_when_the_cache_is_full():
    cache = EncoderCache(5, 1)
    cache.allocate("other", item(b"a", 0))
    schedule = limit_chunk([item(b"e", 3)], 4, 9, cache, "s", 100)
    assert schedule == EncoderSchedule(4, (), (), 0)


def test_limit_chunk_schedules_only_inputs_that_it_reaches():
    inputs = [item(b"b", 0), item(b"c", 2), item(b"e", 5), item(b"a", 10)]
    schedule = limit_chunk(inputs, 2, 10, EncoderCache(100, 1), "s", 100)
    assert schedule.to_compute == (inputs[1], inputs[2])


@given(begin=st.integers(0, 25), num_tokens=st.integers(1, 25), gaps=st.lists(st.integers(0, 3)))
def test_uncut_end_ends_within_no_input(begin, num_tokens, gaps):
    inputs, start = [], 0
    for content, gap in zip(sorted(LENGTHS), gaps, strict=False):
        inputs.append(item(content, start + gap))
        start = inputs[-1].end
    asked = begin + num_tokens
    end = uncut_end(inputs, begin, asked)
    assert begin <= end <= asked
    assert not any(i.start < end < i.end for i in inputs) or end == begin
    # No token more than needed is left to a later chunk.
    assert end == asked or any(i.start <= end and asked < i.end for i in inputs)


def test_limit_chunk_computes_repeated_content_once():
    first, second = item(b"e", 0), item(b"e", 7)
    cache = EncoderCache(5, 1)
    schedule = limit_chunk([first, second], 0, 12, cache, "s", 5)
    assert schedule == EncoderSchedule(12, (first,), (first, second), 5)
    cache.take("s", schedule.to_hold)
    assert [output.encoder_input for output in cache.drain()] == [first]
    cache.release_passed("s", 5)
    assert cache.is_held(b"e"), "the second span still needs it"


def test_limit_chunk_charges_nothing_for_a_computed_output():
    cache = EncoderCache(5, 1)
    cache.allocate("other", item(b"e", 0))
    schedule = limit_chunk([item(b"e", 3)], 0, 9, cache, "s", 0)
    assert schedule == EncoderSchedule(9, (), (item(b"e", 3),), 0)


def test_encoder_cache_holds_hits_before_evicting():
    """The chunk meets the new one first; the cached one would be its victim."""
    cache = EncoderCache(9, 1)
    for content in (b"e", b"a", b"c"):
        cache.allocate("other", item(content, 0))
    cache.drain()
    cache.release_all("other")
    inputs = [item(b"d", 0), item(b"e", 3)]
    cache.take("s", limit_chunk(inputs, 0, 8, cache, "s", 100).to_hold)
    assert [output.encoder_input for output in cache.drain()] == inputs[:1]
    assert b"e" in cache
    assert b"a" not in cache
    assert b"c" not in cache


def test_encode_job_holds_a_cached_output_at_once():
    """A job before it would else take its blocks."""
    cache = EncoderCache(5, 1)
    cache.allocate("s", item(b"e", 0))
    cache.note_computed(cache.drain())
    cache.release_all("s")
    jobs = EncodeJobs(cache, 10, Ranker(POLICIES["fcfs"]))
    jobs.encode(1, EncodeJob(item(b"d", 0)))
    jobs.encode(2, EncodeJob(item(b"e", 0)))
    jobs.schedule()
    assert jobs.take_answers() == (HeldOutput(2, cache.blocks_of(b"e"), was_cached=True),)
    assert not jobs.has_answers
    jobs.release(2)
    jobs.schedule()
    (answer,) = jobs.take_answers()
    assert (answer.number, answer.was_cached) == (1, False)


def test_encode_job_waits_for_an_arrival_that_comes_later():
    jobs = EncodeJobs(EncoderCache(5, 1), 10, Ranker(POLICIES["fcfs"]))
    jobs.encode(1, EncodeJob(item(b"e", 0)))
    jobs.expect(2, EncodeJob(item(b"e", 0)))
    jobs.schedule()
    (arrival,) = jobs.take_answers()
    assert arrival.number == 2
    jobs.commit(2)
    jobs.schedule()
    assert jobs.take_answers() == (HeldOutput(1, arrival.block_ids, was_cached=True),)


def test_chunk_ends_before_an_awaited_input():
    inputs = [item(b"c", 2), item(b"e", 6)]
    schedule = limit_chunk(inputs, 0, 20, EncoderCache(20, 1), "s", 100, {b"e"})
    assert schedule == EncoderSchedule(6, (inputs[0],), (inputs[0],), 3)


def test_chunk_ends_before_a_hit_whose_space_it_needs():
    cache = EncoderCache(8, 1)
    cache.allocate("other", item(b"e", 0))
    cache.drain()
    cache.release_all("other")
    inputs = [item(b"f", 0), item(b"e", 8)]
    assert limit_chunk(inputs, 0, 13, cache, "s", 100).end == 8


def test_passed_returns_inputs_with_all_tokens_computed():
    inputs = [item(b"b", 0), item(b"c", 2), item(b"e", 9)]
    assert passed(inputs, 1) == ()
    assert passed(inputs, 4) == (inputs[0],)
    assert passed(inputs, 5) == (inputs[0], inputs[1])


@pytest.mark.parametrize(
    ("inputs", "at", "problem"),
    [
        ([item(b"b", 0), EncoderInput(b"x", 4, 0)], 1, "is 0 tokens long; must be at least 1"),
        ([EncoderInput(b"x", -1, 3)], 0, "covers tokens [-1, 2); must start at 0 or later"),
        ([item(b"c", 2), item(b"a", 4)], 1, "covers tokens [4, 5); must start at 5 or later"),
        ([item(b"c", 18)], 0, "covers tokens [18, 21); the prompt has 20 tokens"),
        ([item(b"f", 0)], 0, "is 8 tokens long; the encoder's budget per step holds 6"),
        (
            [EncoderInput(b"x", 0, 1), EncoderInput(b"x", 1, 2)],
            1,
            "has the content hash of an input of another length",
        ),
    ],
)
def test_check_encoder_inputs_names_an_unschedulable_input(inputs, at, problem):
    with pytest.raises(InvalidArgumentError) as refused:
        check_encoder_inputs(inputs, 20, capacity_tokens=7, compute_budget=6, field="images")
    assert (refused.value.field, refused.value.problem) == (f"images[{at}]", problem)


def test_check_encoder_inputs_names_an_input_beyond_the_cache():
    with pytest.raises(InvalidArgumentError, match=r"encoder_inputs\[0\].*encoder cache holds 7"):
        check_encoder_inputs([item(b"f", 0)], 20, capacity_tokens=7, compute_budget=9)
