"""Chunked prefill: chunk size of one sequence in a step, limited by the step's budgets."""

from typing import Final, NamedTuple

from baton.engine.scheduler.scheduling.encoder_schedule import limit_chunk
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.scheduling.step import PlannedRange, Step
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.encoder_inputs import uncut_end
from baton.engine.scheduler.sequences.sequence import Sequence


class Kept(NamedTuple):
    """Share of a step's budgets that is kept for others."""

    num_tokens: int
    reads: float


NOTHING_KEPT: Final = Kept(0, 0.0)


class Chunker:
    """Chunker: cuts the next chunk of a sequence to the budgets of a step. Allocates no blocks."""

    def __init__(self, config: SchedulerConfig, states: RequestStates) -> None:
        self.num_drafted_tokens = 0
        self._config = config
        self._states = states

    def next(
        self, step: Step, sequence: Sequence, start: int, kept: Kept = NOTHING_KEPT
    ) -> PlannedRange | None:
        """Returns the tokens of a sequence from `start` on that fit what is left of the step's
        budgets besides `kept`, or None.

        A beam leaves its last token to the step that all beams take together, and a prompt that
        forks to given outputs leaves its last token to all of them; such a range may be empty.
        """
        num_tokens, limit = sequence.num_tokens, sequence.request.length_limit
        budget = step.token_budget_left - kept.num_tokens
        if sequence.request.leaves_last_token:
            num_tokens -= 1
            if start == num_tokens:
                return PlannedRange(sequence, start, start)
        num_drafts = 0
        if sequence.drafts is not None and num_tokens == start + 1:
            num_drafts = max(0, min(len(sequence.drafts), budget - 1, limit - num_tokens - 1))
            sequence.tokens[num_tokens : num_tokens + num_drafts] = sequence.drafts[:num_drafts]
        end = min(num_tokens + num_drafts, start + budget)
        if self._config.long_prefill_threshold is not None and not num_drafts:
            end = min(end, start + self._config.long_prefill_threshold)
        chunk = PlannedRange(sequence, start, end, num_drafts)
        if sequence.request.is_handed_over:
            self._halve(step, chunk)
        if sequence.request.spec.encoder_inputs:
            self._limit_to_encoder(step, chunk)
        return chunk if chunk.end > start and step.takes_reads([chunk], kept.reads) else None

    def add(self, step: Step, chunk: PlannedRange) -> None:
        """Adds a range, whose blocks are allocated, to the step."""
        if chunk.encoder is not None:
            self._states.encoder.take(chunk.sequence.encoder_id, chunk.encoder.to_hold)
        self.num_drafted_tokens += chunk.num_drafts
        step.add(chunk)

    def _halve(self, step: Step, chunk: PlannedRange) -> None:
        """Ends a range, and the step with it, halfway through what is left of its prompt: the first
        half's blocks then move to the worker that continues while the second is computed. Not if a
        half had fewer tokens than `handoff_chunk_tokens`."""
        least, left = step.handoff_chunk_tokens, chunk.sequence.num_tokens - chunk.start
        if least is None or left < 2 * least or self._has_uncut_inputs(chunk):
            return
        half = chunk.start + -(-left // 2)
        if half < chunk.end:
            chunk.end, chunk.ends_step = half, True

    def _has_uncut_inputs(self, chunk: PlannedRange) -> bool:
        inputs = chunk.sequence.request.spec.encoder_inputs
        return bool(inputs) and not self._config.cuts_encoder_inputs

    def _limit_to_encoder(self, step: Step, chunk: PlannedRange) -> None:
        """Shortens a range to end before an encoder input that does not fit this step."""
        request, encoder, jobs = chunk.sequence.request, self._states.encoder, self._states.jobs
        if self._has_uncut_inputs(chunk):
            chunk.end = uncut_end(request.spec.encoder_inputs, chunk.start, chunk.end)
        chunk.encoder = limit_chunk(
            request.spec.encoder_inputs,
            chunk.start,
            chunk.end,
            encoder,
            chunk.sequence.encoder_id,
            self._config.encoder_budget - encoder.num_due_tokens,
            jobs.awaited,
        )
        chunk.end = chunk.encoder.end
        if chunk.end == chunk.start and jobs.is_active:
            step.held_back.add(chunk.sequence)
