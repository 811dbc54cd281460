"""The encoder cache against a simple model, and against a runner that believes what it is told."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import event, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.scheduler.kv.encoder_cache import EncoderCache, EncoderStep
from baton.engine.scheduler.scheduling.encoder_schedule import EncoderSchedule, limit_chunk
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
    """Has the outputs that plans told it to compute and not to forget."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.outputs: set[bytes] = set()

    def apply(self, step: EncoderStep) -> None:
        freed = set(step.freed)
        assert len(freed) == len(step.freed), "freed twice in a step"
        assert freed <= self.outputs, "told to forget what it does not have"
        self.outputs -= freed
        for encoder_input in step.to_compute:
            assert encoder_input.content_hash not in self.outputs, "computed twice"
            self.outputs.add(encoder_input.content_hash)
        assert sum(LENGTHS[h] for h in self.outputs) <= self.capacity


class CacheMachine(RuleBasedStateMachine):
    """Sequences take, give back and are drained in any order.

    The model keeps references, the outputs there are, those due, and the order of eviction.
    """

    @initialize(capacity=st.integers(1, 14))
    def make(self, capacity: int) -> None:
        self.cache = EncoderCache(capacity)
        self.runner = Runner(capacity)
        self.references: list[tuple[str, EncoderInput]] = []
        self.due: set[bytes] = set()
        self.freeable: list[bytes] = []  # the next victim first
        self.freed: list[bytes] = []

    def held(self) -> set[bytes]:
        return {i.content_hash for _, i in self.references}

    def size(self, contents: set[bytes]) -> int:
        return sum(LENGTHS[content] for content in contents)

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
        fits = self.size(self.held() | {content}) <= self.cache.capacity_tokens
        assert self.cache.can_allocate(encoder_input) == fits
        if not fits:
            return
        is_new = content not in self.held() | set(self.freeable)
        assert self.cache.allocate(sequence, encoder_input) == is_new
        if is_new:
            self.due.add(content)
        self.freeable = [h for h in self.freeable if h != content]
        self.references.append((sequence, encoder_input))
        while self.size(self.held() | set(self.freeable)) > self.cache.capacity_tokens:
            self.freed.append(self.freeable.pop(0))

    def give_back(self, sequence: str, encoder_input: EncoderInput) -> None:
        self.references.remove((sequence, encoder_input))
        content = encoder_input.content_hash
        if content in self.held():
            return
        if content in self.due:
            self.due.remove(content)
        else:
            self.freeable.append(content)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reference = data.draw(st.sampled_from(self.references))
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
        step = self.cache.drain()
        assert list(step.freed) == self.freed, "not each eviction once, least recently held first"
        computed = [i.content_hash for i in step.to_compute]
        assert sorted(computed) == sorted(self.due), "not each due input exactly once"
        assert {i for _, i in self.references}.issuperset(step.to_compute)
        self.runner.apply(step)
        self.due.clear()
        self.freed.clear()
        assert self.runner.outputs == self.held() | set(self.freeable)
        assert self.cache.drain() == EncoderStep((), ())

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        held = self.held()
        for sequence in SEQUENCES:
            expected = tuple(i for s, i in self.references if s == sequence)
            assert self.cache.held_by(sequence) == expected
        for content in LENGTHS:
            assert self.cache.is_held(content) == (content in held)
            assert (content in self.cache) == (content in held or content in self.freeable)
        assert self.cache.num_held_tokens == self.size(held)
        assert self.cache.num_cached_tokens == self.size(held | set(self.freeable))
        assert self.cache.num_due_tokens == self.size(self.due)


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


@settings(max_examples=150)
@given(data=st.data(), capacity=st.integers(1, 12), budget=st.integers(1, 12))
def test_encoder_cache_lets_every_admissible_prompt_finish(data, capacity, budget):
    admissible = [h for h, length in LENGTHS.items() if length <= min(capacity, budget)]
    waiting = data.draw(streams(admissible))
    for stream in waiting:
        check_encoder_inputs(stream.inputs, stream.num_tokens, capacity, budget)
    cache, runner = EncoderCache(capacity), Runner(capacity)
    max_chunk = data.draw(st.integers(1, 9), "max_chunk")
    num_idle = num_disturbances = 0
    while waiting:
        planned: list[Stream] = []
        for stream in waiting:
            if plan_chunk(stream, cache, budget, max_chunk):
                planned.append(stream)
            if num_disturbances < 5 and data.draw(st.integers(0, 9)) == 0:
                # Somebody loses its blocks while the step is being planned, or was planned in vain.
                num_disturbances += 1
                victim = data.draw(st.sampled_from(waiting))
                cache.release_all(victim.name)
                victim.num_computed = data.draw(st.integers(0, victim.num_computed))
                planned = [s for s in planned if s is not victim]
        cache.check_integrity()
        assert cache.num_due_tokens <= budget
        step = cache.drain()
        runner.apply(step)
        for stream in planned:
            for encoder_input in touched(stream):
                assert encoder_input.content_hash in runner.outputs, "an output is not there"
            stream.num_computed = stream.chunk[1]
            cache.release_passed(stream.name, stream.num_computed)
        waiting = [s for s in waiting if s.num_computed < s.num_tokens]
        num_idle = 0 if planned else num_idle + 1
        assert num_idle <= num_disturbances, "nobody can go on"
    assert cache.num_held_tokens == 0
    event(f"disturbances: {num_disturbances}")


def plan_chunk(stream: Stream, cache: EncoderCache, budget: int, max_chunk: int) -> bool:
    start = stream.num_computed
    end = min(start + max_chunk, stream.num_tokens)
    left = budget - cache.num_due_tokens
    schedule = limit_chunk(stream.inputs, start, end, cache, stream.name, left)
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
    schedule = limit_chunk([encoder_input], begin, begin + 1, EncoderCache(size), "s", size)
    assert schedule == EncoderSchedule(
        begin + 1, (encoder_input,), (encoder_input,), encoder_input.length
    )


def test_chunk_ends_before_an_input_beyond_the_encoder_cache():
    inputs = [item(b"c", 2), item(b"e", 6), item(b"a", 12)]
    schedule = limit_chunk(inputs, 0, 20, EncoderCache(7), "s", 100)
    assert schedule == EncoderSchedule(6, (inputs[0],), (inputs[0],), 3)


def test_chunk_ends_before_an_input_beyond_the_encoder_budget():
    inputs = [item(b"c", 2), item(b"e", 6), item(b"a", 12)]
    assert limit_chunk(inputs, 0, 20, EncoderCache(100), "s", 7).end == 6
    assert limit_chunk(inputs, 0, 20, EncoderCache(100), "s", 9).end == 20
    assert limit_chunk(inputs, 0, 20, EncoderCache(100), "s", 2).end == 2


def test_chunk_within_an_input_is_empty_when_the_cache_is_full():
    cache = EncoderCache(5)
    cache.allocate("other", item(b"a", 0))
    schedule = limit_chunk([item(b"e", 3)], 4, 9, cache, "s", 100)
    assert schedule == EncoderSchedule(4, (), (), 0)


def test_limit_chunk_schedules_only_inputs_that_it_reaches():
    inputs = [item(b"b", 0), item(b"c", 2), item(b"e", 5), item(b"a", 10)]
    schedule = limit_chunk(inputs, 2, 10, EncoderCache(100), "s", 100)
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
    cache = EncoderCache(5)
    schedule = limit_chunk([first, second], 0, 12, cache, "s", 5)
    assert schedule == EncoderSchedule(12, (first,), (first, second), 5)
    cache.take("s", schedule.to_hold)
    assert cache.drain().to_compute == (first,)
    cache.release_passed("s", 5)
    assert cache.is_held(b"e"), "the second span still needs it"


def test_limit_chunk_charges_nothing_for_a_computed_output():
    cache = EncoderCache(5)
    cache.allocate("other", item(b"e", 0))
    schedule = limit_chunk([item(b"e", 3)], 0, 9, cache, "s", 0)
    assert schedule == EncoderSchedule(9, (), (item(b"e", 3),), 0)


def test_encoder_cache_holds_hits_before_evicting():
    """The chunk meets the new one first; the cached one would be its victim."""
    cache = EncoderCache(9)
    for content in (b"e", b"a", b"c"):
        cache.allocate("other", item(content, 0))
    cache.drain()
    cache.release_all("other")
    inputs = [item(b"d", 0), item(b"e", 3)]
    cache.take("s", limit_chunk(inputs, 0, 8, cache, "s", 100).to_hold)
    step = cache.drain()
    assert step == EncoderStep((b"a", b"c"), (inputs[0],))


def test_chunk_ends_before_a_hit_whose_space_it_needs():
    cache = EncoderCache(8)
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
