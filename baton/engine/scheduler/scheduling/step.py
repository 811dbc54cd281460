"""Step under construction: the remaining budgets, and the sequences added so far."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.scheduler.kv.cache_reads import CacheReads
from baton.engine.scheduler.kv.encoder_cache import EncoderCache, EncoderStep
from baton.engine.scheduler.kv.memory_operations import BlockMove, MemoryOperations
from baton.engine.scheduler.plan import ExternalAllocation, ScheduledRange, StepPlan
from baton.engine.scheduler.scheduling.encoder_schedule import EncoderSchedule
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.config import Preemption
from baton.engine.scheduler.sequences.sequence import Sequence

NO_ROWS: Int64Array = np.zeros(0, np.int64)


@dataclass(slots=True)
class PlannedRange:
    """Planned tokens [start, end) of a sequence, the last `num_drafts` of them drafts.

    Attributes:
        ends_step: nothing follows in its step, which would delay the rest of its prompt.
    """

    sequence: Sequence
    start: int
    end: int
    num_drafts: int = 0
    encoder: EncoderSchedule | None = None
    ends_step: bool = False

    def drop_drafts(self) -> None:
        self.end -= self.num_drafts
        self.num_drafts = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def samples(self) -> bool:
        return self.end - self.num_drafts == self.sequence.num_tokens

    @property
    def scored(self) -> range:
        """Positions of prompt tokens whose log-probabilities this range's logits give."""
        request = self.sequence.request
        if request.spec.params.prompt_logprobs is None:
            return range(0)
        first = max(self.sequence.num_scored, self.start + 1)
        return range(first, min(self.end + 1, request.spec.num_prompt_tokens))


class Step:
    """Step that the planner fills and turns into a plan.

    Attributes:
        token_budget_left: tokens that may yet be scheduled.
        cache_reads_left: cache reads that may yet be scheduled; infinite without a limit.
        handoff_chunk_tokens: fewest tokens of a chunk that is cut for a handoff. None: none is cut.
        preempted: request id of each preempted sequence, and handling of its KV.
        passed_over: sequences for which too few cache reads were left.
        held_back: prompts that wait for another's work: for a block that a prompt of this step will
            compute in a later one, to continue from it; or for what encode jobs hold or expect.
        is_short_of_blocks: a prompt that has begun waits for free blocks.
        may_use_margin: nothing else can run, so a prompt need not leave blocks free.
        resumed: sequences that came back with all their KV, to compute from the next step on.
        in_flight: ranges of the step before, if its result is not applied yet.
    """

    def __init__(
        self,
        token_budget: int,
        cache_read_budget: float,
        cache_reads: CacheReads,
        handoff_chunk_tokens: int | None = None,
    ) -> None:
        self.token_budget_left = token_budget
        self.cache_reads_left = cache_read_budget
        self.handoff_chunk_tokens = handoff_chunk_tokens
        self._cache_reads = cache_reads
        self.preempted: list[tuple[str, Preemption]] = []
        self.passed_over: dict[Sequence, None] = {}
        self.held_back: set[Sequence] = set()
        self.is_short_of_blocks = False
        self.may_use_margin = False
        self.resumed: set[Sequence] = set()
        self.chunks: dict[Sequence, PlannedRange] = {}
        self.external: list[ExternalAllocation] = []
        self.decode_slots = NO_ROWS
        self.decode_starts = NO_ROWS
        self.decode_indices = NO_ROWS
        self.previous_rows = NO_ROWS
        self.in_flight: list[ScheduledRange] = []

    @property
    def num_preempted(self) -> int:
        """Number of sequences preempted in this step."""
        return len(self.preempted)

    @property
    def may_admit(self) -> bool:
        """True unless sequences that have begun lack blocks, which a new one would take."""
        return not (self.preempted or self.is_short_of_blocks)

    @property
    def is_empty(self) -> bool:
        return not self.chunks and not self.external and not len(self.decode_slots)

    @property
    def has_read_limit(self) -> bool:
        return self.cache_reads_left != np.inf

    def takes_reads(self, ranges: Iterable[PlannedRange], kept: float = 0.0) -> bool:
        """Returns True if the cache reads of these ranges fit and leave `kept` to others. An empty
        step takes any, to make progress. Notes the sequences that are passed over."""
        if not self.has_read_limit or (self.is_empty and not kept):
            return True
        ranges = list(ranges)
        if sum(map(self._reads_of, ranges)) <= self.cache_reads_left - kept:
            return True
        self.passed_over.update(dict.fromkeys(chunk.sequence for chunk in ranges))
        return False

    def add(self, chunk: PlannedRange) -> None:
        self.chunks[chunk.sequence] = chunk
        self.passed_over.pop(chunk.sequence, None)
        self.token_budget_left -= chunk.num_tokens
        if chunk.ends_step:
            self.token_budget_left = 0
        self.cache_reads_left -= self._reads_of(chunk)

    def add_decodes(self, batch_slots: Int64Array, starts: Int64Array, indices: Int64Array) -> None:
        """Adds plain decodes: the sequences on these slots advance by the token at `starts`."""
        self.decode_slots, self.decode_starts, self.decode_indices = batch_slots, starts, indices
        self.token_budget_left -= len(batch_slots)
        if self.has_read_limit:
            self.cache_reads_left -= float(self._cache_reads.of_each(starts, starts + 1).sum())

    def keep_decodes(self, is_kept: "npt.NDArray[np.bool_]") -> None:
        """Drops the decodes that have lost their blocks since."""
        self.decode_slots = self.decode_slots[is_kept]
        self.decode_starts = self.decode_starts[is_kept]
        self.decode_indices = self.decode_indices[is_kept]

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has lost its blocks, and restores its share of the budgets."""
        chunk = self.chunks.pop(sequence, None)
        if chunk is not None:
            self.token_budget_left += chunk.num_tokens
            self.cache_reads_left += self._reads_of(chunk)

    def _reads_of(self, chunk: PlannedRange) -> float:
        return self._cache_reads.of(chunk.start, chunk.end) if self.has_read_limit else 0.0

    def plan(
        self,
        operations: MemoryOperations,
        new_slots: list[Sequence],
        released: list[tuple[str, int]],
        encoder: EncoderStep,
        encoder_cache: EncoderCache,
    ) -> StepPlan:
        """Returns the finished plan."""
        rows = _Rows(self, encoder_cache)
        chunks = tuple(map(rows.add, self.chunks.values()))
        sampled, beams = rows.sampled(), rows.beams()
        return StepPlan(
            decode_slots=self.decode_slots,
            decode_starts=self.decode_starts,
            previous_rows=self.previous_rows,
            chunks=chunks,
            new_slots=tuple(new_slots),
            released=tuple(released),
            external=tuple(self.external),
            num_tokens=rows.num_tokens,
            made_progress=not self.is_empty
            or self.num_preempted + len(self.resumed) + len(encoder.held) > 0,
            sample_rows=sampled[0],
            sample_slots=sampled[1],
            sample_indices=sampled[2],
            sample_lengths=sampled[3],
            beam_rows=beams[0],
            beam_slots=beams[1],
            beam_lengths=beams[3],
            num_beam_candidates=rows.num_candidates,
            swap_out=tuple(operations.swap_out),
            copies=tuple([BlockMove(g, source, t) for (g, t), source in operations.copies.items()]),
            cleared=tuple(operations.cleared),
            swap_in=tuple(operations.swap_in),
            encoder=encoder,
            preempted=tuple(self.preempted),
        )


class _Rows:
    """Rows of the flat batch: ranges after the decodes, and the rows whose logits are needed."""

    def __init__(self, step: Step, encoder_cache: EncoderCache) -> None:
        self._encoder_cache = encoder_cache
        self._decode_slots = step.decode_slots
        self._decode_starts = step.decode_starts
        self._decode_indices = step.decode_indices
        self._sampled: list[tuple[int, int, int, int]] = []  # row, slot, sequence index, length
        self._beams: list[tuple[int, int, int, int]] = []
        self.num_tokens = len(step.decode_slots)
        self.num_candidates = 0

    def add(self, planned: PlannedRange) -> ScheduledRange:
        sequence, request = planned.sequence, planned.sequence.request
        begin = self.num_tokens - planned.start  # flat row of position 0
        self.num_tokens += planned.end - planned.start
        first_row = len(self._decode_slots) + len(self._sampled)
        num_samples = 0
        if planned.samples and request.beams is not None:
            row = begin + planned.end - 1
            self._beams.append((row, sequence.batch_slot, sequence.index, planned.end))
            self.num_candidates = max(self.num_candidates, request.beams.num_candidates)
        elif planned.samples:
            num_samples = 1 + request.num_unforked
            first = planned.end - planned.num_drafts
            for length in range(first, planned.end + 1):
                for i in range(num_samples):
                    row = begin + length - 1
                    self._sampled.append((row, sequence.batch_slot, sequence.index + i, length))
        return ScheduledRange(
            sequence,
            planned.start,
            planned.end,
            planned.num_drafts,
            num_samples,
            first_row,
            planned.scored,
            self._encoder_cache.outputs(request.spec.encoder_inputs, planned.start, planned.end),
        )

    def sampled(self) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        batch_slots, starts = self._decode_slots, self._decode_starts
        decodes = (np.arange(len(batch_slots)), batch_slots, self._decode_indices, starts + 1)
        if not self._sampled:
            return decodes
        columns = np.array(self._sampled, np.int64).T
        a, b, c, d = (np.concatenate(pair) for pair in zip(decodes, columns, strict=True))
        return a, b, c, d

    def beams(self) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        if not self._beams:
            return NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS
        a, b, c, d = np.array(self._beams, np.int64).T
        return a, b, c, d
