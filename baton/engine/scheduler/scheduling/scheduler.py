"""Scheduler: plans the tokens of each sequence in the next step. Pure policy: no torch, clock,
thread or I/O.

There are no phases. Each sequence has `num_tokens` and `num_computed_tokens`, and the scheduler
lets the second catch up with the first under budgets. A prefill is a sequence that is far behind,
a decode one that is one token behind; both go into one step. Plain decodes advance by array
operations over `BatchSlots`; every other sequence has a `ScheduledRange`.

`RequestStates` holds the state of every sequence; `Planner` fills a step, with what `Admission`
admits and the room that `Preemptor` makes; `OutputProcessor` applies the results of the step.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf

import numpy as np

from baton.cluster.prefix import BlockHash
from baton.engine.scheduler.kv.block_pool import CacheEvents
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.encoder_cache import EncoderCache
from baton.engine.scheduler.kv.kv_cache_manager import KvCacheManager
from baton.engine.scheduler.kv.memory_report import MemoryReport, report_memory
from baton.engine.scheduler.kv.pinned_blocks import Tables
from baton.engine.scheduler.scheduling.output_processing import OutputProcessor
from baton.engine.scheduler.scheduling.plan import StepPlan, StepResult
from baton.engine.scheduler.scheduling.planner import Planner
from baton.engine.scheduler.scheduling.policy import POLICIES
from baton.engine.scheduler.scheduling.progress import SequenceProgress, StepProgress
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.scheduling.scheduler_stats import SchedulerStats
from baton.engine.scheduler.scheduling.step import Step
from baton.engine.scheduler.sequences.batch_slots import BatchSlots, TokenArray
from baton.engine.scheduler.sequences.config import PreemptionCosts, SchedulerConfig
from baton.engine.scheduler.sequences.encoder_inputs import check_encoder_inputs
from baton.engine.scheduler.sequences.sequence import (
    FinishReason,
    KvSource,
    Purpose,
    Request,
    Sequence,
    SequenceStatus,
)


class Scheduler:
    """Owns every request from `add` until it has finished and, if kept, was released."""

    def __init__(self, config: SchedulerConfig, groups: SequenceOf[CacheGroup]) -> None:
        self.config = config
        self.costs = PreemptionCosts()
        capacity = config.max_model_len + config.max_drafts + 1
        self.batch_slots = BatchSlots(config.max_num_seqs, capacity, config.block_size, len(groups))
        self._kv = KvCacheManager(
            groups,
            self.batch_slots,
            config.block_size,
            max_chunk=config.max_num_batched_tokens,
            prefix_caching=config.prefix_caching,
        )
        self._policy = POLICIES[config.policy]
        self._states = RequestStates(
            self.batch_slots, self._kv, EncoderCache(config.encoder_cache_tokens)
        )
        self._planner = Planner(config, self._policy, self._states, self.costs)
        self._outputs_of_steps = OutputProcessor(self._states, config.vocab_size, config.block_size)
        self._cancelled: deque[str] = deque()
        self._num_arrived = 0
        self._num_steps = 0
        self._num_step_tokens = 0
        self._num_computed_tokens = 0
        self._num_pulled_tokens = 0

    # Coming and going.

    def add(self, *requests: Request) -> None:
        """Queues requests. Their ids must be new.

        Raises `InvalidArgumentError` for an encoder input that could never be computed.
        """
        for request in requests:
            if request.encoder_inputs:
                check_encoder_inputs(
                    request.encoder_inputs,
                    request.num_prompt_tokens,
                    self.config.encoder_cache_tokens,
                    self.config.encoder_budget,
                )
            assert request.request_id not in self._states.requests, "a request id twice"
            request.arrival = self._num_arrived
            request.rank = self._policy.rank(request, self._num_arrived, self._num_steps)
            self._num_arrived += 1
            self._outputs_of_steps.watch(request.stop_token_ids | request.eos_token_ids)
            self._states.add(request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states.requests

    def cancel(self, *request_ids: str) -> None:
        """Ends requests at the next `schedule` or `apply`. From any thread; idempotent."""
        self._cancelled.extend(request_ids)

    def abort(self, *request_ids: str) -> list[Request]:
        """Ends requests in whatever state and frees their blocks. Idempotent; returns those that
        were here."""
        ended = []
        for request_id in request_ids:
            request = self._states.requests.get(request_id)
            if request is not None:
                self._states.release(request_id)
                for sequence in tuple(request.sequences):
                    self._states.finish(sequence, FinishReason.ABORTED)
                ended.append(request)
        self._states.refresh()
        return ended

    def end_sequence(self, request_id: str, index: int) -> SequenceProgress | None:
        """Ends one of a request's sequences, in whatever state, and frees what it alone holds; the
        others go on.

        Does nothing and returns None where it has ended, stopped or not begun, and for sequences
        that are ranked in the end, of which none can be missing.
        """
        request = self._states.requests.get(request_id)
        if request is None or request.awaits_fork or request.params.is_ranked:
            return None
        for sequence in request.sequences:
            if sequence.index == index and sequence.status is not SequenceStatus.KEPT:
                progress = self._outputs_of_steps.end(sequence)
                self._states.refresh()
                return progress
        return None

    def release(self, request_id: str) -> None:
        """Frees the blocks of a finished request that kept them. Idempotent."""
        self._states.release(request_id)

    def pause(self) -> None:
        """Starts nothing new from now on; what has begun goes on."""
        self._planner.admission.is_paused = True

    def resume(self) -> None:
        self._planner.admission.is_paused = False

    def shutdown(self) -> list[Request]:
        """Ends everything, and starts nothing any more. Returns what was here."""
        self.pause()
        return self.abort(*self._states.requests)

    # KV that another worker computes, or takes over.

    def commit_external(
        self, request_id: str, token_id: int | None, logprob: float | None = None
    ) -> SequenceProgress | None:
        """The awaited KV of all its tokens is there, and `token_id` follows them. None: the last
        token is computed once more, for its logits, from which the request forks, or by each of its
        sequences before what that has come to; or only a part of the tokens was awaited, and the
        rest is computed.

        Returns None if the request has ended meanwhile, or no token was given.
        """
        sequence = self._states.awaiting_kv.pop(request_id, None)
        if sequence is None:
            return None
        request = sequence.request
        request.kv_source = KvSource.LOCAL
        if request.num_external_tokens:
            assert token_id is None, "a token behind others that are yet to be computed"
            self._commit_prefix(sequence)
            return None
        sequence.num_computed_tokens = sequence.num_tokens - (token_id is None)
        sequence.num_scored = request.num_prompt_tokens  # by whoever computed them
        self._kv.prefixes.commit(sequence)
        self._states.run(sequence)
        if token_id is None:
            sequence.shares_tail = True
            return None
        return self._outputs_of_steps.append_given(sequence, token_id, logprob)

    def _commit_prefix(self, sequence: Sequence) -> None:
        """The beginning of a sequence was cached elsewhere and is here now: an external hit."""
        num_tokens = sequence.request.num_external_tokens
        num_pulled = num_tokens - (sequence.num_cached_tokens or 0)
        self._num_pulled_tokens += num_pulled
        self._planner.admission.num_hit_tokens += num_pulled
        sequence.num_cached_tokens = sequence.num_computed_tokens = num_tokens
        self._kv.prefixes.commit(sequence)
        self._states.run(sequence)

    def fail_external(self, request_id: str) -> None:
        """The awaited KV will not come: it is computed here. Idempotent."""
        sequence = self._states.awaiting_kv.pop(request_id, None)
        if sequence is not None:
            sequence.request.kv_source = KvSource.LOCAL
            self._states.requeue(sequence)

    def suspend(self, request_id: str) -> SequenceProgress | None:
        """Stops a request of one sequence behind its last token. Its blocks stay as they are until
        `release`; between two steps only, with none launched ahead.

        None, and no change, unless it runs and the KV of all but that token is computed.
        """
        request = self._states.requests.get(request_id)
        if request is None or request.awaits_fork or len(request.sequences) > 1:
            return None
        (sequence,) = request.sequences
        is_level = sequence.num_tokens == sequence.num_computed_tokens + 1
        if sequence.status is not SequenceStatus.RUNNING or not is_level:
            return None
        self._states.suspend(sequence)
        self._states.refresh()
        return self._outputs_of_steps.suspended(sequence)

    def pin(self, name: str, hashes: SequenceOf[BlockHash]) -> Tables:
        """Holds the longest cached run of these blocks until `unpin`; see `PinnedBlocks.pin`."""
        return self._kv.pins.pin(name, hashes)

    def unpin(self, name: str) -> None:
        """Gives back what was pinned. Idempotent."""
        self._kv.pins.unpin(name)

    # The step.

    def set_drafts(self, sequence: Sequence, token_ids: SequenceOf[int] | TokenArray) -> None:
        """Guesses at the tokens that follow, to be verified in the sequence's next step."""
        drafts = np.array(token_ids[: self.config.max_drafts], np.int32)
        if len(drafts):
            sequence.drafts = drafts
            self._states.single_out(sequence)

    def schedule(self) -> StepPlan:
        """Plans the next step. The plan holds until `apply`; nothing else may be called between,
        except what ends requests, and `schedule_ahead`."""
        self._end_cancelled()
        self._states.fork_resuming()
        self._states.refresh()
        self._kv.begin_step()
        return self._finished(self._planner.fill())

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plans the step behind `plan`, which is computed but whose tokens nobody knows yet: one
        more token for each of its decodes and of the prompts that it ends, the next chunk of the
        others, where there is nothing else to do. None otherwise.

        The two are applied in their order, with no `schedule` between. Sequences that end with the
        first are computed in vain in the second, and passed over.
        """
        if self._cancelled:
            return None
        self._kv.begin_step()
        step = self._planner.follow(plan)
        return None if step is None else self._finished(step)

    def _finished(self, step: Step) -> StepPlan:
        self._num_steps += 1
        plan = step.plan(
            self._kv.operations,
            self._states.take_new_slots(),
            self._states.take_forgotten(),
            self._states.take_encoder_step(),
        )
        self._num_step_tokens = plan.num_tokens
        self._num_computed_tokens += plan.num_tokens
        return plan

    def count_computed(self, num_tokens: int) -> None:
        """Counts tokens of steps that were not planned one by one, as a simulation skips them."""
        self._num_computed_tokens += num_tokens

    def apply(self, plan: StepPlan, result: StepResult) -> StepProgress:
        """Books a computed step. Requests that ended since the plan was made are passed over."""
        self._end_cancelled()
        decoded = self._outputs_of_steps.book_decodes(plan, result)
        others: list[SequenceProgress] = []
        for i, span in enumerate(plan.spans):
            if span.sequence.status is SequenceStatus.RUNNING:
                others += self._outputs_of_steps.book_span(i, span, result)
        if len(plan.beam_slots):
            others += self._outputs_of_steps.book_beams(plan, result)
        others += self._outputs_of_steps.returned()
        self._states.refresh()
        return StepProgress(decoded, others)

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix. Returns how many blocks were findable."""
        return self._kv.prefixes.clear()

    def evict(self, block_ids: SequenceOf[int], group: int = 0) -> int:
        """Makes these blocks unfindable. Returns how many were findable."""
        return self._kv.groups[group].pool.evict(block_ids)

    def drain_events(self) -> CacheEvents:
        """What changed in the prefix cache since the last call, of the group that sees furthest
        back: a prefix whose blocks are all there may be found here."""
        return self._kv.prefixes.drain_events()

    # Questions.

    @property
    def has_work(self) -> bool:
        """Whether `schedule` could do anything: something runs, waits or is to be told."""
        states = self._states
        waits = len(states.waiting) > 0 and not self._planner.admission.is_paused
        runs = bool(states.num_running or states.swapped or states.preempted)
        return runs or waits or bool(states.forgotten or self._cancelled)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is here that has not ended."""
        return len(self._states.requests) > len(self._states.kept)

    @property
    def has_unreported(self) -> bool:
        """Whether something ended that the runner was not told yet."""
        return bool(self._states.forgotten)

    @property
    def requests(self) -> dict[str, Request]:
        """All requests by id, kept ones among them. To be read only."""
        return self._states.requests

    @property
    def speculating(self) -> list[Sequence]:
        """Sequences whose next step could verify drafts: not where a request is about to fork, nor
        where one token is all that is asked for."""
        return [
            s
            for s in self._states.speculating
            if s.num_tokens == s.num_computed_tokens + 1
            and not s.request.awaits_fork
            and s.request.purpose is Purpose.GENERATE
        ]

    def stats(self) -> SchedulerStats:
        states, planner = self._states, self._planner
        pools = [group.pool for group in self._kv.groups]
        return SchedulerStats(
            num_waiting=len(states.waiting) + len(states.preempted),
            num_running=states.num_running,
            num_awaiting_kv=len(states.awaiting_kv),
            num_swapped=sum(map(len, states.swapped)),
            num_kept=len(states.kept),
            num_held_blocks=sum(pool.num_held_blocks for pool in pools),
            num_cached_blocks=sum(pool.num_cached_blocks for pool in pools),
            num_blocks=sum(pool.num_blocks for pool in pools),
            num_step_tokens=self._num_step_tokens,
            num_preemptions=planner.preemptor.num_preemptions,
            num_swaps=planner.preemptor.num_swaps,
            num_returns=planner.preemptor.num_returns,
            num_hit_tokens=planner.admission.num_hit_tokens,
            num_prompt_tokens=planner.admission.num_prompt_tokens,
            num_drafted_tokens=planner.spans.num_drafted_tokens,
            num_accepted_tokens=self._outputs_of_steps.num_accepted_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_pulled_tokens=self._num_pulled_tokens,
        )

    def memory_report(self) -> MemoryReport:
        """How the blocks are used, sharing and waste among it."""
        return report_memory(self._kv.groups, self._states.sequences(), self.config.block_size)

    def common_prefix_blocks(self, group: int = 0) -> int:
        """Leading blocks that all running sequences share: what cascade attention can use."""
        batch_slots = [sequence.batch_slot for sequence in self._states.running()]
        return self._kv.common_prefix_blocks(np.array(batch_slots, np.int64), group)

    def check_integrity(self) -> None:
        """Asserts that block tables, counts, columns and places agree. For tests."""
        self._states.check_integrity()

    def _end_cancelled(self) -> None:
        while self._cancelled:
            self.abort(self._cancelled.popleft())
