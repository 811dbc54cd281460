"""The scheduler under everything that can happen to it, with a cache whose content is checked."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
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
        spare_blocks=st.integers(0, 12),
        max_num_seqs=st.integers(1, 4),
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

    @precondition(lambda self: len(self.live) + len(self.kept) < 8)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        free_ids = [i for i in "abcdefghij" if i not in self.scheduler]
        purpose, source = data.draw(st.sampled_from(self.kinds))
        # Few different beginnings, so that prefixes are shared.
        family = data.draw(st.integers(0, 1))
        length = data.draw(st.integers(1, MAX_PROMPT))
        prompt = [(family + i * i) % VOCAB_SIZE for i in range(length)]
        if data.draw(st.booleans()):
            prompt[-1] = data.draw(st.integers(0, VOCAB_SIZE - 1))
        max_tokens = data.draw(st.integers(1, MAX_TOKENS))
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
