"""A scheduler and a fake runner that step together, and what each request shall come to.

Whatever a test does to the scheduler it does through here, so that every step of every test is
checked for all that must always hold.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from zlib import crc32

import numpy as np

from baton.cluster.prefix import hash_chain
from baton.engine.request import EngineRequest, FinishReason, KvSource, Purpose
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.encoder_cache import OutputState
from baton.engine.scheduler.plan import (
    ExternalAllocation,
    NotAhead,
    StepPlan,
    StepResult,
)
from baton.engine.scheduler.progress import (
    DecodeProgress,
    SequenceProgress,
    StepProgress,
)
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.engine.scheduler.sequences.config import Preemption, SchedulerConfig
from baton.engine.scheduler.sequences.sequence import Request, Sequence, SequenceStatus
from baton.sampling import SamplingParams
from tests.support.scheduler.fakes import (
    CLEARED,
    POISON,
    VOCAB_SIZE,
    FakeRunner,
    alone,
    beams_alone,
    cache_group,
    given_to,
    next_token,
    score_of,
    states_of,
)
from tests.support.scheduler.job_commands import JobCommands

ROOTS = [b"r" * 16, b"s" * 16]


def request(
    request_id: str, prompt: Iterable[int], max_tokens: int = 8, *, given: int = 0, **kind: Any
) -> Request:
    """A request; of the prompt, the last `given` tokens are output that it arrives with.

    Fields of `SamplingParams` go to these, all others are the request's own.
    """
    own = ("root", "eos_token_ids", "speculates", "grammar")
    states = {"root": ROOTS[0]} | {name: kind.pop(name) for name in own if name in kind}
    fields = SamplingParams.__dataclass_fields__.keys()
    chosen = {name: kind.pop(name) for name in list(kind) if name in fields}
    params = SamplingParams(max_tokens=max_tokens, **chosen)
    spec = EngineRequest(request_id, tuple(prompt), params, len(prompt) - given, **kind)
    return Request(spec=spec, **states)


@dataclass
class Expected:
    """One request as a test sees it: what it would produce alone, and what it has so far."""

    request: Request
    outcomes: dict[int, tuple[list[int], FinishReason]]
    beams: list[tuple[tuple[int, ...], float]]
    given: dict[int, tuple[int, ...]] = field(default_factory=dict)
    produced: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    scored: list[float] = field(default_factory=list)
    allocation: ExternalAllocation | None = None
    num_arrived: int = 0
    was_external: bool = False
    has_failed: bool = False
    was_cut: bool = False

    @classmethod
    def of(cls, request: Request) -> "Expected":
        if request.beams is not None:
            return cls(request, {}, beams_alone(request))
        count = request.spec.params.num_sequences if request.spec.purpose is Purpose.GENERATE else 1
        indices = range(request.spec.sequence_index, request.spec.sequence_index + count)
        if request.outputs:
            indices = [i for i, o in zip(indices, request.outputs, strict=True) if o is not None]
        outcomes = {i: alone(request, i) for i in indices}
        return cls(request, outcomes, [], {i: given_to(request, i) for i in indices})

    @property
    def num_tokens(self) -> int:
        """Tokens it arrived with."""
        return len(self.request.spec.token_ids)

    @property
    def is_done(self) -> bool:
        wanted = self.request.spec.params.n if self.request.beams else len(self.outcomes)
        return len(self.finished) == wanted

    def states(self) -> tuple[int, ...]:
        return states_of(self.request, self.request.spec.token_ids)

    def expected_scores(self) -> list[float]:
        """Returns the scores of the prompt's tokens, where they are computed here and asked for."""
        if self.request.spec.params.prompt_logprobs is None or self.was_external:
            return []
        tokens, states = self.request.spec.token_ids, self.states()
        return [
            score_of(states[p - 1], tokens[p])
            for p in range(1, self.request.spec.num_prompt_tokens)
        ]


class Harness:
    """Steps a scheduler, plays its runner and the other workers, and checks everything.

    Args:
        groups: cache groups, or a number of blocks for a single one without a window.
        config: of the scheduler; what is not given has a size that suits small tests.

    Attributes:
        computed: the tokens [start, end) of each sequence in the last plan, in its order. A name is
            that of the request, with the index where it is not 0.
    """

    def __init__(self, groups: int | SequenceOf[CacheGroup], **config: Any) -> None:
        sizes = {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "block_size": 4,
            "max_model_len": 64,
            "vocab_size": VOCAB_SIZE,
            **config,
        }
        self.config = SchedulerConfig(**sizes)
        self.groups = [cache_group(groups)] if isinstance(groups, int) else list(groups)
        self.scheduler = Scheduler(self.config, self.groups)
        self.runner = FakeRunner(self.scheduler.batch_slots, self.groups, self.config.block_size)
        self.jobs = JobCommands(self.scheduler, self.runner)
        self.live: dict[str, Expected] = {}
        self.kept: dict[str, Expected] = {}
        self.returned: dict[str, Expected] = {}
        self.is_paused = False
        self.num_right_drafts = 0
        self.drafts_itself = False
        self.computed: dict[str, tuple[int, int]] = {}
        self._untold: dict[tuple[Request, int], tuple[tuple[int, ...], FinishReason]] = {}
        self._findable: set[bytes] = set()
        self._content: dict[tuple[int, bytes], tuple[int, ...]] = {}
        self._true_states: set[int] = set()
        self._num_idle_steps = 0
        self._was_idle = False

    # What a server does.

    def add(self, *requests: Request) -> None:
        self._note_command()
        for each in requests:
            expected = self.live[each.request_id] = Expected.of(each)
            for index, (outcome, _) in expected.outcomes.items():
                tokens = [*each.spec.token_ids, *expected.given[index], *outcome]
                for _ in range(self.config.max_drafts):  # those right of a draft behind the end
                    tokens.append(next_token(states_of(each, tokens)[-1], index))
                self._true_states.update(states_of(each, tokens))
            for tokens, _ in expected.beams:
                self._true_states.update(states_of(each, [*each.spec.token_ids, *tokens]))
        self.scheduler.add(*requests)

    def abort(self, request_id: str) -> None:
        self._note_command()
        ended = self.scheduler.abort(request_id)
        self._untold = {k: v for k, v in self._untold.items() if k[0].request_id != request_id}
        assert [r.request_id for r in ended] == [request_id]
        self._drop(request_id)

    def end_sequence(self, request_id: str, index: int) -> bool:
        """Returns whether the sequence could be ended now."""
        self._note_command()
        expected = self.live[request_id]
        before = [sequence.index for sequence in expected.request.sequences]
        self.scheduler.end_sequence(request_id, index)
        if [sequence.index for sequence in expected.request.sequences] == before:
            return False
        assert index not in expected.finished
        self._untold[expected.request, index] = (), FinishReason.ABORTED
        expected.finished.add(index)
        expected.was_cut = True
        if expected.is_done:
            del self.live[request_id]
        return True

    def preempt(self, request_id: str) -> None:
        """Preempts a request, as if others had needed the blocks of all its sequences in a step of
        its own."""
        self._note_command()
        states = self.scheduler._states
        for sequence in self.live[request_id].request.sequences:
            states.requeue(sequence)
        states.new_slots = [
            sequence for sequence in states.new_slots if sequence.batch_slots is not None
        ]

    def begin_job(self, content_hash: bytes, length: int, *, is_arrival: bool) -> None:
        self._note_command()
        self.jobs.begin(content_hash, length, is_arrival=is_arrival)

    def end_job(self, number: int, *, commits: bool) -> None:
        self._note_command()
        self.jobs.end(number, commits=commits)

    def release(self, request_id: str) -> None:
        self._note_command()
        del self.kept[request_id]
        self.scheduler.release(request_id)
        self.scheduler.release(request_id)

    def pause(self) -> None:
        self._note_command()
        self.is_paused = True
        self.scheduler.pause()

    def resume(self) -> None:
        self._note_command()
        self.is_paused = False
        self.scheduler.resume()

    def reset_prefix_cache(self) -> None:
        self._note_command()
        num_cached = sum(len(_cached(group.pool)) for group in self.groups)
        assert self.scheduler.flush_cache() == num_cached

    def evict(self, block_ids: SequenceOf[int], group: int) -> None:
        self._note_command()
        pool = self.groups[group].pool
        num_cached = len(_cached(pool))
        count = pool.evict(block_ids)
        assert count == num_cached - len(_cached(pool))

    def find(self, prompt: SequenceOf[int], index: int, group: int = 0) -> int | None:
        """Returns the id of a prompt's block in a group; None if it cannot be found."""
        hashes = hash_chain(ROOTS[0], prompt, self.config.block_size)
        return self.groups[group].pool.lookup(hashes[index])

    def forget(self, prompt: SequenceOf[int], index: int, group: int = 0) -> None:
        """Makes it unfindable."""
        block_id = self.find(prompt, index, group)
        assert block_id is not None
        self.evict([block_id], group)

    def _drop(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.live.pop(request_id, None)
            self.kept.pop(request_id, None)

    # Other workers.

    @property
    def awaiting(self) -> list[str]:
        return sorted(i for i, e in self.live.items() if e.allocation is not None)

    def arrive(self, request_id: str, num_blocks: int) -> None:
        """Another worker's blocks come in, and all that came before is still as it was."""
        expected = self.live[request_id]
        assert expected.allocation is not None
        tables, size = expected.allocation.block_ids, self.config.block_size
        states = expected.states()[: self._num_awaited(expected)]
        begin, end = expected.num_arrived, min(expected.num_arrived + num_blocks, len(tables[0]))
        for g, table in enumerate(tables):
            assert len(table) == -(-len(states) // size)
            for i in range(begin, end):
                if table[i] != NULL_BLOCK:
                    self.runner.receive(g, table[i], states[i * size : (i + 1) * size])
        expected.num_arrived = end
        self._check_arrived(expected)

    def deliver(self, request_id: str, *, with_token: bool = True) -> None:
        """All of it has come, and perhaps the token that follows."""
        self._note_command()
        expected = self.live[request_id]
        self.arrive(request_id, 10**6)
        expected.allocation, expected.was_external = None, True
        token = None
        if with_token and not expected.request.spec.num_external_tokens:
            (outcome,) = expected.outcomes.values()
            token = outcome[0][0]
        self.scheduler.commit_external(request_id, token, -1.5)
        if token is not None:
            self._note_given(expected, token)

    def _note_given(self, expected: Expected, token: int) -> None:
        """Notes another worker's first token, which the next step tells if it is the last."""
        (index,) = expected.outcomes
        outcome, reason = expected.outcomes[index]
        position = expected.num_tokens - expected.request.spec.num_prompt_tokens
        ends = len(outcome) == 1
        if ends:
            self._untold[expected.request, index] = (token,), reason
        self._note(expected.request, index, (token,), position, reason if ends else None)

    def fail(self, request_id: str) -> None:
        """It will not come."""
        self._note_command()
        self.live[request_id].allocation, self.live[request_id].has_failed = None, True
        self.scheduler.fail_external(request_id)
        self.scheduler.fail_external(request_id)

    def _work(self, plan: StepPlan) -> Iterator[tuple[Sequence, int, int]]:
        """Yields what a plan computes, in the order of the flat batch."""
        for batch_slot, start in zip(
            plan.decode_slots.tolist(), plan.decode_starts.tolist(), strict=True
        ):
            owner = self.scheduler.batch_slots.owners[batch_slot]
            assert owner is not None, "a decode without an owner"
            yield owner, start, start + 1
        for chunk in plan.chunks:
            yield chunk.sequence, chunk.start, chunk.end

    def _check_arrived(self, expected: Expected) -> None:
        allocation = expected.allocation
        assert allocation is not None
        num_awaited = self._num_awaited(expected)
        known = expected.states()[: min(expected.num_arrived * self.config.block_size, num_awaited)]
        self.runner.check_content(allocation.block_ids, known, num_awaited - 1)

    def _num_awaited(self, expected: Expected) -> int:
        """Tokens whose KV comes from elsewhere."""
        return expected.request.spec.num_external_tokens or expected.num_tokens

    # The step.

    def step(self) -> StepPlan:
        plan = self.schedule()
        self.apply(plan, self.runner.run(plan))
        return plan

    def step_without(self, choose: Callable[[list[range]], SequenceOf[range]]) -> StepPlan:
        """A step in which decodes have no token yet. `choose`: of their rows, those of such."""
        plan = self.schedule()
        result = self.runner.run(plan)
        decodes = [range(row, row + 1) for row in range(len(plan.decode_slots))]
        for chunk in plan.chunks:
            is_decode = chunk.end - chunk.num_drafts == chunk.start + 1
            if is_decode and chunk.num_samples == 1 and chunk.sequence.num_output_tokens:
                decodes.append(range(chunk.first_row, chunk.first_row + chunk.num_drafts + 1))
        late = frozenset(row for rows in choose(decodes) for row in rows)
        endings = {row: why for row, why in result.endings.items() if row not in late}
        self.apply(plan, replace(result, late=late, endings=endings))
        return plan

    def step_ahead(
        self, between: Callable[[], None] = lambda: None, num_ahead: int = 1
    ) -> StepPlan | None:
        """A step, and up to `num_ahead` after it, as long as each can be planned before the one
        before it is applied.

        Returns the last of these. The device computes each while `between` is done.
        """
        plan, last = self.schedule(), None
        result = self.runner.run(plan)
        for _ in range(num_ahead):
            ahead = self.scheduler.schedule_ahead(plan)
            self.apply(plan, result)
            if isinstance(ahead, NotAhead):
                return last
            self._check_budgets(ahead)
            between()
            plan, result, last = ahead, self.runner.run(ahead), ahead
        self.apply(plan, result)
        return last

    def step_until(self, condition: Callable[[], object]) -> StepPlan:
        """Steps until something is so, at least once. Returns the last plan."""
        for _ in range(200):
            plan = self.step()
            if condition():
                return plan
        raise AssertionError("it never is so")

    def run(self, max_steps: int = 1000) -> list[StepPlan]:
        """Steps until there is nothing to do, or nothing can be done."""
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
            if not plans[-1].made_progress:
                break
            assert len(plans) <= max_steps, "it goes on and on"
        return plans

    def schedule(self) -> StepPlan:
        if self.drafts_itself:
            self._draft()
        may_grow = any(_may_grow(s) for e in self.live.values() for s in e.request.sequences)
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        for sequence in self.scheduler._states.returned:
            self._note_return(sequence)
        self.computed = {name_of(s): (start, end) for s, start, end in self._work(plan)}
        self._check_budgets(plan)
        self._check_margin(plan, may_grow=may_grow)
        self._check_progress(plan)
        self._check_prefills()
        return plan

    def _note_return(self, sequence: Sequence) -> None:
        """It has made room, and is not here any more, though its tokens are not complete."""
        request_id = sequence.request.request_id
        self.returned[request_id] = self.live.pop(request_id)
        assert sequence.request.spec.return_cost is not None
        assert sequence.request.spec.params.num_sequences == 1
        assert sequence.request.spec.purpose is Purpose.GENERATE
        assert self.config.preemption in (Preemption.AUTO, Preemption.RETURN)

    def apply(self, plan: StepPlan, result: StepResult) -> StepProgress:
        for allocation in plan.external:
            expected = self.live.get(allocation.request_id)
            if expected is not None and expected.request.sequences and allocation.block_ids:
                assert expected.allocation is None, "allocated twice"
                expected.allocation = allocation
                expected.num_arrived = allocation.num_hit_blocks
                self._check_arrived(expected)
        self._note_drafts(plan)
        progress = self.scheduler.apply(plan, result)
        self.jobs.take(plan.encoder.held)
        self._note_decodes(progress.decoded, result)
        for item in progress.others:
            if (item.request, item.index) in self._untold:
                told = item.token_ids, item.finish_reason
                assert told == self._untold.pop((item.request, item.index))
                assert item.logprobs == (-1.5,) * len(item.token_ids)
            else:
                self._note_item(item)
        assert not self._untold, "the end of a sequence untold"
        self.check()
        return progress

    # What a result is checked against.

    def _note_decodes(self, decoded: DecodeProgress, result: StepResult) -> None:
        assert result.token_ids[decoded.rows].tolist() == decoded.token_ids.tolist()
        tokens, lengths = decoded.token_ids.tolist(), decoded.num_tokens.tolist()
        for i, (sequence, token) in enumerate(zip(decoded.sequences, tokens, strict=True)):
            position = lengths[i] - 1 - sequence.request.spec.num_prompt_tokens
            reason = decoded.reasons.get(i)
            assert reason is sequence.finish_reason
            self._note(sequence.request, sequence.index, (token,), position, reason)

    def _note_item(self, item: SequenceProgress) -> None:
        if item.finish_reason is FinishReason.RETURNED:
            expected = self.returned[item.request.request_id]
            given = expected.num_tokens - item.request.spec.num_prompt_tokens
            assert item.token_ids == ()
            num_told = len(expected.produced.get(item.index, ()))
            assert item.position == given + num_told, "a token untold"
            return
        expected = self.live[item.request.request_id]
        expected.scored += [scored.logprob for scored in item.prompt_logprobs]
        assert (item.failure is not None) == (item.finish_reason is FinishReason.FAILED)
        if item.score is None:
            reason = item.finish_reason
            self._note(item.request, item.index, item.token_ids, item.position, reason)
            return
        assert (item.token_ids, item.score) == expected.beams[item.index]
        last = item.token_ids[-1]
        assert item.finish_reason is item.request.reason_to_end(last, item.request.length_limit)
        expected.finished.add(item.index)
        self._finish(expected)

    def _note(
        self,
        request: Request,
        index: int,
        tokens: tuple[int, ...],
        position: int,
        reason: FinishReason | None,
    ) -> None:
        expected = self.live[request.request_id]
        assert expected.request is request, "progress of a request that has ended"
        if not tokens:
            assert reason is None
            return
        assert index not in expected.finished, "a sequence goes on after its end"
        produced = expected.produced.setdefault(index, [])
        given = expected.num_tokens + len(expected.given[index]) - request.spec.num_prompt_tokens
        assert position == given + len(produced), "a token at another position"
        produced += tokens
        outcome, expected_reason = expected.outcomes[index]
        assert produced == outcome[: len(produced)], "other tokens than alone"
        assert (reason is not None) == (len(produced) == len(outcome))
        if reason is not None:
            assert reason is expected_reason
            expected.finished.add(index)
            self._finish(expected)

    def _finish(self, expected: Expected) -> None:
        if not expected.is_done:
            return
        assert expected.was_cut or expected.scored == expected.expected_scores()
        request_id = expected.request.request_id
        del self.live[request_id]
        failed = any(reason is FinishReason.FAILED for _, reason in expected.outcomes.values())
        if expected.request.spec.purpose is Purpose.PREFILL and not failed:
            self.kept[request_id] = expected

    def _draft(self) -> None:
        """Guesses of all kinds: right ones, partly right ones, nonsense, too many, none."""
        for sequence in self.scheduler.speculating:
            expected = self.live[sequence.request.request_id]
            outcome, _ = expected.outcomes[sequence.index]
            num_arrived = expected.num_tokens + len(expected.given[sequence.index])
            rest = [*outcome[sequence.num_tokens - num_arrived :], 0, 0, 0, 0, 0]
            chance = crc32(sequence.token_ids.tobytes())
            match chance % 5:
                case 0:
                    self.scheduler.set_drafts(sequence, rest)
                case 1:
                    rest[chance // 5 % 4] = chance // 20 % VOCAB_SIZE
                    self.scheduler.set_drafts(sequence, rest)
                case 2:
                    self.scheduler.set_drafts(sequence, [VOCAB_SIZE - 1] * 20)
                case 3:
                    self.scheduler.set_drafts(sequence, rest[: chance // 5 % 3])

    def _note_drafts(self, plan: StepPlan) -> None:
        """Counts the drafts that are what comes next."""
        for chunk in plan.chunks:
            sequence, first = chunk.sequence, chunk.end - chunk.num_drafts
            if not chunk.num_drafts or sequence.batch_slots is None:
                continue
            states = states_of(sequence.request, sequence.tokens[: chunk.end])
            for p in range(first, chunk.end):
                if sequence.tokens[p] != next_token(states[p - 1], sequence.index):
                    break
                self.num_right_drafts += 1

    # What must always hold.

    def check(self) -> None:
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert self.scheduler.requests.keys() == self.live.keys() | self.kept.keys()
        assert stats.num_kept == len(self.kept)
        assert all(value >= 0 for value in asdict(stats).values())
        states = stats.num_held_blocks, stats.num_cached_blocks, stats.num_free_blocks
        assert sum(states) == stats.num_blocks
        assert stats.num_running + stats.num_awaiting_kv <= self.config.max_num_seqs
        assert stats.num_accepted_tokens <= self.num_right_drafts
        self._check_findable()
        self.jobs.check()
        self._check_kept()
        self._check_tables()

    def replay(self) -> None:
        """The events say what can be found in the group that sees furthest back, and which encoder
        outputs are there."""
        events = self.scheduler.drain_events()
        assert not set(events.stored) & set(events.removed)
        if events.cleared:
            self._findable.clear()
        self._findable = (self._findable - set(events.removed)) | set(events.stored)
        far = max(self.groups, key=lambda g: np.inf if g.window is None else g.window)
        blocks, outputs = _cached(far.pool).keys(), self._encoded()
        assert self._findable == blocks | outputs
        assert self.config.prefix_caching or not blocks

    def _encoded(self) -> set[bytes]:
        """Content hashes of the encoder outputs that are there."""
        entries = self.scheduler.encode_jobs.cache._entries
        return {h for h, entry in entries.items() if entry.state is OutputState.STORED}

    def check_empty(self) -> None:
        """Nothing is held any more, here or by the runner."""
        assert not self.live
        self.scheduler.schedule()
        self.check()
        assert self.scheduler.stats().num_held_blocks == 0
        assert all(group.host is None or not group.host.num_held_blocks for group in self.groups)
        assert not self.scheduler.requests
        assert not self.scheduler.has_work
        assert self.scheduler._states.encoder.num_held_blocks == 0
        assert self.scheduler.batch_slots.num_free == self.config.max_num_seqs

    def _check_findable(self) -> None:
        """Asserts that what can be found was computed for true tokens, and that one hash stands for
        one content."""
        for g, group in enumerate(self.groups):
            for block_hash, block_id in _cached(group.pool).items():
                content = tuple(self.runner.content(g, block_id))
                assert POISON not in content, "found, but not computed"
                assert CLEARED not in content, "found, but not full"
                assert self._content.setdefault((g, block_hash), content) == content
                assert content[-1] in self._true_states, "tokens were cached that no sequence has"

    def _check_kept(self) -> None:
        """Asserts that what is kept for a claimant is all there, as far back as its first query
        sees."""
        for expected in self.kept.values():
            (sequence,) = expected.request.sequences
            last = expected.num_tokens - 1
            self.runner.check_content(sequence.block_ids, expected.states(), last)

    def _check_tables(self) -> None:
        for each in self.scheduler.requests.values():
            for sequence in each.sequences:
                for trimmed, table in zip(sequence.num_trimmed, sequence.block_ids, strict=True):
                    assert not any(table[:trimmed]), "a block behind the window is held"
                    assert all(table[trimmed:]), "a block in the window is missing"
                if each.beams is not None:
                    self._true_states.update(states_of(each, sequence.token_ids))

    def _check_budgets(self, plan: StepPlan) -> None:
        config = self.config
        batch_slots = [*plan.decode_slots.tolist(), *(s.sequence.batch_slot for s in plan.chunks)]
        assert len(batch_slots) == len(set(batch_slots)) <= config.max_num_seqs
        counted = len(plan.decode_slots) + sum(s.end - s.start for s in plan.chunks)
        assert plan.num_tokens == counted <= config.max_num_batched_tokens
        if len(plan.decode_slots) and config.max_num_tokens_with_decodes is not None:
            assert counted <= config.max_num_tokens_with_decodes
        assert plan.is_pure_decode == (not plan.chunks)
        is_sampled = plan.sample_rows.tolist() == [*range(plan.num_tokens)]
        needs_more = any(chunk.scored or chunk.encoder_outputs for chunk in plan.chunks)
        assert plan.samples_every_token == (is_sampled and not needs_more)
        decodes = zip(plan.decode_starts, plan.decode_starts + 1, strict=True)
        reads = sum(
            self._reads_of(*r) for r in [*decodes, *((s.start, s.end) for s in plan.chunks)]
        )
        if config.max_cache_reads is not None and reads > config.max_cache_reads:
            owners = [self.scheduler.batch_slots.owners[batch_slot] for batch_slot in batch_slots]
            several = len(batch_slots) if owners[0] is None or not owners[0].request.beams else 1
            assert several == 1, "more cache reads than allowed, and not by a single sequence"
        most = config.long_prefill_threshold
        for chunk in plan.chunks:
            assert chunk.num_drafts <= config.max_drafts
            assert most is None or chunk.num_drafts or chunk.end - chunk.start <= most
            assert chunk.end <= chunk.sequence.request.length_limit
        encoded = sum(output.encoder_input.length for output in plan.encoder.to_compute)
        assert encoded <= config.encoder_budget

    def _reads_of(self, start: int, end: int) -> float:
        """Tokens that a range reads, as a mean over the groups, which have a layer each here."""
        windows = [group.window or end for group in self.groups]
        return sum(end - max(0, start - window + 1) for window in windows) / len(windows)

    def _check_margin(self, plan: StepPlan, *, may_grow: bool) -> None:
        """Asserts that what was let in last has left the margin free."""
        if self.config.max_cache_reads is not None or not plan.new_slots:
            return  # others may take blocks after what was overdue
        last = plan.new_slots[-1]
        is_fork = last.index > last.request.spec.sequence_index and not last.num_interruptions
        if (
            (may_grow or any(map(_may_grow, plan.new_slots[:-1])))
            and not is_fork
            and len(last.request.sequences) == 1
        ):
            for i in range(len(self.groups)):
                free = self.scheduler._kv.reservations.num_free_blocks(i, keeps_margin=True)
                assert free >= 0, "the margin is used up"

    def _check_progress(self, plan: StepPlan) -> None:
        """A step that does nothing says that only a command can change that."""
        is_idle = not plan.made_progress
        assert is_idle or not self._was_idle, "it stood still, though there was something to do"
        self._was_idle = is_idle
        waits = self.awaiting or self.kept or self.jobs.open or self.is_paused
        if not (waits or plan.external):
            assert not (is_idle and self.live), "it stands still, though it waits for no worker"
        computes = plan.num_tokens or plan.external or plan.encoder.held
        self._num_idle_steps = 0 if computes or is_idle else self._num_idle_steps + 1
        assert self._num_idle_steps <= 3 * len(self.live) + 3, "it moves, and comes nowhere"

    def _check_prefills(self) -> None:
        for expected in self.live.values():
            each = expected.request
            if each.spec.purpose is Purpose.PREFILL and each.kv_source is KvSource.LOCAL:
                # One that got nothing from elsewhere went back to those that wait, once.
                assert all(s.num_interruptions == expected.has_failed for s in each.sequences)

    def _note_command(self) -> None:
        self._was_idle, self._num_idle_steps = False, 0


def _may_grow(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.RUNNING and sequence.num_reserved is None


def name_of(sequence: Sequence) -> str:
    request_id = sequence.request.request_id
    return f"{request_id}{sequence.index}" if sequence.index else request_id


def _cached(pool: BlockPool) -> dict[bytes, int]:
    return pool._cached
