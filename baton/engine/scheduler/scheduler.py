"""Scheduler: plans the tokens of each sequence in the next step. No torch, clock, thread or I/O.

There are no phases. Each sequence has `num_tokens` and `num_computed_tokens`, and the scheduler
lets the second catch up with the first under budgets. A prefill is a sequence that is far behind, a
decode one that is one token behind; both go into one step (continuous batching). Plain decodes
advance by array operations over `BatchSlots`; every other sequence has a `ScheduledRange`.

`RequestStates` holds the state of every sequence; `Planner` fills a step with the sequences that
`Admission` admits, in the blocks that `Preemptor` frees; `AheadPlanner` plans the step after one
that is not applied yet; `OutputProcessor` applies the results.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import TypeGuard

import numpy as np

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.prefix import BlockHash
from baton.engine.request import FinishReason, KvSource, Purpose
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.encoder_cache import EncoderCache
from baton.engine.scheduler.kv.kv_cache_manager import KvCacheManager
from baton.engine.scheduler.kv.memory_report import MemoryReport, report_memory
from baton.engine.scheduler.kv.pinned_blocks import Tables
from baton.engine.scheduler.plan import NotAhead, StepPlan, StepResult
from baton.engine.scheduler.progress import SequenceProgress, StepProgress
from baton.engine.scheduler.scheduler_stats import SchedulerStats
from baton.engine.scheduler.scheduling.admission import Admission
from baton.engine.scheduler.scheduling.ahead_planner import AheadPlanner
from baton.engine.scheduler.scheduling.chunking import Chunker
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJobs
from baton.engine.scheduler.scheduling.non_finite import NonFiniteRequests
from baton.engine.scheduler.scheduling.output_processing import OutputProcessor
from baton.engine.scheduler.scheduling.planner import Planner
from baton.engine.scheduler.scheduling.policy import POLICIES, Policy, Ranker
from baton.engine.scheduler.scheduling.preemptor import Preemptor
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.scheduling.step import Step
from baton.engine.scheduler.sequences.batch_slots import BatchSlots, TokenArray
from baton.engine.scheduler.sequences.config import PreemptionCosts, SchedulerConfig
from baton.engine.scheduler.sequences.encoder_inputs import check_encoder_inputs
from baton.engine.scheduler.sequences.sequence import Request, Sequence, SequenceStatus


class Scheduler:
    """Scheduler: owns every request from `add` until it has finished and, if kept, was released.

    Attributes:
        encode_jobs: encoder outputs that are held or expected on behalf of other workers.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: SequenceOf[CacheGroup],
        policy: Policy | None = None,
    ) -> None:
        """Orders requests by `policy`; None: the one of Baton's that `config.policy` names."""
        self.config = config
        self.costs = PreemptionCosts()
        capacity = config.max_model_len + config.max_drafts + 1
        self.batch_slots = BatchSlots[Sequence](
            config.max_num_seqs, capacity, config.block_size, len(groups)
        )
        self._kv = KvCacheManager(
            groups,
            self.batch_slots,
            config.block_size,
            max_chunk=config.max_num_batched_tokens,
            prefix_caching=config.prefix_caching,
            free_block_margin=config.free_block_margin,
        )
        self._policy = policy or POLICIES[config.policy]
        self._ranker = Ranker(self._policy)
        encoder_blocks = -(-config.encoder_cache_tokens // config.block_size)
        self.encode_jobs = EncodeJobs(
            EncoderCache(encoder_blocks, config.block_size), config.encoder_budget, self._ranker
        )
        self._states = RequestStates(self.batch_slots, self._kv, self.encode_jobs)
        self._chunker = Chunker(config, self._states)
        self._admission = Admission(config, self._states, self._chunker)
        self._preemptor = Preemptor(config, self._states, self.costs)
        self._planner = Planner(
            config, self._policy, self._states, self._chunker, self._admission, self._preemptor
        )
        self._ahead_planner = AheadPlanner(
            self._policy, self._states, self._chunker, self._admission, self._planner
        )
        self._output_processor = OutputProcessor(self._states, config.vocab_size, config.block_size)
        self._non_finite = NonFiniteRequests(self._states)
        self._leaving: dict[str, None] = {}
        self._ended: list[SequenceProgress] = []
        self._num_step_tokens = 0
        self._num_computed_tokens = 0
        self._num_pulled_tokens = 0
        self._num_steps_ahead = 0

    # Request lifecycle.

    def add(self, *requests: Request) -> None:
        """Queues requests. Their ids must be new.

        Raises `InvalidArgumentError` for an encoder input that could never be computed.
        """
        for request in requests:
            if request.spec.encoder_inputs:
                check_encoder_inputs(
                    request.spec.encoder_inputs,
                    request.spec.num_prompt_tokens,
                    self.config.encoder_cache_tokens,
                    self.config.encoder_budget,
                )
            assert request.request_id not in self._states.requests, "a request id twice"
            request.rank, request.arrival = self._ranker.rank(request.spec)
            self._output_processor.watch(request.stop_token_ids | request.eos_token_ids)
            self._states.add(request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states.requests

    def abort(self, *request_ids: str) -> list[Request]:
        """Ends requests in any state and frees their blocks; no progress of them follows.
        Idempotent; returns those found."""
        ended = []
        self._ended = [p for p in self._ended if p.request.request_id not in request_ids]
        for request_id in request_ids:
            self._leaving.pop(request_id, None)
            request = self._states.requests.get(request_id)
            if request is not None:
                self._states.release(request_id)
                for sequence in tuple(request.sequences):
                    self._states.finish(sequence, FinishReason.ABORTED)
                ended.append(request)
        self._states.refresh()
        return ended

    def end_sequence(
        self, request_id: str, index: int, reason: FinishReason = FinishReason.ABORTED
    ) -> None:
        """Ends one of a request's sequences in any state and frees its own blocks; others continue.
        The progress of the next step has `reason`.

        Does nothing if the sequence has ended, stopped, not begun or awaits its KV, and for
        sequences that are ranked at the end, of which none can be missing.
        """
        request = self._states.requests.get(request_id)
        if request is None or request.awaits_fork or request.spec.params.is_ranked:
            return
        stays = (SequenceStatus.KEPT, SequenceStatus.AWAITING_KV)
        for sequence in request.sequences:
            if sequence.index == index and sequence.status not in stays:
                self._ended.append(self._output_processor.end(sequence, reason))
                self._states.refresh()
                return

    def release(self, request_id: str) -> None:
        """Frees the blocks of a finished request that kept them. Idempotent."""
        self._states.release(request_id)

    @contextmanager
    def largest_steps(self) -> Iterator[None]:
        """Fills steps with decodes up to `max_num_batched_tokens`, too, until the block ends: for
        throughput where no client waits for single tokens."""
        self._planner.protects_decodes = False
        try:
            yield
        finally:
            self._planner.protects_decodes = True

    def pause(self) -> None:
        """Admits no new request from now on; requests that have begun continue."""
        self._admission.is_paused = self.encode_jobs.is_paused = True

    def resume(self) -> None:
        self._admission.is_paused = self.encode_jobs.is_paused = False

    def shutdown(self) -> list[Request]:
        """Ends all requests and encode jobs, and admits none any more. Returns the requests."""
        self.pause()
        self.encode_jobs.release_everything()
        self._ended = []
        return self.abort(*self._states.requests)

    # KV that another worker computes, or takes over.

    def commit_external(
        self, request_id: str, token_id: int | None, logprob: float | None = None
    ) -> None:
        """Commits the awaited KV of a request; `token_id` follows its tokens. Does nothing if the
        request has ended meanwhile. If it ends with `token_id`, the next step's progress says so.

        With `token_id` None the last token is computed once more, for its logits, from which the
        request forks, or by each of its sequences before its own output; or only a prefix was
        awaited, and the rest is computed.
        """
        sequence = self._states.awaiting_kv.pop(request_id, None)
        if sequence is None:
            return
        request = sequence.request
        request.kv_source = KvSource.LOCAL
        if request.spec.num_external_tokens:
            assert token_id is None, "a token behind others that are yet to be computed"
            self._commit_prefix(sequence)
            return
        sequence.num_computed_tokens = sequence.num_tokens - (token_id is None)
        sequence.num_scored = request.spec.num_prompt_tokens  # by the worker that computed them
        self._kv.prefixes.commit(sequence)
        self._states.run(sequence)
        if token_id is None:
            sequence.shares_tail = True
            return
        progress = self._output_processor.append_given(sequence, token_id, logprob)
        if progress.finish_reason is not None:
            self._ended.append(progress)

    def _commit_prefix(self, sequence: Sequence) -> None:
        """Commits a prefix that was cached on another worker: an external hit."""
        num_tokens = sequence.request.spec.num_external_tokens
        num_pulled = num_tokens - (sequence.num_cached_tokens or 0)
        self._num_pulled_tokens += num_pulled
        self._admission.num_hit_tokens += num_pulled
        sequence.num_cached_tokens = sequence.num_computed_tokens = num_tokens
        self._kv.prefixes.commit(sequence)
        self._states.run(sequence)

    def fail_external(self, request_id: str) -> None:
        """Computes a sequence here whose awaited KV will not come. Idempotent."""
        sequence = self._states.awaiting_kv.pop(request_id, None)
        if sequence is not None:
            sequence.request.kv_source = KvSource.LOCAL
            self._states.requeue(sequence)

    def suspend(self, request_id: str) -> None:
        """Suspends a request of one sequence after its last token, once it runs and the KV of all
        its other tokens is computed; its blocks stay as they are until `release`. The progress of
        a step says so. Idempotent; does nothing for a request that is not here, or of several
        sequences."""
        if self._single(request_id) is not None:
            self._leaving[request_id] = None

    def _single(self, request_id: str) -> Sequence | None:
        """Returns the only sequence of an unfinished request that has and will have one."""
        request = self._states.requests.get(request_id)
        if request is None or request.awaits_fork or request_id in self._states.kept:
            return None
        return request.sequences[0] if len(request.sequences) == 1 else None

    @property
    def _may_suspend_now(self) -> bool:
        return any(_is_level(self._single(request_id)) for request_id in self._leaving)

    def _suspended(self) -> list[SequenceProgress]:
        """Suspends the sequences that `suspend` named, as far as possible between these steps."""
        progress = []
        for request_id in tuple(self._leaving):
            sequence = self._single(request_id)
            if _is_level(sequence) and not self.batch_slots.num_unapplied:
                self._states.suspend(sequence)
                progress.append(self._output_processor.suspended(sequence))
            elif sequence is not None:
                continue
            del self._leaving[request_id]
        return progress

    def pin(self, name: str, hashes: SequenceOf[BlockHash]) -> Tables:
        """Pins the longest cached run of these blocks until `unpin`; see `PinnedBlocks.pin`."""
        return self._kv.pinned_blocks.pin(name, hashes)

    def unpin(self, name: str) -> None:
        """Releases pinned blocks. Idempotent."""
        self._kv.pinned_blocks.unpin(name)

    # The step.

    def set_drafts(self, sequence: Sequence, token_ids: SequenceOf[int] | TokenArray) -> None:
        """Sets draft tokens, to be verified in the sequence's next step."""
        drafts = np.array(token_ids[: self.config.max_drafts], np.int32)
        if len(drafts):
            sequence.drafts = drafts
            self._states.leave_plain_decodes(sequence)

    def schedule(self) -> StepPlan:
        """Plans the next step. The plan is valid until `apply`; nothing else may be called between,
        except, once the plan was launched, calls that end requests, and `schedule_ahead`: sequences
        may read what others compute in the same step."""
        self.batch_slots.note_all_applied()
        self._non_finite.has_requeued = False
        self._states.fork_resuming()
        self._states.refresh()
        self._kv.begin_step()
        self.encode_jobs.schedule()
        return self._finished(self._planner.fill())

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | NotAhead:
        """Plans the step after `plan`, which is launched but whose tokens are not known yet.
        Returns the reason if it has to wait for them.

        The caller applies both in order, with no `schedule` between. The second computes tokens of
        sequences that end with the first in vain; `apply` skips them. Calls that end, commit or add
        requests may come between, as between other steps; no blocks of the second are announced
        before both are done.
        """
        if self._may_suspend_now:
            return NotAhead.SUSPENSION
        if self._non_finite.has_requeued:
            return NotAhead.FAILURE
        self._kv.begin_step()
        step = self._ahead_planner.follow(plan)
        if isinstance(step, NotAhead):
            return step
        self._num_steps_ahead += 1
        return self._finished(step)

    def _finished(self, step: Step) -> StepPlan:
        self._ranker.num_steps += 1
        self.batch_slots.note_planned()
        plan = step.plan(
            self._kv.operations,
            self._states.take_new_slots(),
            self._states.take_released(),
            self._states.take_encoder_step(),
            self._states.encoder,
        )
        self._num_step_tokens = plan.num_tokens
        self._num_computed_tokens += plan.num_tokens
        return plan

    def count_computed(self, num_tokens: int) -> None:
        """Counts tokens of steps that were not planned one by one, as a simulation skips them."""
        self._num_computed_tokens += num_tokens

    def apply(self, plan: StepPlan, result: StepResult) -> StepProgress:
        """Applies a computed step. Skips requests that ended since the plan was made; ends those
        whose logits are not finite. Returns the progress of the step, and of what ended before."""
        self.batch_slots.note_applied()
        self._states.encoder.note_computed(plan.encoder.to_compute)
        non_finite = self._non_finite.take(plan, result)
        if non_finite:
            self.abort(*non_finite)
        decoded = self._output_processor.apply_decodes(plan, result)
        others, self._ended = self._ended, []
        for i, chunk in enumerate(plan.chunks):
            if chunk.sequence.status is SequenceStatus.RUNNING:
                others += self._output_processor.apply_chunk(i, chunk, result)
        if len(plan.beam_slots):
            others += self._output_processor.apply_beams(plan, result)
        others += self._output_processor.returned()
        others += self._suspended()
        self._states.refresh()
        return StepProgress(decoded, others, non_finite)

    def fail(self, plan: StepPlan) -> list[Request]:
        """Ends the requests that a step computed, which has no result: in place of `apply`. Returns
        them; one that ended since the plan was made is not among them."""
        self.batch_slots.note_applied()
        self._states.encoder.note_computed(plan.encoder.to_compute)
        owners = self.batch_slots.owners
        decoding = [owners[batch_slot] for batch_slot in plan.decode_slots.tolist()]
        sequences = [s for s in decoding if s is not None]
        sequences += [chunk.sequence for chunk in plan.chunks]
        running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
        return self.abort(*dict.fromkeys(s.request.request_id for s in running))

    def flush_cache(self, hashes: SequenceOf[BlockHash] | None = None) -> int:
        """Drops cached blocks with these chain hashes, and encoder outputs with these content
        hashes; None: all of both. Sequences that hold such blocks or outputs keep them. Returns how
        many blocks were cached, of all prefixes."""
        if hashes is None:
            self._states.encoder.clear()
            return self._kv.prefixes.clear()
        self._states.encoder.evict(hashes)
        return self._kv.prefixes.evict(hashes)

    def drain_events(self) -> KvEvents:
        """Returns the cache events since the last call: content hashes of encoder outputs, and
        chain hashes of the group with the largest window: a prefix whose blocks it has all stored
        may be a hit."""
        return self._kv.prefixes.drain_events().merged(self._states.encoder.drain_events())

    # Queries.

    @property
    def has_work(self) -> bool:
        """True if `schedule` could do anything: a sequence runs, waits or must be reported, or an
        encode job waits."""
        states = self._states
        waits = len(states.waiting) > 0 and not self._admission.is_paused
        runs = bool(states.num_running or states.swapped or states.preempted)
        ended = bool(states.released or self._ended)
        return runs or waits or ended or states.jobs.has_work

    @property
    def has_events(self) -> bool:
        """True if `drain_events` returns any."""
        return self._kv.prefixes.has_events or self._states.encoder.has_events

    @property
    def requests(self) -> dict[str, Request]:
        """All requests by id, kept ones included. Read-only."""
        return self._states.requests

    @property
    def speculating(self) -> list[Sequence]:
        """Sequences whose next step could verify drafts: not before a fork, and not in a prefill,
        which needs one token only."""
        return [
            s
            for s in self._states.speculating
            if s.num_tokens == s.num_computed_tokens + 1
            and not s.request.awaits_fork
            and s.request.spec.purpose is Purpose.GENERATE
        ]

    def stats(self) -> SchedulerStats:
        states, preemptor, admission = self._states, self._preemptor, self._admission
        pools = [group.pool for group in self._kv.groups]
        hosts = [group.host for group in self._kv.groups if group.host is not None]
        return SchedulerStats(
            num_waiting=len(states.waiting) + len(states.preempted),
            num_running=states.num_running,
            num_awaiting_kv=len(states.awaiting_kv),
            num_swapped=sum(map(len, states.swapped)),
            num_kept=len(states.kept),
            num_held_blocks=sum(pool.num_held_blocks for pool in pools),
            num_cached_blocks=sum(pool.num_cached_blocks for pool in pools),
            num_free_blocks=sum(pool.num_free_blocks - pool.num_cached_blocks for pool in pools),
            num_blocks=sum(pool.num_blocks for pool in pools),
            num_reserved_blocks=self._kv.reservations.num_reserved_blocks,
            num_host_blocks=sum(host.num_blocks for host in hosts),
            num_held_host_blocks=sum(host.num_held_blocks for host in hosts),
            num_step_tokens=self._num_step_tokens,
            num_recomputes=preemptor.num_recomputes,
            num_swaps=preemptor.num_swaps,
            num_swapped_out_blocks=self._kv.swap.num_blocks_out,
            num_swapped_in_blocks=self._kv.swap.num_blocks_in,
            num_returns=preemptor.num_returns,
            num_hit_tokens=admission.num_hit_tokens,
            num_prompt_tokens=admission.num_prompt_tokens,
            num_drafted_tokens=self._chunker.num_drafted_tokens,
            num_accepted_tokens=self._output_processor.num_accepted_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_pulled_tokens=self._num_pulled_tokens,
            num_steps_ahead=self._num_steps_ahead,
            num_encoder_blocks=states.encoder.num_blocks,
            num_held_encoder_blocks=states.encoder.num_held_blocks,
            num_cached_encoder_blocks=states.encoder.num_cached_blocks,
            num_non_finite_requests=self._non_finite.num_requests,
            num_encode_jobs=states.jobs.num_jobs,
            num_waiting_encode_jobs=states.jobs.num_waiting,
            num_waiting_encoder_tokens=states.jobs.num_waiting_tokens,
        )

    def memory_report(self) -> MemoryReport:
        """Returns the block usage, with sharing and waste."""
        return report_memory(self._kv.groups, self._states.sequences(), self.config.block_size)

    def check_integrity(self) -> None:
        """Asserts that block tables, counts, batch slots and states agree. For tests."""
        self._states.check_integrity()


def _is_level(sequence: Sequence | None) -> TypeGuard[Sequence]:
    """Returns True for a sequence that runs and lacks the KV of its last token alone."""
    if sequence is None or sequence.status is not SequenceStatus.RUNNING:
        return False
    return sequence.num_tokens == sequence.num_computed_tokens + 1
