"""Planner of steps ahead: the step after one whose tokens are not known yet. Never preempts.

What a sequence computes next is known before its last token is, unless something decides by that
token. So the next step has one more token for each decode, the next chunk of each prompt, sequences
whose KV has arrived, and those that can be admitted. A sequence that ends with a stop token is
computed once in vain; `apply` skips it. The device computes steps in the order of their plans, so
blocks and prefixes that the step before writes may be read, and blocks that it loses be written.
"""

import numpy as np

from baton.engine.request import Purpose
from baton.engine.scheduler.plan import NotAhead, ScheduledRange, StepPlan
from baton.engine.scheduler.scheduling.admission import Admission
from baton.engine.scheduler.scheduling.chunking import Chunker
from baton.engine.scheduler.scheduling.planner import Planner
from baton.engine.scheduler.scheduling.policy import DecodeOrder, Policy
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.scheduling.step import Step
from baton.engine.scheduler.scheduling.waiting_queue import order_of
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.sequence import Sequence, SequenceStatus


class AheadPlanner:
    """Planner of the step after a plan whose result is not applied yet."""

    def __init__(
        self,
        policy: Policy,
        states: RequestStates,
        chunker: Chunker,
        admission: Admission,
        planner: Planner,
    ) -> None:
        self._puts_decodes_first = policy.decode_order is DecodeOrder.FIRST
        self._states = states
        self._batch_slots = states.batch_slots
        self._kv = states.kv
        self._chunker = chunker
        self._admission = admission
        self._planner = planner
        self._was_short_of_blocks = False

    def follow(self, plan: StepPlan) -> Step | NotAhead:
        """Returns the step after `plan`, or the reason why it has to wait for its tokens; then
        nothing has changed. Acquires slots and blocks."""
        self._states.refresh()
        running = [c for c in plan.chunks if c.sequence.status is SequenceStatus.RUNNING]
        reason = self._why_not(running)
        if reason is not None:
            return reason
        batch_slots, starts, previous_rows = self._decodes_after(plan, running)
        has_decodes = len(batch_slots) > 0 or self._planner.is_decoding_special
        step = self._planner.new_step(has_decodes)
        step.previous_rows = previous_rows
        step.add_decodes(batch_slots, starts, self._batch_slots.sequence_index[batch_slots])
        if min(step.token_budget_left, step.cache_reads_left) < 0:
            return NotAhead.BUDGET
        due = batch_slots[starts >= self._batch_slots.num_covered[batch_slots]]
        if len(due) and not self._kv.grow_decodes(due):
            return NotAhead.BLOCKS
        if self._states.special:
            self._add_chunks(step, running)
        step.in_flight = running
        self._admission.add_new(step)
        if step.is_empty and not step.resumed:
            return NotAhead.NOTHING
        self._was_short_of_blocks = step.is_short_of_blocks
        self._planner.count_passed_over(step)
        return step

    def _why_not(self, in_flight: list[ScheduledRange]) -> NotAhead | None:
        states = self._states
        if states.speculating:
            return NotAhead.SPECULATION
        if states.resuming:
            return NotAhead.FORK
        if self._was_short_of_blocks:
            self._was_short_of_blocks = False
            return NotAhead.BLOCKS
        if self._planner.has_overdue:
            return NotAhead.BUDGET
        if states.jobs.has_work:
            return NotAhead.ENCODER
        if states.special and not self._puts_decodes_first:
            return NotAhead.POLICY
        reasons = (*map(_why_not_beside, states.special), *map(_why_not_after, in_flight))
        return next((reason for reason in reasons if reason is not None), None)

    def _decodes_after(
        self, plan: StepPlan, in_flight: list[ScheduledRange]
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Returns slots and positions of the decodes after `plan`, and the rows of its result with
        the tokens of the first ones: its decodes and the prompts that it completes, without those
        that certainly end with it; then the decodes that it does not have."""
        columns, decoding = self._batch_slots, self._states.decoding
        rows = columns.is_decoding[plan.decode_slots].nonzero()[0]
        batch_slots, starts = plan.decode_slots[rows], plan.decode_starts[rows] + 1
        completed = [c for c in in_flight if c.num_samples and _generates(c.sequence)]
        if completed:
            more = np.array([(c.first_row, c.sequence.batch_slot, c.end) for c in completed]).T
            rows, batch_slots, starts = (
                np.concatenate(pair) for pair in zip((rows, batch_slots, starts), more, strict=True)
            )
        is_behind = np.zeros(len(columns.owners), np.bool_)
        is_behind[batch_slots] = True
        continues = starts + 1 < columns.length_limit[batch_slots]
        if not continues.all():
            rows, batch_slots, starts = rows[continues], batch_slots[continues], starts[continues]
        joined = decoding[~is_behind[decoding]]
        if len(joined):
            batch_slots = np.concatenate([batch_slots, joined])
            starts = np.concatenate([starts, columns.num_computed[joined]])
        return batch_slots, starts, rows

    def _add_chunks(self, step: Step, in_flight: list[ScheduledRange]) -> None:
        """Adds the next chunk of each prompt, as far as budgets and free blocks allow."""
        chunk_of = {chunk.sequence: chunk for chunk in in_flight}
        for sequence in sorted(self._states.special, key=order_of):
            chunk = chunk_of.get(sequence)
            if chunk is None:
                self._add_next_chunk(step, sequence, sequence.num_computed_tokens)
            elif not chunk.num_samples:
                self._add_next_chunk(step, sequence, chunk.end)

    def _add_next_chunk(self, step: Step, sequence: Sequence, start: int) -> None:
        if step.token_budget_left <= 0:
            return
        chunk = self._chunker.next(step, sequence, start)
        if chunk is None:
            return
        keeps_margin = self._planner.keeps_margin(step, chunk)
        if self._kv.grow(sequence, chunk.end, keeps_margin=keeps_margin):
            self._chunker.add(step, chunk)
        else:
            step.is_short_of_blocks = True


def _why_not_beside(special: Sequence) -> NotAhead | None:
    """Returns why a sequence that is no plain decode keeps all from being planned ahead."""
    request = special.request
    if request.beams is not None:
        return NotAhead.BEAMS
    return NotAhead.ENCODER if request.spec.encoder_inputs else None


def _why_not_after(chunk: ScheduledRange) -> NotAhead | None:
    """Returns why what follows a range depends on its token."""
    if not chunk.num_samples or not _generates(chunk.sequence):
        return None
    is_forking = chunk.sequence.request.awaits_fork or not chunk.sequence.is_plain
    return NotAhead.FORK if is_forking else None


def _generates(sequence: Sequence) -> bool:
    return sequence.request.spec.purpose is Purpose.GENERATE
