"""Admission of waiting and swapped sequences to the running batch. Never preempts."""

from baton.engine.request import KvSource, Purpose
from baton.engine.scheduler.kv.pending_blocks import PendingBlocks
from baton.engine.scheduler.kv.prefix_cache import PrefixHit
from baton.engine.scheduler.plan import ExternalAllocation, ScheduledRange
from baton.engine.scheduler.scheduling.chunking import NOTHING_KEPT, Chunker, Kept
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.scheduling.step import PlannedRange, Step
from baton.engine.scheduler.scheduling.waiting_queue import WaitingQueue, order_of
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import Request, Sequence, SequenceStatus

# Waiting sequences that one step passes over before it looks no further: for their cache reads, or
# since a prompt that is being computed begins alike.
MAX_PASSED_OVER = 32


class Admission:
    """Admission to the batch: gives sequences slots and blocks, in the policy's order.

    Attributes:
        is_paused: no new sequence is admitted; preempted ones still are.
        num_hit_tokens, num_prompt_tokens: totals over the sequences admitted since the start.
    """

    def __init__(self, config: SchedulerConfig, states: RequestStates, chunker: Chunker) -> None:
        self.is_paused = False
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0
        self._config = config
        self._states = states
        self._chunker = chunker
        self._kv = states.kv

    def add_new(self, step: Step) -> None:
        """Admits swapped, then waiting sequences until a budget or the free blocks are used up.

        Passes over the first in the queue only if its cache reads do not fit, which the planner
        bounds, or if a prompt that is being computed begins alike: else it could starve. Called
        last: nothing is preempted in this step any more.
        """
        states = self._states
        while states.swapped and step.may_admit:
            if not self._swap_in(step, states.swapped[0]):
                return
            del states.swapped[0]
        if self._next_queue() is None or not step.may_admit:
            return
        pending, passed_over = PendingBlocks(len(self._kv.groups)), list[Sequence]()
        if step.token_budget_left > 0:
            for chunk in step.in_flight:
                self._add_pending(pending, chunk)
            for planned in step.chunks.values():
                self._add_pending(pending, planned)
        while len(passed_over) < MAX_PASSED_OVER:
            queue = self._next_queue()
            sequence = queue.head() if queue is not None else None
            if queue is None or sequence is None:
                break
            if not self._start(step, sequence, pending):
                if sequence not in step.passed_over and sequence not in step.held_back:
                    break
                passed_over.append(sequence)
            queue.pop()
        for sequence in passed_over:
            states.queue_of(sequence).push(sequence)

    def head(self) -> list[Sequence]:
        """Returns the sequence that is next to be admitted, if any."""
        queue = self._next_queue()
        head = queue.head() if queue is not None else None
        return [] if head is None else [head]

    def start_first(self, step: Step, sequence: Sequence, kept: Kept = NOTHING_KEPT) -> None:
        """Admits a waiting sequence before others of the step, if slots, blocks and the budgets
        besides `kept` suffice."""
        queue = self._states.queue_of(sequence)
        is_held = self.is_paused and queue is self._states.waiting
        if not is_held and self._start(step, sequence, kept=kept):
            queue.remove(sequence)

    def _add_pending(self, pending: PendingBlocks, chunk: PlannedRange | ScheduledRange) -> None:
        end = chunk.end - chunk.num_drafts
        self._kv.prefixes.add_pending(pending, chunk.sequence, chunk.start, end)

    def _next_queue(self) -> WaitingQueue | None:
        """Returns the queue with the next sequence to start; preempted ones ignore a pause."""
        new = None if self.is_paused else self._states.waiting.head()
        again = self._states.preempted.head()
        if new is None:
            return self._states.preempted if again is not None else None
        if again is None or order_of(new) < order_of(again):
            return self._states.waiting
        return self._states.preempted

    def _start(
        self,
        step: Step,
        sequence: Sequence,
        pending: PendingBlocks | None = None,
        kept: Kept = NOTHING_KEPT,
    ) -> bool:
        """Gives a waiting sequence a slot and blocks. False, and no change, if too few are free."""
        states, request = self._states, sequence.request
        if states.num_free_slots < 1 + request.num_unpromised_slots:
            return False
        if request.steps_together and not self._have_room(request):
            return False
        if request.kv_source is KvSource.LOCAL and step.token_budget_left <= kept.num_tokens:
            return False
        states.acquire_slot(sequence)
        if request.kv_source is KvSource.EXTERNAL and self._lacks_prefix(step, sequence):
            started = self._start_external(step, sequence)
        else:
            started = self._start_local(step, sequence, pending, kept)
        if not started:
            states.release_slot(sequence)
            return False
        states.start(sequence)
        return True

    def _have_room(self, beams: Request) -> bool:
        """Returns True if all waiting beams could start: they continue only together."""
        waiting = [s for s in beams.sequences if s.status is SequenceStatus.WAITING]
        num_slots = len(waiting) + beams.num_unpromised_slots
        return self._states.num_free_slots >= num_slots and all(
            sum(self._kv.reservations.peak_blocks(group, s.num_tokens) for s in waiting)
            <= self._kv.reservations.num_free_blocks(i)
            for i, group in enumerate(self._kv.groups)
        )

    def _lacks_prefix(self, step: Step, sequence: Sequence) -> bool:
        """Returns True if it has to wait for external KV. A sequence that needs only a prefix from
        elsewhere, and has it cached by now, does not; `step.external` reports that."""
        request = sequence.request
        if not request.spec.num_external_tokens:
            return True
        hit = self._kv.prefixes.find(sequence, needs_logits=True)
        if hit.num_tokens < request.spec.num_external_tokens:
            return True
        request.kv_source = KvSource.LOCAL
        step.external.append(ExternalAllocation(request.request_id, (), 0))
        return False

    def _start_external(self, step: Step, sequence: Sequence) -> bool:
        num_tokens = sequence.request.spec.num_external_tokens or sequence.num_tokens
        is_part = num_tokens < sequence.num_tokens
        hit = self._kv.prefixes.find(sequence, needs_logits=is_part)
        # The last token's KV may be recomputed here, for its logits.
        if not self._kv.admit(
            sequence,
            hit,
            num_tokens,
            first_query=num_tokens - 1,
            reserve_to=sequence.num_tokens if is_part and self._must_fit(sequence) else 0,
            keeps_margin=self._keeps_margin(sequence),
        ):
            return False
        self._note_hit(sequence, hit)
        self._states.await_kv(sequence)
        tables = tuple(map(tuple, sequence.block_ids))
        num_hit_blocks = hit.num_tokens // self._config.block_size
        step.external.append(
            ExternalAllocation(sequence.request.request_id, tables, num_hit_blocks)
        )
        return True

    def _start_local(
        self, step: Step, sequence: Sequence, pending: PendingBlocks | None, kept: Kept
    ) -> bool:
        most = None
        if sequence.request.leaves_last_token:  # without that token's block
            most = (sequence.num_tokens - 1) // self._config.block_size
            pending = None  # it may have nothing to compute in this step
        hit = self._kv.prefixes.find(sequence, needs_logits=True, max_blocks=most, pending=pending)
        if pending is not None and self._kv.prefixes.is_awaited(pending, sequence, hit):
            step.held_back.add(sequence)
            return False
        chunk = self._admit(step, sequence, hit, kept)
        if chunk is None and hit.copies_last:
            # No free block to copy the hit's last block to: recompute it instead.
            hit = self._kv.prefixes.find(
                sequence, needs_logits=True, max_blocks=len(hit.block_ids[0]) - 1
            )
            chunk = self._admit(step, sequence, hit, kept)
        if chunk is None:
            return False
        self._note_hit(sequence, hit)
        self._kv.clear_tail(sequence, chunk.end)
        self._states.run(sequence)
        if chunk.num_tokens:
            self._chunker.add(step, chunk)
            if pending is not None:
                self._add_pending(pending, chunk)
        else:
            step.resumed.add(sequence)
        return True

    def _admit(
        self, step: Step, sequence: Sequence, hit: PrefixHit, kept: Kept
    ) -> PlannedRange | None:
        """Allocates blocks for the first chunk after a hit, and for all of what must fit."""
        chunk = self._chunker.next(step, sequence, hit.num_tokens, kept)
        if chunk is None:
            return None
        reserve_to = sequence.num_tokens if self._must_fit(sequence) else 0
        admitted = self._kv.admit(
            sequence,
            hit,
            chunk.end,
            reserve_to=reserve_to,
            keeps_margin=self._keeps_margin(sequence),
        )
        return chunk if admitted else None

    def _must_fit(self, sequence: Sequence) -> bool:
        is_prefill = sequence.request.spec.purpose is Purpose.PREFILL
        return is_prefill or self._config.full_sequence_must_fit

    def _keeps_margin(self, sequence: Sequence) -> bool:
        """Returns True if the margin must stay free for what runs; not for a sibling of it."""
        return self._states.may_grow and len(sequence.request.sequences) == 1

    def _note_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = hit.num_tokens
            self.num_hit_tokens += hit.num_tokens
            self.num_prompt_tokens += sequence.num_tokens

    def _swap_in(self, step: Step, sequences: list[Sequence]) -> bool:
        """Brings back a group of swapped sequences. False, and no change, if too little is free."""
        states = self._states
        if states.num_free_slots < len(sequences) + sequences[0].request.num_unpromised_slots:
            return False
        # Each needs a block to continue, or it would be preempted again.
        num_left = len(sequences) if states.num_running else 0
        for sequence in sequences:
            states.acquire_slot(sequence)
        keeps_margin = self._keeps_margin(sequences[0])
        if not self._kv.swap_in(sequences, num_left=num_left, keeps_margin=keeps_margin):
            for sequence in sequences:
                states.release_slot(sequence)
            return False
        for sequence in sequences:
            states.start(sequence)
            states.run(sequence)
        step.resumed.update(sequences)
        return True
