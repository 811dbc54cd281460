"""Step planner: selects the sequences of a step and their tokens, in order. Applies no results."""

import numpy as np
import numpy.typing as npt

from baton.engine.scheduler.scheduling.admission import Admission
from baton.engine.scheduler.scheduling.chunking import Chunker
from baton.engine.scheduler.scheduling.plan import ScheduledRange, StepPlan
from baton.engine.scheduler.scheduling.policy import DecodeOrder, Policy
from baton.engine.scheduler.scheduling.preemptor import Preemptor
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.scheduling.step import PlannedRange, Step
from baton.engine.scheduler.scheduling.waiting_queue import order_of
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import (
    KvSource,
    Purpose,
    Request,
    Sequence,
    SequenceStatus,
)

_Ranks = npt.NDArray[np.float64]


class Planner:
    """Planner: turns the request states into a step, under the budgets of `config`."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        states: RequestStates,
        chunker: Chunker,
        admission: Admission,
        preemptor: Preemptor,
    ) -> None:
        self._chunker = chunker
        self._admission = admission
        self._preemptor = preemptor
        self._config = config
        self._policy = policy
        self._states = states
        self._batch_slots = states.batch_slots
        self._kv = states.kv

    def fill(self) -> Step:
        """Returns the next step. Acquires slots and blocks, and preempts, as needed."""
        config = self._config
        reads = np.inf if config.max_cache_reads is None else config.max_cache_reads
        step = Step(config.max_num_batched_tokens, reads)
        match self._policy.decode_order:
            case DecodeOrder.FIRST:
                self._add_decodes(step)
                self._add_special(step)
                self._admission.add_new(step)
            case DecodeOrder.LAST:
                self._add_special(step)
                self._admission.add_new(step)
                self._add_decodes(step)
            case DecodeOrder.BY_RANK:
                self._add_special(step, np.sort(self._batch_slots.rank[self._states.decoding]))
                self._add_decodes(step)
                self._admission.add_new(step)
        if step.num_preempted:
            step.keep_decodes(self._batch_slots.is_decoding[step.decode_slots])
        if step.is_empty and step.num_preempted:
            self._add_special(step)  # skipped sequences may use the freed blocks
        if step.is_empty and not step.resumed:
            self._preemptor.break_stall(step)
        return step

    def follow(self, plan: StepPlan) -> Step | None:
        """Returns the step after `plan`, whose result is not applied yet: one more token for its
        decodes and for the prompts it completes, the next chunk of the others; without sequences
        that certainly end. Returns None if the next step depends on this one's tokens, or if a
        queued sequence could be admitted."""
        states, columns, config = self._states, self._batch_slots, self._config
        of_chunks = [chunk.sequence for chunk in plan.chunks]
        # By identity: a sequence may have joined for one that left.
        is_same = np.array_equal(np.sort(plan.decode_slots), np.sort(states.decoding))
        if not is_same or not states.runs_only(of_chunks):
            return None
        if of_chunks and not (self._puts_decodes_first and all(map(_becomes_plain, plan.chunks))):
            return None
        batch_slots, starts = self._decodes_after(plan)
        reads = np.inf if config.max_cache_reads is None else config.max_cache_reads
        if int((starts + 1).sum()) > reads or len(batch_slots) > config.max_num_batched_tokens:
            return None
        num_missing = sum(s.sequence.num_tokens - s.end for s in plan.chunks)
        if self._could_admit(len(batch_slots) + num_missing):
            return None
        due = batch_slots[starts >= columns.num_covered[batch_slots]]
        if len(due) and not self._kv.grow_decodes(due):
            return None
        step = Step(config.max_num_batched_tokens, reads)
        step.add_decodes(batch_slots, starts, columns.sequence_index[batch_slots])
        for chunk in sorted(plan.chunks, key=lambda s: order_of(s.sequence)):
            if not chunk.num_samples:
                self._add_next_chunk(step, chunk.sequence, chunk.end)
        return None if step.is_empty else step

    def _decodes_after(self, plan: StepPlan) -> tuple[Int64Array, Int64Array]:
        """Returns slots and positions of the decodes after `plan`, in its order: its decodes and
        the prompts that it completes, without those that certainly end with it."""
        ended = [chunk for chunk in plan.chunks if chunk.num_samples]
        batch_slots = np.append(plan.decode_slots, [s.sequence.batch_slot for s in ended]).astype(
            np.int64
        )
        starts = np.append(plan.decode_starts + 1, [s.end for s in ended]).astype(np.int64)
        continues = starts + 1 < self._batch_slots.length_limit[batch_slots]
        generates = [s.sequence.request.purpose is Purpose.GENERATE for s in ended]
        continues[len(plan.decode_slots) :] &= np.array(generates, np.bool_)
        return batch_slots[continues], starts[continues]

    def _could_admit(self, num_due: int) -> bool:
        """Returns True if a step with `num_due` tokens due might admit a waiting sequence."""
        config, head = self._config, self._states.waiting.head()
        if head is None or self._states.num_free_slots < 1:
            return False
        is_full = num_due >= config.max_num_batched_tokens and config.long_prefill_threshold is None
        return not is_full or head.request.kv_source is KvSource.EXTERNAL

    @property
    def _puts_decodes_first(self) -> bool:
        return self._policy.decode_order is DecodeOrder.FIRST

    def _add_next_chunk(self, step: Step, sequence: Sequence, start: int) -> None:
        """Adds the next chunk of a sequence, as far as budgets and free blocks allow."""
        if step.num_tokens > 0:
            chunk = self._chunker.next(step, sequence, start, step.num_tokens)
            if chunk is not None and self._kv.grow(sequence, chunk.end):
                self._chunker.add(step, chunk)

    # Plain decodes, as arrays.

    def _add_decodes(self, step: Step) -> None:
        """Adds one token for each plain decode, as far as the budgets allow."""
        columns, batch_slots = self._batch_slots, self._states.decoding
        if step.num_preempted:
            batch_slots = batch_slots[columns.is_decoding[batch_slots]]
        if not len(batch_slots) or step.num_tokens <= 0:
            return
        if step.num_tokens < len(batch_slots):
            batch_slots = batch_slots[
                np.argsort(columns.rank[batch_slots], kind="stable")[: step.num_tokens]
            ]
        starts = columns.num_computed[batch_slots]
        if step.num_cache_reads != np.inf:
            fitting = np.cumsum(starts + 1) <= step.num_cache_reads
            fitting[0] |= step.is_empty
            batch_slots, starts = batch_slots[fitting], starts[fitting]
        due = batch_slots[starts >= columns.num_covered[batch_slots]]
        if len(due) and not self._kv.grow_decodes(due):
            preempted = step.num_preempted
            for batch_slot in due.tolist():
                sequence = columns.owners[batch_slot]
                if sequence is not None and columns.is_decoding[batch_slot]:
                    self._preemptor.grow(step, sequence, sequence.num_computed_tokens + 1)
            if step.num_preempted != preempted:
                left = columns.is_decoding[batch_slots]
                batch_slots, starts = batch_slots[left], starts[left]
        step.add_decodes(batch_slots, starts, columns.sequence_index[batch_slots])

    # Other running sequences, one by one.

    def _add_special(self, step: Step, decode_ranks: _Ranks | None = None) -> None:
        """Adds the other running sequences in the policy's order; with `decode_ranks`, leaves the
        tokens of the decodes that rank before a sequence."""
        if not self._states.special:
            return
        for sequence in sorted(self._states.special, key=order_of):
            if sequence.status is not SequenceStatus.RUNNING or sequence in step.chunks:
                continue
            request, budget = sequence.request, step.num_tokens
            if decode_ranks is not None:
                budget -= int(np.searchsorted(decode_ranks, request.rank))
            if request.steps_together and all(map(_is_level, request.sequences)):
                self._add_beams(step, request, budget)
            elif budget > 0:
                chunk = self._chunker.next(step, sequence, sequence.num_computed_tokens, budget)
                if chunk is None or not chunk.num_tokens:
                    continue
                if chunk.num_drafts and not self._kv.grow(sequence, chunk.end):
                    chunk.drop_drafts()  # drafts never preempt a sequence
                if self._preemptor.grow(step, sequence, chunk.end):
                    self._chunker.add(step, chunk)

    def _add_beams(self, step: Step, request: Request, budget: int) -> None:
        """Adds all beams of a request, which take a step together or not at all."""
        members = tuple(request.sequences)
        num_reads = sum(s.num_tokens for s in members)
        if len(members) > budget or not step.takes_reads(num_reads):
            return
        for sequence in members:
            if not self._preemptor.grow(step, sequence, sequence.num_tokens):
                return
        for sequence in members:
            step.add(PlannedRange(sequence, sequence.num_computed_tokens, sequence.num_tokens))


def _is_level(sequence: Sequence) -> bool:
    """Returns True if the sequence runs, and only its last token is yet to be computed."""
    is_running = sequence.status is SequenceStatus.RUNNING
    return is_running and sequence.num_tokens == sequence.num_computed_tokens + 1


def _becomes_plain(chunk: ScheduledRange) -> bool:
    """Returns True if the range is followed by a plain decode step: no forks, drafts, scores or
    images, and no decision by grammar or beams."""
    sequence, request = chunk.sequence, chunk.sequence.request
    is_plain = sequence.is_plain and not chunk.num_drafts and not request.awaits_fork
    return is_plain and request.params.prompt_logprobs is None and not request.encoder_inputs
