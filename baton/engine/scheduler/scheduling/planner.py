"""Step planner: selects the sequences of a step and their tokens, in order. Applies no results."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.scheduler.kv.cache_reads import CacheReads
from baton.engine.scheduler.scheduling.admission import Admission
from baton.engine.scheduler.scheduling.chunking import NOTHING_KEPT, Chunker, Kept
from baton.engine.scheduler.scheduling.policy import DecodeOrder, Policy
from baton.engine.scheduler.scheduling.preemptor import Preemptor
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.scheduling.step import PlannedRange, Step
from baton.engine.scheduler.scheduling.waiting_queue import order_of
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import (
    Request,
    Sequence,
    SequenceStatus,
)

# Every step of this number may begin with the sequence that was passed over for its cache reads in
# most steps in a row, if in as many: all others go by rank.
READ_PATIENCE = 16


class Planner:
    """Planner: turns the request states into a step, under the budgets of `config`.

    `protects_decodes`: whether steps with decodes keep to `max_num_tokens_with_decodes`.
    """

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
        self.protects_decodes = True
        self._config = config
        self._policy = policy
        self._states = states
        self._batch_slots = states.batch_slots
        self._kv = states.kv
        self._cache_reads = CacheReads(states.kv.groups)
        self._num_passed_over: dict[Sequence, int] = {}
        self._num_steps_by_rank = 0

    def fill(self) -> Step:
        """Returns the next step. Acquires slots and blocks, and preempts, as needed."""
        step = self.new_step(self.is_decoding_any)
        self._add_overdue(step)
        match self._policy.decode_order:
            case DecodeOrder.FIRST:
                self._add_decodes(step)
                self._add_special(step)
            case DecodeOrder.AFTER_BEGUN:
                self._add_special(step)
                self._add_decodes(step)
            case DecodeOrder.BY_RANK:
                self._add_special(step, self._ranked_decodes(step))
                self._add_decodes(step)
        self._admission.add_new(step)
        if step.num_preempted:
            step.keep_decodes(self._batch_slots.is_decoding[step.decode_slots])
        if step.is_empty and not step.may_admit:
            step.may_use_margin = True
            self._add_special(step)  # skipped sequences may use the freed blocks
        if step.is_empty and not (step.resumed or step.held_back):
            self._preemptor.break_stall(step)
        self.count_passed_over(step)
        return step

    def new_step(self, has_decodes: bool) -> Step:
        """Returns an empty step with the budgets of `config` for one with or without decodes."""
        config = self._config
        tokens = config.max_num_batched_tokens
        limit = config.max_num_tokens_with_decodes
        if has_decodes and self.protects_decodes and limit is not None:
            tokens = limit
        reads = np.inf if config.max_cache_reads is None else config.max_cache_reads
        handoff = None if has_decodes else config.handoff_chunk_tokens
        return Step(tokens, reads, self._cache_reads, handoff)

    # Sequences passed over for their cache reads.

    def _add_overdue(self, step: Step) -> None:
        """Adds the sequence that was passed over in most steps in a row, every `READ_PATIENCE`
        steps at most: an empty step takes any, so none is passed over for ever."""
        if not self.has_overdue:
            return
        self._num_steps_by_rank = 0
        counts = self._num_passed_over
        longest = max(counts.values())
        sequence = min((s for s in counts if counts[s] == longest), key=order_of)
        if sequence.status is SequenceStatus.WAITING:
            self._admission.start_first(step, sequence)
            return
        self._states.leave_plain_decodes(sequence)
        self._states.refresh()
        self._add_one(step, sequence)

    @property
    def has_overdue(self) -> bool:
        """True if the next step begins with a sequence that was passed over."""
        longest = max(self._num_passed_over.values(), default=0)
        return min(self._num_steps_by_rank, longest) >= READ_PATIENCE

    def count_passed_over(self, step: Step) -> None:
        """Counts a planned step, and the sequences that it passes over."""
        self._num_steps_by_rank += 1
        counts = self._num_passed_over
        self._num_passed_over = {s: counts.get(s, 0) + 1 for s in step.passed_over}

    # Plain decodes, as arrays.

    def _ranked_decodes(self, step: Step) -> "_RankedDecodes":
        batch_slots, columns = self._states.decoding, self._batch_slots
        batch_slots = batch_slots[np.argsort(columns.rank[batch_slots], kind="stable")]
        reads = np.zeros(len(batch_slots))
        if step.has_read_limit:
            starts = columns.num_computed[batch_slots]
            reads = self._cache_reads.of_each(starts, starts + 1)
        return _RankedDecodes(columns.rank[batch_slots], np.append(0.0, np.cumsum(reads)))

    def _add_decodes(self, step: Step) -> None:
        """Adds one token for each plain decode, as far as the budgets allow."""
        columns, batch_slots = self._batch_slots, self._states.decoding
        if step.num_preempted:
            batch_slots = batch_slots[columns.is_decoding[batch_slots]]
        if not len(batch_slots) or step.token_budget_left <= 0:
            return
        if step.has_read_limit or step.token_budget_left < len(batch_slots):
            batch_slots = batch_slots[np.argsort(columns.rank[batch_slots], kind="stable")]
        if step.has_read_limit:
            batch_slots = self._within_reads(step, batch_slots)
        batch_slots = batch_slots[: step.token_budget_left]
        starts = columns.num_computed[batch_slots]
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

    def _within_reads(self, step: Step, batch_slots: Int64Array) -> Int64Array:
        """Returns the decodes whose cache reads fit, in order. One that does not is passed over,
        and those after it are tried; an empty step takes the first."""
        starts = self._batch_slots.num_computed[batch_slots]
        reads = self._cache_reads.of_each(starts, starts + 1)
        budget = max(step.cache_reads_left, reads[0] if step.is_empty else 0.0)
        fits = np.zeros(len(batch_slots), np.bool_)
        left = np.arange(len(batch_slots))
        while len(left := left[reads[left] <= budget]):  # each round takes one at least
            totals = np.cumsum(reads[left])
            taken, left = np.split(left, [int(np.searchsorted(totals, budget, side="right"))])
            fits[taken] = True
            budget -= totals[len(taken) - 1]
        owners = self._batch_slots.owners
        for batch_slot in batch_slots[~fits].tolist():
            sequence = owners[batch_slot]
            assert sequence is not None, "a decode without a sequence"
            step.passed_over[sequence] = None
        return batch_slots[fits]

    # Other running sequences, one by one.

    def _add_special(self, step: Step, decodes: "_RankedDecodes | None" = None) -> None:
        """Adds the other running sequences in the policy's order; with `decodes`, leaves the tokens
        and cache reads of those that rank before a sequence. Where reads are limited, the first
        in the queue has its turn among them: decodes behind it would leave it none."""
        first: list[Sequence] = []
        if decodes is not None and step.has_read_limit:
            first = self._admission.head()
        for sequence in sorted([*self._states.special, *first], key=order_of):
            if sequence not in first:
                self._add_one(step, sequence, decodes)
            elif decodes is not None and step.may_admit:
                kept = decodes.before(sequence.request.rank)
                self._admission.start_first(step, sequence, kept)

    def _add_one(
        self, step: Step, sequence: Sequence, decodes: "_RankedDecodes | None" = None
    ) -> None:
        if sequence.status is not SequenceStatus.RUNNING or sequence in step.chunks:
            return
        request, kept = sequence.request, NOTHING_KEPT
        if decodes is not None:
            kept = decodes.before(request.rank)
        if request.steps_together and all(map(_is_level, request.sequences)):
            self._add_beams(step, request, kept)
        elif step.token_budget_left > kept.num_tokens:
            chunk = self._chunker.next(step, sequence, sequence.num_computed_tokens, kept)
            if chunk is None or not chunk.num_tokens:
                return
            if chunk.num_drafts and not self._kv.grow(sequence, chunk.end):
                chunk.drop_drafts()  # drafts never preempt a sequence
            if self._grow(step, chunk):
                self._chunker.add(step, chunk)

    def _grow(self, step: Step, chunk: PlannedRange) -> bool:
        """Allocates the blocks of a chunk; preempts for it unless it has to leave the margin."""
        if not self.keeps_margin(step, chunk):
            return self._preemptor.grow(step, chunk.sequence, chunk.end)
        if self._kv.grow(chunk.sequence, chunk.end, keeps_margin=True):
            return True
        step.is_short_of_blocks = True
        return False

    def keeps_margin(self, step: Step, chunk: PlannedRange) -> bool:
        """Returns True for a chunk of a prompt that has begun, if anything else runs: it leaves the
        margin of free blocks."""
        sequence = chunk.sequence
        is_of_prompt = sequence.num_tokens > chunk.start + 1 and sequence.num_reserved is None
        if not is_of_prompt or not self._config.free_block_margin:
            return False
        if not step.is_empty:
            return True
        if step.may_use_margin:
            return False
        return self.is_decoding_any

    @property
    def is_decoding_any(self) -> bool:
        """True if the next token of any running sequence can be computed."""
        return bool(self._batch_slots.is_decoding.any()) or self.is_decoding_special

    @property
    def is_decoding_special(self) -> bool:
        """True if the next token of a running sequence that is no plain decode can be computed."""
        return any(map(_is_level, self._states.special))

    def _add_beams(self, step: Step, request: Request, kept: Kept) -> None:
        """Adds all beams of a request, which take a step together or not at all."""
        ranges = [PlannedRange(s, s.num_computed_tokens, s.num_tokens) for s in request.sequences]
        budget = step.token_budget_left - kept.num_tokens
        if len(ranges) > budget or not step.takes_reads(ranges, kept.reads):
            return
        for planned in ranges:
            if not self._preemptor.grow(step, planned.sequence, planned.end):
                return
        for planned in ranges:
            step.add(planned)


@dataclass(frozen=True, slots=True)
class _RankedDecodes:
    """Plain decodes by rank.

    Attributes:
        ranks: `[num_decodes]`, ascending.
        reads: `[num_decodes + 1]`, cache reads of the first 0, 1, ... of them together.
    """

    ranks: npt.NDArray[np.float64]
    reads: npt.NDArray[np.float64]

    def before(self, rank: float) -> Kept:
        """Returns what the decodes that rank before `rank` take of a step."""
        num_before = int(np.searchsorted(self.ranks, rank))
        return Kept(num_before, float(self.reads[num_before]))


def _is_level(sequence: Sequence) -> bool:
    """Returns True if the sequence runs, and only its last token is yet to be computed."""
    is_running = sequence.status is SequenceStatus.RUNNING
    return is_running and sequence.num_tokens == sequence.num_computed_tokens + 1
