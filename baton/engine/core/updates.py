"""Sequence updates, made of a step's progress and result."""

from collections.abc import Iterator

from baton.engine.outputs import SequenceUpdate
from baton.engine.scheduler.plan import StepResult, TokenLogprobs
from baton.engine.scheduler.progress import (
    DecodeProgress,
    SequenceProgress,
    StepProgress,
)


def updates_of(progress: StepProgress, result: StepResult) -> list[SequenceUpdate]:
    """Returns an update per token, or one without a token for a sequence that chose none yet."""
    updates = _decoded(progress.decoded)
    for i, reason in progress.decoded.reasons.items():
        updates[i].finish_reason = reason
    for i, failure in progress.decoded.failures.items():
        updates[i].failure = failure
    if result.logprobs is not None:
        _add_logprobs(updates, progress.decoded, result)
    for item in progress.others:
        updates += _of_one(item, result)
    return updates


def _decoded(decoded: DecodeProgress) -> list[SequenceUpdate]:
    return [
        SequenceUpdate(
            sequence.request.request_id,
            sequence.index,
            token_id,
            num_tokens - sequence.request.spec.num_prompt_tokens - 1,
            None,
            None,
            num_tokens - 1,
            sequence.num_cached_tokens or 0,
        )
        for sequence, token_id, num_tokens in zip(
            decoded.sequences,
            decoded.token_ids.tolist(),
            decoded.num_tokens.tolist(),
            strict=True,
        )
    ]


def _add_logprobs(
    updates: list[SequenceUpdate], decoded: DecodeProgress, result: StepResult
) -> None:
    for update, sequence, row in zip(
        updates, decoded.sequences, decoded.rows.tolist(), strict=True
    ):
        params = sequence.request.spec.params
        if params.logprobs:
            update.logprobs = _logprobs(result, row, params.top_logprobs)


def _of_one(item: SequenceProgress, result: StepResult) -> Iterator[SequenceUpdate]:
    """Yields the updates of one sequence that was not a plain decode."""
    last = len(item.token_ids) - 1
    for i, token_id in enumerate(item.token_ids or (None,)):
        is_last = i >= last
        yield SequenceUpdate(
            request_id=item.request.request_id,
            index=item.index,
            token_id=token_id,
            position=item.position + i,
            logprobs=None if token_id is None else _logprobs_of_one(item, i, result),
            finish_reason=item.finish_reason if is_last else None,
            num_computed_tokens=item.num_computed_tokens,
            num_cached_tokens=item.num_cached_tokens,
            block_ids=item.block_ids,
            score=item.score if is_last else None,
            failure=item.failure if is_last else None,
            prompt_logprobs=item.prompt_logprobs if i == 0 else (),
            pooled=item.pooled,
        )


def _logprobs_of_one(item: SequenceProgress, i: int, result: StepResult) -> TokenLogprobs | None:
    params = item.request.spec.params
    if not params.logprobs:
        return None
    if item.rows:
        return _logprobs(result, item.rows[i], params.top_logprobs)
    logprob = item.logprobs[i]
    return None if logprob is None else TokenLogprobs(logprob)


def _logprobs(result: StepResult, row: int, num_top: int) -> TokenLogprobs:
    assert result.logprobs is not None, "log-probabilities that were asked for are missing"
    logprob = float(result.logprobs[row])
    if not num_top or result.top_token_ids is None or result.top_logprobs is None:
        return TokenLogprobs(logprob)
    return TokenLogprobs(
        logprob,
        tuple(result.top_token_ids[row, :num_top].tolist()),
        tuple(result.top_logprobs[row, :num_top].tolist()),
    )
