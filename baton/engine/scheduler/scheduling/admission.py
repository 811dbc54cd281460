"""Admission of waiting sequences to the running batch: acquires batch slots and blocks, preempts
nothing.
"""

from baton.engine.scheduler.kv.prefix_cache import PrefixHit
from baton.engine.scheduler.scheduling.chunking import Chunker
from baton.engine.scheduler.scheduling.plan import ExternalAllocation
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.scheduling.step import PlannedRange, Step
from baton.engine.scheduler.scheduling.waiting_queue import WaitingQueue, order_of
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import (
    KvSource,
    Purpose,
    Request,
    Sequence,
    SequenceStatus,
)


class Admission:
    """Lets sequences in: the swapped first, then those that wait, in the policy's order.

    Attributes:
        is_paused: nothing that has not begun is let in.
        num_hit_tokens, num_prompt_tokens: of the sequences let in since the start.
    """

    def __init__(self, config: SchedulerConfig, states: RequestStates, spans: Chunker) -> None:
        self.is_paused = False
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0
        self._config = config
        self._states = states
        self._spans = spans
        self._kv = states.kv

    def add_new(self, step: Step) -> None:
        """Swapped sequences, then those that wait, until a budget or the blocks are used up.

        Who comes first is not passed over, or it might never find room.
        """
        states = self._states
        while states.swapped and not step.num_preempted:
            if not self._swap_in(step, states.swapped[0]):
                return
            del states.swapped[0]
        while not step.num_preempted:
            queue = self._next_queue()
            sequence = queue.head() if queue is not None else None
            if queue is None or sequence is None or not self._start(step, sequence):
                return
            queue.pop()

    def _next_queue(self) -> WaitingQueue | None:
        """Where the next sequence to start is. What was preempted has begun: no pause holds it."""
        new = None if self.is_paused else self._states.waiting.head()
        again = self._states.preempted.head()
        if new is None:
            return self._states.preempted if again is not None else None
        if again is None or order_of(new) < order_of(again):
            return self._states.waiting
        return self._states.preempted

    def _start(self, step: Step, sequence: Sequence) -> bool:
        """Gives a waiting sequence a slot and blocks. False, and no change: there is no room."""
        states, request = self._states, sequence.request
        if states.num_free_slots < 1 + request.num_unforked:
            return False
        if request.steps_together and not self._have_room(request):
            return False
        if request.kv_source is KvSource.LOCAL and step.num_tokens <= 0:
            return False
        states.acquire_slot(sequence)
        if request.kv_source is KvSource.EXTERNAL and self._lacks_prefix(step, sequence):
            started = self._start_external(step, sequence)
        else:
            started = self._start_local(step, sequence)
        if not started:
            states.release_slot(sequence)
            return False
        states.start(sequence)
        return True

    def _have_room(self, beams: Request) -> bool:
        """Whether all beams that wait could start, since none goes on without the others."""
        waiting = [s for s in beams.sequences if s.status is SequenceStatus.WAITING]
        return self._states.num_free_slots >= len(waiting) and all(
            sum(self._kv.reservations.peak_blocks(group, s.num_tokens) for s in waiting)
            <= self._kv.reservations.num_free_blocks(i)
            for i, group in enumerate(self._kv.groups)
        )

    def _lacks_prefix(self, step: Step, sequence: Sequence) -> bool:
        """Whether it has to wait for KV from elsewhere. One of which only the beginning comes from
        there, and which has all of that by now, does not; whoever would have brought it is told."""
        request = sequence.request
        if not request.num_external_tokens:
            return True
        hit = self._kv.prefixes.find(sequence, needs_logits=True)
        if hit.num_tokens < request.num_external_tokens:
            return True
        request.kv_source = KvSource.LOCAL
        step.external.append(ExternalAllocation(request.request_id, (), 0))
        return False

    def _start_external(self, step: Step, sequence: Sequence) -> bool:
        num_tokens = sequence.request.num_external_tokens or sequence.num_tokens
        is_part = num_tokens < sequence.num_tokens
        hit = self._kv.prefixes.find(sequence, needs_logits=is_part)
        # The last token's KV may be computed once more, for its logits.
        if not self._kv.admit(
            sequence,
            hit,
            num_tokens,
            first_query=num_tokens - 1,
            reserve_to=sequence.num_tokens if is_part and self._must_fit(sequence) else 0,
            margin=self._margin(sequence),
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

    def _start_local(self, step: Step, sequence: Sequence) -> bool:
        most = None
        if sequence.request.leaves_last_token:  # not the block of that token
            most = (sequence.num_tokens - 1) // self._config.block_size
        hit = self._kv.prefixes.find(sequence, needs_logits=True, max_blocks=most)
        span = self._admit(step, sequence, hit)
        if span is None and hit.copies_last:
            # There is no block to copy the last one to; it is computed again in its own place.
            hit = self._kv.prefixes.find(
                sequence, needs_logits=True, max_blocks=len(hit.block_ids[0]) - 1
            )
            span = self._admit(step, sequence, hit)
        if span is None:
            return False
        self._note_hit(sequence, hit)
        self._kv.clear_tail(sequence, span.end)
        self._states.run(sequence)
        if span.num_tokens:
            self._spans.add(step, span)
        else:
            step.resumed.add(sequence)
        return True

    def _admit(self, step: Step, sequence: Sequence, hit: PrefixHit) -> PlannedRange | None:
        """Blocks for the first span behind a hit, and for all of the prompt where it must fit."""
        span = self._spans.cut(step, sequence, hit.num_tokens, step.num_tokens)
        if span is None:
            return None
        reserve_to = sequence.num_tokens if self._must_fit(sequence) else 0
        margin = self._margin(sequence)
        admitted = self._kv.admit(sequence, hit, span.end, reserve_to=reserve_to, margin=margin)
        return span if admitted else None

    def _must_fit(self, sequence: Sequence) -> bool:
        is_prefill = sequence.request.purpose is Purpose.PREFILL
        return is_prefill or self._config.full_sequence_must_fit

    def _margin(self, sequence: Sequence) -> int:
        """Blocks that must stay free for what runs; the rest of a request that runs needs none."""
        if not self._states.num_running or len(sequence.request.sequences) > 1:
            return 0
        return self._config.free_block_margin

    def _note_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = hit.num_tokens
            self.num_hit_tokens += hit.num_tokens
            self.num_prompt_tokens += sequence.num_tokens

    def _swap_in(self, step: Step, sequences: list[Sequence]) -> bool:
        """Brings sequences back that went together. False, and no change: there is no room."""
        states = self._states
        needed = len(sequences) + sum(s.request.num_unforked for s in sequences)
        if states.num_free_slots < needed:
            return False
        margin = 0
        if states.num_running:  # each must be able to go on, or it would have to leave again
            margin = max(self._margin(sequences[0]), len(sequences))
        for sequence in sequences:
            states.acquire_slot(sequence)
        if not self._kv.swap_in(sequences, margin=margin):
            for sequence in sequences:
                states.release_slot(sequence)
            return False
        for sequence in sequences:
            states.start(sequence)
            states.run(sequence)
        step.resumed.update(sequences)
        return True
