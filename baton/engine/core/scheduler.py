"""Who computes how many tokens in the next step. Pure policy: no torch, clock, thread or I/O.

There are no phases. Each sequence has `num_tokens` and `num_computed_tokens`, and the scheduler
lets the second catch up with the first under budgets. A prefill is a sequence that is far behind,
a decode one that is one token behind; both go into one step.
"""

from collections import deque
from dataclasses import dataclass

from baton.engine.core.block_pool import BlockPool
from baton.engine.core.kv_cache_manager import KvCacheManager
from baton.engine.core.plan import (
    AddedSequence,
    ExternalAllocation,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from baton.engine.core.sequence import FinishReason, KvSource, Purpose, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Budgets of one step, and the block size."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """What a step changed about one sequence: KV computed up to `num_computed_tokens`, and perhaps
    one token."""

    sequence: Sequence
    token_id: int | None
    logprob: float | None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A moment's counts. Held blocks include those kept for a lease."""

    num_waiting: int
    num_running: int
    num_awaiting_kv: int
    num_kept: int
    num_held_blocks: int
    num_cached_blocks: int
    num_blocks: int
    num_preemptions: int


class _Budget:
    """What is left of one step."""

    def __init__(self, config: SchedulerConfig, num_running: int) -> None:
        self.num_tokens = config.max_num_batched_tokens
        self.num_seqs = config.max_num_seqs - num_running


class Scheduler:
    """Owns every sequence from `add` until it has finished and, if kept, was released."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._kv = KvCacheManager(pool, config.block_size, prefix_caching=config.prefix_caching)
        self._pool = pool
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._awaiting_kv: dict[str, Sequence] = {}
        self._kept: dict[str, Sequence] = {}
        self._known_to_runner: set[str] = set()
        self._dropped: list[str] = []
        self._num_preemptions = 0

    # The surface: add, end, step.

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind those that wait. Its id must be new."""
        assert sequence.request_id not in self._sequences, "a request id twice"
        self._sequences[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a sequence in whatever state and frees its blocks. Idempotent; None: not here."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            sequence.finish_reason = sequence.finish_reason or FinishReason.ABORTED
            self._detach(sequence)
            self._forget(sequence)
        return sequence

    def release(self, request_id: str) -> None:
        """Frees the blocks of a finished sequence that kept them. Idempotent."""
        if request_id in self._kept:
            self._forget(self._kept.pop(request_id))

    def commit_external(self, request_id: str, token_id: int) -> SequenceProgress | None:
        """The awaited KV of all its tokens is there; `token_id` follows them.

        Returns None if the sequence has ended meanwhile.
        """
        sequence = self._awaiting_kv.pop(request_id, None)
        if sequence is None:
            return None
        sequence.kv_source = KvSource.LOCAL
        sequence.num_computed_tokens = sequence.num_tokens
        self._kv.commit(sequence)
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        sequence.append(token_id)
        if sequence.finish_reason is not None:
            self._finish(sequence)
        return SequenceProgress(sequence, token_id, None)

    def schedule(self) -> StepPlan:
        """Plans the next step. The plan holds until `apply`; nothing else may be called between,
        except what ends sequences."""
        budget = _Budget(self._config, len(self._running) + len(self._awaiting_kv))
        added: list[AddedSequence] = []
        scheduled: list[ScheduledSequence] = []
        external: list[ExternalAllocation] = []
        self._schedule_running(budget, added, scheduled)
        self._schedule_waiting(budget, added, scheduled, external)
        dropped, self._dropped = tuple(self._dropped), []
        num_tokens = sum(s.end - s.start for s in scheduled)
        return StepPlan(tuple(added), tuple(scheduled), dropped, tuple(external), num_tokens)

    def apply(self, plan: StepPlan, result: StepResult) -> list[SequenceProgress]:
        """Books a computed step. Sequences that ended since the plan was made are passed over."""
        sampled = iter(zip(result.token_ids, result.logprobs, strict=True))
        progress = []
        for item in plan.scheduled:
            token_id, logprob = next(sampled) if item.samples else (None, None)
            sequence = self._sequences.get(item.request_id)
            if sequence is None or sequence.status is not SequenceStatus.RUNNING:
                continue
            sequence.num_computed_tokens = item.end
            self._kv.commit(sequence)
            if token_id is not None:
                sequence.append(token_id)
                if sequence.finish_reason is not None:
                    self._finish(sequence)
            progress.append(SequenceProgress(sequence, token_id, logprob))
        return progress

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix. Returns how many blocks were findable."""
        return self._pool.clear()

    # Questions.

    @property
    def has_work(self) -> bool:
        """Whether `schedule` could do anything: something runs, waits or is to be dropped."""
        return bool(self._running or self._waiting or self._dropped)

    @property
    def sequences(self) -> dict[str, Sequence]:
        """All sequences by id, kept ones among them. To be read only."""
        return self._sequences

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_awaiting_kv=len(self._awaiting_kv),
            num_kept=len(self._kept),
            num_held_blocks=self._pool.num_blocks - self._pool.num_free_blocks,
            num_cached_blocks=self._pool.num_cached_blocks,
            num_blocks=self._pool.num_blocks,
            num_preemptions=self._num_preemptions,
        )

    def check_integrity(self) -> None:
        """Asserts that block tables, counts and queues agree."""
        self._pool.check_integrity(s.block_ids for s in self._sequences.values())
        queues = [*self._waiting, *self._running, *self._awaiting_kv.values(), *self._kept.values()]
        assert len(queues) == len(self._sequences), "a sequence in two queues or in none"
        for sequence in self._sequences.values():
            covered = len(sequence.block_ids) * self._config.block_size
            assert sequence.num_computed_tokens <= covered, "computed beyond its blocks"

    # The step.

    def _schedule_running(
        self, budget: _Budget, added: list[AddedSequence], scheduled: list[ScheduledSequence]
    ) -> None:
        """In order of arrival; the latest are preempted when blocks run out."""
        for sequence in tuple(self._running):
            if budget.num_tokens == 0:
                return
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted by one before it
            start = sequence.num_computed_tokens
            end = min(sequence.num_tokens, start + budget.num_tokens)
            new = self._grow_or_preempt(sequence, end)
            if new is not None:
                self._emit(sequence, start, end, new, added, scheduled)
                budget.num_tokens -= end - start

    def _grow_or_preempt(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """New blocks, at the cost of later sequences. None: it was itself the last.

        A prefill is never preempted, since its blocks may be on their way to another worker; it
        has all its blocks from the start and never grows.
        """
        while (new := self._kv.grow(sequence, num_tokens)) is None:
            victim = next(s for s in reversed(self._running) if s.purpose is Purpose.GENERATE)
            self._preempt(victim)
            if victim is sequence:
                return None
        return new

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue, to be computed again from what is still cached."""
        self._running.remove(sequence)
        self._kv.free(sequence)
        self._drop_from_runner(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.appendleft(sequence)

    def _schedule_waiting(
        self,
        budget: _Budget,
        added: list[AddedSequence],
        scheduled: list[ScheduledSequence],
        external: list[ExternalAllocation],
    ) -> None:
        """First come, first served, until a budget or the blocks are used up."""
        while self._waiting and budget.num_seqs > 0:
            sequence = self._waiting[0]
            if sequence.kv_source is KvSource.EXTERNAL:
                if not self._allocate_external(sequence, external):
                    return
            elif budget.num_tokens == 0 or not self._start(sequence, budget, added, scheduled):
                return
            self._waiting.popleft()
            budget.num_seqs -= 1

    def _allocate_external(self, sequence: Sequence, out: list[ExternalAllocation]) -> bool:
        hits = self._kv.find_prefix(sequence)
        if not self._kv.admit(sequence, hits, sequence.num_tokens):
            return False
        sequence.status = SequenceStatus.AWAITING_KV
        sequence.num_cached_tokens = len(hits) * self._config.block_size
        self._awaiting_kv[sequence.request_id] = sequence
        out.append(ExternalAllocation(sequence.request_id, tuple(sequence.block_ids), len(hits)))
        return True

    def _start(
        self,
        sequence: Sequence,
        budget: _Budget,
        added: list[AddedSequence],
        scheduled: list[ScheduledSequence],
    ) -> bool:
        hits = self._kv.find_prefix(sequence)
        start = len(hits) * self._config.block_size
        end = min(sequence.num_tokens, start + budget.num_tokens)
        covers_all = sequence.purpose is Purpose.PREFILL
        if not self._kv.admit(sequence, hits, sequence.num_tokens if covers_all else end):
            return False
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = start
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        self._emit(sequence, start, end, [], added, scheduled)
        budget.num_tokens -= end - start
        return True

    def _emit(
        self,
        sequence: Sequence,
        start: int,
        end: int,
        new_block_ids: list[int],
        added: list[AddedSequence],
        scheduled: list[ScheduledSequence],
    ) -> None:
        """Writes a sequence into the plan, in full if the runner does not know it."""
        if sequence.request_id not in self._known_to_runner:
            self._known_to_runner.add(sequence.request_id)
            new_block_ids = []
            added.append(
                AddedSequence(
                    sequence.request_id,
                    tuple(sequence.token_ids),
                    sequence.num_prompt_tokens,
                    tuple(sequence.block_ids),
                    sequence.params,
                )
            )
        samples = end == sequence.num_tokens
        scheduled.append(
            ScheduledSequence(sequence.request_id, start, end, tuple(new_block_ids), samples)
        )

    # Endings.

    def _finish(self, sequence: Sequence) -> None:
        self._detach(sequence)
        if sequence.purpose is Purpose.PREFILL:
            self._kept[sequence.request_id] = sequence
        else:
            self._forget(sequence)

    def _detach(self, sequence: Sequence) -> None:
        """Takes a sequence out of whatever queue it is in."""
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._drop_from_runner(sequence)
        self._awaiting_kv.pop(sequence.request_id, None)
        self._kept.pop(sequence.request_id, None)
        sequence.status = SequenceStatus.FINISHED

    def _drop_from_runner(self, sequence: Sequence) -> None:
        if sequence.request_id in self._known_to_runner:
            self._known_to_runner.remove(sequence.request_id)
            self._dropped.append(sequence.request_id)

    def _forget(self, sequence: Sequence) -> None:
        self._kv.free(sequence)
        del self._sequences[sequence.request_id]
