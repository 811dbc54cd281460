"""Output processing: applies a step's tokens, forks, beams and finishes. Plans nothing."""

import numpy as np

from baton.engine.request import FinishReason, Purpose
from baton.engine.scheduler.plan import (
    Float32Array,
    ScheduledRange,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from baton.engine.scheduler.progress import DecodeProgress, SequenceProgress
from baton.engine.scheduler.scheduling.request_states import RequestStates
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.sequence import Request, Sequence, SequenceStatus


class OutputProcessor:
    """Output processor: applies step results to the request states."""

    def __init__(self, states: RequestStates, vocab_size: int, block_size: int) -> None:
        self.num_accepted_tokens = 0
        self._states = states
        self._batch_slots = states.batch_slots
        self._kv = states.kv
        self._block_size = block_size
        # Tokens that may end some sequence; the request decides whether it ends.
        self._may_end = np.zeros(vocab_size, np.bool_)
        self._watched: set[int] = set()

    def watch(self, token_ids: frozenset[int]) -> None:
        """Adds tokens that may end a sequence."""
        for token_id in token_ids - self._watched:
            if token_id < len(self._may_end):
                self._may_end[token_id] = True
        self._watched |= token_ids

    # Plain decodes, as arrays.

    def apply_decodes(self, plan: StepPlan, result: StepResult) -> DecodeProgress:
        columns, batch_slots = self._batch_slots, plan.decode_slots
        rows = columns.is_decoding[batch_slots].nonzero()[0]
        if result.late:
            rows = rows[~np.isin(rows, list(result.late))]
        tokens, ends = result.token_ids[: len(batch_slots)], plan.decode_starts + 1
        if len(rows) < len(batch_slots):  # some have ended since the plan was made, or are late
            batch_slots, tokens, ends = batch_slots[rows], tokens[rows], ends[rows]
        lengths = ends + 1
        columns.token_ids[batch_slots, ends] = tokens
        columns.num_computed[batch_slots] = ends
        columns.num_tokens[batch_slots] = lengths
        owners = columns.owners
        sequences: list[Sequence] = [owners[s] for s in batch_slots.tolist()]
        for i in (ends % self._block_size == 0).nonzero()[0].tolist():
            self._kv.prefixes.commit(sequences[i])
        reasons: dict[int, FinishReason] = {}
        failures = self._end_by_grammar(sequences, rows, result, reasons)
        may_end = self._may_end[tokens] | (lengths >= columns.length_limit[batch_slots])
        for i in may_end.nonzero()[0].tolist():
            sequence = sequences[i]
            reason = sequence.request.reason_to_end(int(tokens[i]), int(lengths[i]))
            if reason is not None and sequence.status is SequenceStatus.RUNNING:
                self._states.finish(sequence, reason)
                reasons[i] = reason
        return DecodeProgress(sequences, rows, tokens, lengths, reasons, failures)

    def _end_by_grammar(
        self,
        sequences: list[Sequence],
        rows: Int64Array,
        result: StepResult,
        reasons: dict[int, FinishReason],
    ) -> dict[int, str]:
        """Ends the sequences whose rows of the result do, and adds their `reasons` by index;
        returns failures by index."""
        failures: dict[int, str] = {}
        for i, row in enumerate(rows.tolist()) if result.endings else ():
            if row in result.endings:
                failure = result.endings[row]
                reasons[i] = _reason_of_ending(failure)
                self._states.finish(sequences[i], reasons[i])
                if failure is not None:
                    failures[i] = failure
        return failures

    # Scheduled ranges, one by one.

    def apply_chunk(
        self, index: int, chunk: ScheduledRange, result: StepResult
    ) -> list[SequenceProgress]:
        """Applies the result of one range to its sequence and to those that fork at its end."""
        sequence = chunk.sequence
        num_drafts, num_accepted = chunk.num_drafts, 0
        tokens = result.token_ids[chunk.first_row : chunk.first_row + num_drafts + 1].tolist()
        is_late = chunk.num_samples > 0 and chunk.first_row in result.late
        if is_late:
            sequence.num_computed_tokens = chunk.end - num_drafts - 1
        elif num_drafts:
            num_accepted = chunk.num_accepted(result.token_ids)
            self.num_accepted_tokens += num_accepted
            tokens = tokens[: num_accepted + 1]
            sequence.num_computed_tokens = chunk.end - num_drafts + num_accepted
        else:
            sequence.num_computed_tokens = chunk.end
        sequence.drafts = None
        self._kv.prefixes.commit(sequence)
        self._states.encoder.release_passed(sequence.encoder_id, sequence.num_computed_tokens)
        scores, pooled = result.prompt_logprobs.get(index, ()), result.pooled.get(index)
        if scores or pooled is not None:
            sequence.num_scored = max(sequence.num_scored, chunk.scored.stop)
        if chunk.num_samples == 0 or is_late:
            return [self._progress(sequence, (), scores=scores, pooled=pooled)]
        children = self._fork(sequence, chunk.num_samples - 1)
        progress = [self._append(sequence, tokens, chunk.first_row, result, scores, pooled)]
        if num_drafts:
            sequence.learn_from_drafts(num_drafts, num_accepted)
        for i, child in enumerate(children, chunk.first_row + 1):
            progress.append(self._append(child, [int(result.token_ids[i])], i, result))
        return progress

    def append_given(
        self, sequence: Sequence, token_id: int, logprob: float | None
    ) -> SequenceProgress:
        """Appends a token that was chosen elsewhere to a running sequence."""
        sequence.append(token_id)
        progress = self._progress(sequence, (token_id,), logprobs=(logprob,))
        self._finish_or_continue(sequence)
        return progress

    def end(self, sequence: Sequence, reason: FinishReason) -> SequenceProgress:
        """Ends one sequence in any state; its siblings continue."""
        self._states.finish(sequence, reason)
        return self._progress(sequence, ())

    def suspended(self, sequence: Sequence) -> SequenceProgress:
        """Returns the progress of a suspended sequence: its last token, reported once more."""
        last = int(sequence.token_ids[-1])
        return self._progress(sequence, (last,), logprobs=(None,))

    def returned(self) -> list[SequenceProgress]:
        """Returns the sequences returned to the router since the last call, without tokens."""
        return [self._progress(sequence, ()) for sequence in self._states.take_returned()]

    def _fork(self, parent: Sequence, count: int) -> list[Sequence]:
        if count:
            parent.request.num_unforked = 0
        return [self._states.fork(parent) for _ in range(count)]

    def _append(
        self,
        sequence: Sequence,
        tokens: list[int],
        first_row: int,
        result: StepResult,
        scores: tuple[TokenLogprobs, ...] = (),
        pooled: Float32Array | None = None,
    ) -> SequenceProgress:
        row, failure = first_row, None
        for row, token_id in enumerate(tokens, first_row):
            sequence.append(token_id)
            if row in result.endings:
                failure = result.endings[row]
                sequence.finish_reason = _reason_of_ending(failure)
            if sequence.finish_reason is not None:
                break
        rows = tuple(range(first_row, row + 1))
        taken = tuple(tokens[: len(rows)])
        progress = self._progress(
            sequence, taken, rows=rows, scores=scores, failure=failure, pooled=pooled
        )
        self._finish_or_continue(sequence)
        return progress

    def _finish_or_continue(self, sequence: Sequence) -> None:
        if sequence.finish_reason is not None:
            self._states.finish(sequence, sequence.finish_reason)
        else:
            self._states.join_plain_decodes(sequence)

    def _progress(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        *,
        rows: tuple[int, ...] = (),
        logprobs: tuple[float | None, ...] = (),
        scores: tuple[TokenLogprobs, ...] = (),
        failure: str | None = None,
        pooled: Float32Array | None = None,
    ) -> SequenceProgress:
        request = sequence.request
        is_suspended = sequence.finish_reason is FinishReason.SUSPENDED
        is_for_others = request.spec.purpose is Purpose.PREFILL or is_suspended
        return SequenceProgress(
            request=request,
            index=sequence.index,
            token_ids=tokens,
            position=sequence.num_output_tokens - len(tokens),
            finish_reason=sequence.finish_reason,
            num_computed_tokens=sequence.num_computed_tokens,
            rows=rows,
            logprobs=logprobs,
            block_ids=tuple(map(tuple, sequence.block_ids)) if is_for_others else (),
            num_cached_tokens=sequence.num_cached_tokens or 0,
            failure=failure,
            prompt_logprobs=scores,
            pooled=pooled,
        )

    # Beams.

    def apply_beams(self, plan: StepPlan, result: StepResult) -> list[SequenceProgress]:
        """Applies the step to every request whose beams took it."""
        rows: dict[Request, dict[Sequence, int]] = {}
        chunks = [s for s in plan.chunks if s.sequence.request.beams is not None]
        beams = [s.sequence for s in chunks if s.end == s.sequence.num_tokens]
        for row, sequence in enumerate(beams):
            if sequence.status is SequenceStatus.RUNNING:
                rows.setdefault(sequence.request, {})[sequence] = row
        progress: list[SequenceProgress] = []
        for request, row_of in rows.items():
            progress += self._advance(request, row_of, result)
        return progress

    def _advance(
        self, request: Request, row_of: dict[Sequence, int], result: StepResult
    ) -> list[SequenceProgress]:
        beams, parents = request.beams, tuple(request.sequences)
        assert beams is not None, "candidates without beams"
        assert result.beam_token_ids is not None, "a result without candidates"
        assert result.beam_scores is not None, "a result without candidates"
        rows = [row_of[s] for s in parents]
        logprobs = None if result.beam_logprobs is None else result.beam_logprobs[rows]
        step = beams.advance(result.beam_token_ids[rows], result.beam_scores[rows], logprobs)
        request.num_unforked = 0
        if step.is_done:
            return self._finish_beams(request, parents)
        alive = {c.parent for c in step.beams}
        for i, parent in enumerate(parents):
            if i not in alive:
                self._states.finish(parent, FinishReason.ABORTED)
        # All forks before any token is added: a parent continues as its own first child.
        free = dict(enumerate(parents))
        children = [
            free.pop(c.parent) if c.parent in free else self._states.fork(parents[c.parent])
            for c in step.beams
        ]
        for child, continuation in zip(children, step.beams, strict=True):
            child.append(continuation.token_id)
            child.finish_reason = None  # the search decides about endings
        request.sequences[:] = children
        return []

    def _finish_beams(
        self, request: Request, beams: tuple[Sequence, ...]
    ) -> list[SequenceProgress]:
        search = request.beams
        assert search is not None, "a result without beams"
        num_cached = beams[0].num_cached_tokens or 0
        for sequence in beams:
            self._states.finish(sequence, FinishReason.LENGTH)
        found = search.results(request.spec.params.n)
        progress = [
            SequenceProgress(
                request=request,
                index=place,
                token_ids=hypothesis.token_ids,
                position=0,
                finish_reason=request.reason_to_end(hypothesis.token_ids[-1], request.length_limit),
                num_computed_tokens=0,
                logprobs=hypothesis.logprobs,
                score=hypothesis.score,
                num_cached_tokens=num_cached,
            )
            for place, hypothesis in enumerate(found)
        ]
        # If processors forbade all others, there are fewer hypotheses than requested.
        progress += [
            SequenceProgress(request, place, (), 0, FinishReason.LENGTH, 0)
            for place in range(len(found), request.spec.params.n)
        ]
        return progress


def _reason_of_ending(failure: str | None) -> FinishReason:
    return FinishReason.END_OF_SEQUENCE if failure is None else FinishReason.FAILED
