"""The scheduler under everything that can happen to it, with a cache whose content is checked."""

from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import event, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from baton.engine.core.block_pool import BlockPool
from baton.engine.core.plan import ExternalAllocation, StepPlan
from baton.engine.core.scheduler import Scheduler, SchedulerConfig, SequenceProgress
from baton.engine.core.sequence import FinishReason, KvSource, Purpose, Sequence
from baton.sampling import SamplingParams

from .fakes import VOCAB_SIZE, FakeRunner, next_token, prefix_hashes

MAX_PROMPT = 14
MAX_TOKENS = 9
ROOTS = [b"r" * 16, b"s" * 16]


@dataclass
class Expected:
    """One sequence as the test sees it: what it would produce alone, and what it has so far."""

    sequence: Sequence
    tokens: list[int]
    reason: FinishReason
    given: int
    produced: list[int] = field(default_factory=list)
    allocation: ExternalAllocation | None = None
    num_arrived: int = 0


def alone(sequence: Sequence) -> tuple[list[int], FinishReason]:
    """The tokens a sequence produces with the machine to itself."""
    tokens = list(sequence.token_ids)
    while True:
        tokens.append(next_token(tokens))
        produced = tokens[sequence.num_tokens :]
        if tokens[-1] in sequence.eos_token_ids:
            return produced, FinishReason.END_OF_SEQUENCE
        if tokens[-1] in sequence.stop_token_ids:
            return produced, FinishReason.STOP_TOKEN
        if len(tokens) - sequence.num_prompt_tokens >= sequence.params.max_tokens:
            return produced, FinishReason.LENGTH
        if sequence.purpose is Purpose.PREFILL:
            return produced, FinishReason.PREFILLED


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, delivers and releases in any order."""

    @initialize(
        block_size=st.integers(1, 4),
        spare_blocks=st.sampled_from([0, 0, 0, 1, 2, 5, 12]),
        max_num_seqs=st.sampled_from([4, 3, 2, 1]),
        extra_tokens=st.sampled_from([0, 1, 3, 8, 40]),
        prefix_caching=st.booleans(),
        kinds=st.sampled_from(
            [
                [(Purpose.GENERATE, KvSource.LOCAL)],
                [(Purpose.PREFILL, KvSource.LOCAL)],
                [(Purpose.GENERATE, KvSource.EXTERNAL)],
                [(Purpose.GENERATE, KvSource.LOCAL), (Purpose.GENERATE, KvSource.EXTERNAL)],
                [
                    (Purpose.GENERATE, KvSource.LOCAL),
                    (Purpose.GENERATE, KvSource.EXTERNAL),
                    (Purpose.PREFILL, KvSource.LOCAL),
                ],
            ]
        ),
    )
    def make(
        self,
        block_size: int,
        spare_blocks: int,
        max_num_seqs: int,
        extra_tokens: int,
        prefix_caching: bool,
        kinds: list[tuple[Purpose, KvSource]],
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs + extra_tokens, max_num_seqs, block_size, prefix_caching
        )
        # The smallest pool in which any one request can run by itself.
        num_blocks = -(-(MAX_PROMPT + MAX_TOKENS) // block_size) + spare_blocks
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(self.config, self.pool)
        self.runner = FakeRunner(block_size)
        self.kinds = kinds
        self.live: dict[str, Expected] = {}
        self.kept: dict[str, Expected] = {}
        self.findable: set[bytes] = set()
        self.total_tokens = 0

    # What a server does.

    @precondition(lambda self: len(self.live) + len(self.kept) < 5)
    @rule(data=st.data())
    def add_a_crowd(self, data: st.DataObject) -> None:
        for _ in range(4):
            self.add(data)

    @rule()
    def several_steps(self) -> None:
        for _ in range(6):
            if not self.scheduler.has_work:
                return
            plan = self.schedule()
            roots = {s.request_id: self.live[s.request_id].sequence.root for s in plan.scheduled}
            for progress in self.scheduler.apply(plan, self.runner.run(plan, roots)):
                self.book(progress)
            self.nothing_is_lost()

    @precondition(lambda self: len(self.live) + len(self.kept) < 8)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        free_ids = [i for i in "abcdefghij" if i not in self.scheduler]
        purpose, source = data.draw(st.sampled_from(self.kinds))
        # Few different beginnings, so that prefixes are shared.
        family = data.draw(st.integers(0, 1))
        length = data.draw(st.integers(1, MAX_PROMPT) | st.just(MAX_PROMPT // 2))
        prompt = [(family + i * i) % VOCAB_SIZE for i in range(length)]
        if data.draw(st.booleans()):
            prompt[-1] = data.draw(st.integers(0, VOCAB_SIZE - 1))
        max_tokens = data.draw(st.just(MAX_TOKENS) | st.integers(1, MAX_TOKENS))
        given = data.draw(st.integers(0, min(length - 1, max_tokens - 1)))
        sequence = Sequence(
            request_id=data.draw(st.sampled_from(free_ids)),
            token_ids=prompt,
            num_prompt_tokens=length - given,
            params=SamplingParams(max_tokens=max_tokens),
            stop_token_ids=frozenset(data.draw(st.sets(st.just(3)))),
            eos_token_ids=frozenset(data.draw(st.sets(st.just(5)))),
            root=data.draw(st.sampled_from(ROOTS)),
            purpose=purpose,
            kv_source=source,
        )
        tokens, reason = alone(sequence)
        self.total_tokens += length + len(tokens)
        self.live[sequence.request_id] = Expected(sequence, tokens, reason, length)
        self.scheduler.add(sequence)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        plan = self.schedule()
        roots = {s.request_id: self.live[s.request_id].sequence.root for s in plan.scheduled}
        if data.draw(st.integers(0, 4)) == 0:
            self.end_some(data)
        result = self.runner.run(plan, roots)
        if data.draw(st.integers(0, 4)) == 0:
            self.end_some(data)
        for progress in self.scheduler.apply(plan, result):
            self.book(progress)

    @precondition(lambda self: self.live or self.kept)
    @rule(data=st.data())
    def end_some(self, data: st.DataObject) -> None:
        ids = sorted(self.live | self.kept)
        if ids:
            request_id = data.draw(st.sampled_from(ids))
            assert self.scheduler.abort(request_id) is not None
            self.live.pop(request_id, None)
            self.kept.pop(request_id, None)
        assert self.scheduler.abort("unknown") is None

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.kept)))
        del self.kept[request_id]
        self.scheduler.release(request_id)
        self.scheduler.release(request_id)

    @precondition(lambda self: self.awaiting())
    @rule(data=st.data())
    def some_external_blocks_arrive(self, data: st.DataObject) -> None:
        expected = self.live[data.draw(st.sampled_from(self.awaiting()))]
        self.arrive(expected, data.draw(st.integers(1, 4)))

    @precondition(lambda self: self.awaiting())
    @rule(data=st.data())
    def an_external_sequence_is_committed(self, data: st.DataObject) -> None:
        self.deliver(data.draw(st.sampled_from(self.awaiting())))

    @rule()
    def commit_external_of_an_unknown_sequence(self) -> None:
        assert self.scheduler.commit_external("unknown", 0) is None

    @rule()
    def flush_the_cache(self) -> None:
        num_findable = len(self.replay())
        assert self.scheduler.reset_prefix_cache() == num_findable

    @rule()
    def replay_events(self) -> None:
        self.replay()

    # How it is checked.

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.sequences.keys() == self.live.keys() | self.kept.keys()
        stats = self.scheduler.stats()
        assert stats.num_kept == len(self.kept)
        assert stats.num_running + stats.num_awaiting_kv <= self.config.max_num_seqs
        assert stats.num_held_blocks == len(
            {b for s in self.scheduler.sequences.values() for b in s.block_ids}
        )
        for expected in self.kept.values():
            sequence = expected.sequence
            hashes = prefix_hashes(sequence.root, sequence.token_ids[: expected.given])
            self.runner.check_content(sequence.block_ids, hashes)

    def teardown(self) -> None:
        """Everything that is left ends, in a bounded number of steps, as it would alone."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(100 + 20 * self.total_tokens):
            for request_id in list(self.kept):
                del self.kept[request_id]
                self.scheduler.release(request_id)
            for request_id in self.awaiting():
                self.deliver(request_id)
            if not self.scheduler.has_work:
                break
            plan = self.schedule()
            roots = {s.request_id: self.live[s.request_id].sequence.root for s in plan.scheduled}
            for progress in self.scheduler.apply(plan, self.runner.run(plan, roots)):
                self.book(progress)
            self.nothing_is_lost()
        assert not self.live, f"starved: {sorted(self.live)}"
        self.scheduler.check_integrity()
        assert self.scheduler.stats().num_held_blocks == 0
        assert not self.scheduler.sequences
        assert not self.runner.tokens, "the runner was not told to forget"
        self.replay()

    def awaiting(self) -> list[str]:
        return sorted(i for i, e in self.live.items() if e.allocation is not None)

    def schedule(self) -> StepPlan:
        others_hold = bool(self.kept or self.awaiting())
        has_sequences = bool(self.live) and not others_hold
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        ids = [s.request_id for s in plan.scheduled]
        assert len(ids) == len(set(ids)) <= self.config.max_num_seqs
        assert plan.num_tokens == sum(s.end - s.start for s in plan.scheduled)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        if has_sequences:
            assert plan.num_tokens or plan.external, "stands still though nobody is waited for"
        tables = dict(self.runner.tables)
        for added in plan.added:
            tables[added.request_id] = list(added.block_ids)
        for item in plan.scheduled:
            table = self.scheduler.sequences[item.request_id].block_ids
            assert [*tables[item.request_id], *item.new_block_ids] == table
        for allocation in plan.external:
            expected = self.live[allocation.request_id]
            assert expected.allocation is None, "allocated twice"
            expected.allocation = allocation
            expected.num_arrived = allocation.num_hit_blocks
            self.arrive(expected, 0)
        return plan

    def arrive(self, expected: Expected, num_blocks: int) -> None:
        """Another worker's blocks come in, and all that came before is still as it was."""
        assert expected.allocation is not None
        table, size = expected.allocation.block_ids, self.config.block_size
        hashes = prefix_hashes(expected.sequence.root, expected.sequence.token_ids)
        assert len(table) == -(-len(hashes) // size)
        start = expected.num_arrived * size
        end = start + num_blocks * size
        self.runner.write(table, start, hashes[start:end])
        expected.num_arrived = min(len(table), expected.num_arrived + num_blocks)
        self.runner.check_content(table, hashes[: expected.num_arrived * size])

    def deliver(self, request_id: str) -> None:
        expected = self.live[request_id]
        self.arrive(expected, len(expected.sequence.block_ids))
        expected.allocation = None
        progress = self.scheduler.commit_external(request_id, expected.tokens[0])
        assert progress is not None
        if progress.sequence.finish_reason is None:
            assert progress.sequence.num_computed_tokens == expected.given
        self.book(progress)

    def book(self, progress: SequenceProgress) -> None:
        sequence = progress.sequence
        expected = self.live[sequence.request_id]
        assert expected.sequence is sequence, "progress of a sequence that has ended"
        if progress.token_id is None:
            assert sequence.finish_reason is None
            return
        expected.produced.append(progress.token_id)
        done = len(expected.produced)
        assert expected.produced == expected.tokens[:done]
        assert sequence.token_ids[expected.given :] == expected.produced
        assert (sequence.finish_reason is not None) == (done == len(expected.tokens))
        if sequence.num_preemptions:
            event("a preempted sequence went on")
        if sequence.finish_reason is not None:
            assert sequence.finish_reason is expected.reason
            del self.live[sequence.request_id]
            if sequence.purpose is Purpose.PREFILL:
                assert sequence.num_preemptions == 0
                assert sequence.num_computed_tokens == expected.given
                self.kept[sequence.request_id] = expected

    def replay(self) -> set[bytes]:
        events = self.pool.drain_events()
        if events.cleared:
            self.findable.clear()
        self.findable = (self.findable - set(events.removed)) | set(events.stored)
        assert len(self.findable) == self.pool.num_cached_blocks
        assert all(self.pool.lookup(h) is not None for h in self.findable)
        assert self.config.prefix_caching or not self.findable
        return self.findable


TestTheSchedulerLosesNothing = SchedulerMachine.TestCase
TestTheSchedulerLosesNothing.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None
)


class ManyRuns(SchedulerMachine):
    """The same for longer."""


TestTheSchedulerLosesNothingInManyRuns = pytest.mark.slow(ManyRuns.TestCase)
TestTheSchedulerLosesNothingInManyRuns.settings = settings(
    max_examples=1500, stateful_step_count=80, deadline=None
)


# What the machine cannot tell: order, and that work is saved.


def sequence(request_id: str, prompt: list[int], max_tokens: int = 8, **kind: Any) -> Sequence:
    return Sequence(
        request_id,
        list(prompt),
        len(prompt),
        SamplingParams(max_tokens=max_tokens),
        frozenset(),
        frozenset(),
        ROOTS[0],
        **kind,
    )


class Machine:
    """A scheduler and a fake runner that step together."""

    def __init__(self, num_blocks: int, **config: int) -> None:
        sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "block_size": 4, **config}
        self.scheduler = Scheduler(SchedulerConfig(**sizes), BlockPool(num_blocks))
        self.runner = FakeRunner(sizes["block_size"])

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        roots = dict.fromkeys([s.request_id for s in plan.scheduled], ROOTS[0])
        self.scheduler.apply(plan, self.runner.run(plan, roots))
        self.scheduler.check_integrity()
        return plan


def test_the_latest_sequence_is_preempted_and_goes_on_before_those_that_wait() -> None:
    machine = Machine(num_blocks=4, max_num_seqs=2)
    for name, token in (("first", 0), ("second", 1), ("third", 2)):
        machine.scheduler.add(sequence(name, [token] * 7))
    started: list[str] = []
    while machine.scheduler.has_work:
        started += [a.request_id for a in machine.step().added]
    assert machine.scheduler.stats().num_preemptions > 0
    # "first" is never put back; "second" is, and starts again before "third" does.
    assert started.count("first") == 1
    assert started.index("third") > started.index("second", started.index("second") + 1)


def test_a_prefill_is_never_preempted() -> None:
    machine = Machine(num_blocks=4)
    grows, prefill = sequence("grows", [1] * 7), sequence("p", [2] * 7, purpose=Purpose.PREFILL)
    machine.scheduler.add(grows)
    machine.scheduler.add(prefill)
    machine.step()
    assert machine.scheduler.stats().num_kept == 1
    for _ in range(5):
        machine.step()
    assert (grows.num_preemptions, prefill.num_preemptions) == (1, 0)
    machine.runner.check_content(prefill.block_ids, prefix_hashes(ROOTS[0], [2] * 7))
    machine.scheduler.release("p")
    while machine.scheduler.has_work:
        machine.step()
    assert grows.finish_reason is FinishReason.LENGTH


def test_a_prefill_that_runs_is_passed_over_when_a_victim_is_sought() -> None:
    machine = Machine(num_blocks=5, max_num_batched_tokens=9)
    grows = sequence("grows", [1] * 7)
    prefill = sequence("p", [2] * 12, purpose=Purpose.PREFILL)
    machine.scheduler.add(grows)
    machine.scheduler.add(prefill)
    machine.step()
    machine.scheduler._config = replace(machine.scheduler._config, max_num_batched_tokens=2)
    while prefill.finish_reason is None:
        machine.step()
    assert prefill.num_preemptions == 0
    assert grows.num_preemptions > 0


def test_what_was_computed_once_is_found_again() -> None:
    machine = Machine(num_blocks=8)
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    for name in ("first", "again"):
        machine.scheduler.add(sequence(name, prompt, max_tokens=4))
        spans = []
        while machine.scheduler.has_work:
            spans += [(s.start, s.end) for s in machine.step().scheduled]
        expected = 0 if name == "first" else 8
        assert spans[0] == (expected, 9)
    longer = [*prompt, next_token(prompt), 6]
    machine.scheduler.add(sequence("longer", longer))
    assert [s.start for s in machine.step().scheduled] == [8]
    machine.scheduler.abort("longer")


def test_every_block_of_a_prompt_cut_into_chunks_is_found_again() -> None:
    machine = Machine(num_blocks=8, max_num_batched_tokens=5)
    for name in ("first", "again"):
        machine.scheduler.add(sequence(name, [1, 2, 3, 4, 5] * 4, max_tokens=1))
        first = machine.step().scheduled[0]
        while machine.scheduler.has_work:
            machine.step()
    assert first.start == 16


def test_the_last_token_of_a_cached_prompt_is_computed_for_its_logits() -> None:
    machine = Machine(num_blocks=8)
    for name in ("first", "again"):
        machine.scheduler.add(sequence(name, [3] * 8, max_tokens=1))
        plan = machine.step()
    assert [(s.start, s.end, s.samples) for s in plan.scheduled] == [(4, 8, True)]


def test_an_eviction_takes_the_end_of_a_prefix_before_its_beginning() -> None:
    machine = Machine(num_blocks=6)
    machine.scheduler.add(sequence("old", [1] * 16, max_tokens=1))
    machine.step()
    machine.scheduler.add(sequence("other", [2] * 13, max_tokens=1))
    machine.step()
    machine.scheduler.add(sequence("old again", [1] * 17, max_tokens=1))
    assert [s.start for s in machine.step().scheduled] == [8]


def test_a_sequence_ended_between_plan_and_result_is_passed_over() -> None:
    machine = Machine(num_blocks=8)
    for name in "ab":
        machine.scheduler.add(sequence(name, [1, 2]))
    plan = machine.scheduler.schedule()
    machine.scheduler.abort("a")
    result = machine.runner.run(plan, dict.fromkeys("ab", ROOTS[0]))
    (progress,) = machine.scheduler.apply(plan, result)
    assert (progress.sequence.request_id, progress.token_id) == ("b", result.token_ids[1])
    assert machine.scheduler.schedule().dropped == ("a",)
