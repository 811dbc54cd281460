"""Token head: chooses the tokens of a step from its logits, and scores those of prompts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.engine.executor.device_stream import DeviceStream
from baton.engine.executor.grammar.masks import SLOW_MASK_S, Allowed, GrammarMasks
from baton.engine.executor.sampling.sampler import Choice, DeviceScores, Sampler, Scores, score
from baton.engine.scheduler.plan import (
    ALL_FINITE,
    Float32Array,
    NonFinite,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from baton.engine.scheduler.sequences.batch_slots import BatchSlots, Int64Array
from baton.engine.scheduler.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chosen:
    """Output of a step, all but `token_ids` on its way to the host.

    Attributes:
        token_ids: `[num_rows]` on the device, for the step after; None if the step chooses none.
        has_grammar: whether a grammar restricted any of the tokens.
        late: rows that choose no token, as in `StepResult`.
        beams: candidates, scores and, if requested, log-probabilities, `[num_rows, k]` each.
        scores: of prompt tokens, by the index of their chunk.
        peaks: `[num_rows]`, the largest logit of each of the step's rows; NaN if any of them is.
    """

    token_ids: torch.Tensor | None = None
    choice: Choice | None = None
    has_grammar: bool = False
    late: frozenset[int] = frozenset()
    beams: tuple[torch.Tensor, ...] = ()
    scores: tuple[tuple[int, DeviceScores], ...] = ()
    peaks: torch.Tensor | None = None


class TokenHead:
    """Token head of an engine that generates, as the runner's `Head`."""

    def __init__(
        self,
        sampler: Sampler,
        vocab_size: int,
        batch_slots: BatchSlots[Sequence],
        stream: DeviceStream,
        slow_mask_s: float = SLOW_MASK_S,
    ) -> None:
        """`slow_mask_s`: CPU seconds from which a mask is slow, as in `GrammarMasks`."""
        self.sampler = sampler
        self._grammars = GrammarMasks(len(batch_slots.owners), vocab_size, slow_mask_s)
        self._token_ids = batch_slots.token_ids
        self._to_host = stream.to_host

    def assign(self, sequence: Sequence) -> None:
        """Notes the request of a sequence that has acquired its slot."""
        spec, batch_slot = sequence.request.spec, sequence.batch_slot
        self.sampler.assign(batch_slot, spec.params, spec.num_prompt_tokens)
        self._grammars.assign(batch_slot, sequence.request)

    def reads_tokens(self, batch_slots: Int64Array) -> bool:
        """Returns whether the choice for any of these slots reads all earlier tokens on the host:
        because of a grammar, or of a penalty that the device has no history for."""
        return self._grammars.applies(batch_slots) or self.sampler.needs_history(batch_slots)

    def allowed(self, plan: StepPlan) -> Allowed | None:
        """Returns the tokens that grammars allow, once those of the step before are applied."""
        return self._grammars.fill(plan.sample_slots, plan.sample_lengths, self._token_ids)

    def compute(
        self, plan: StepPlan, logits: torch.Tensor, allowed: Allowed | None = None
    ) -> Chosen:
        """Computes what the plan asks of its logits: tokens, beam candidates and prompt scores."""
        num_sampled, num_beams = len(plan.sample_rows), len(plan.beam_rows)
        first_scored, chosen = num_sampled + num_beams, Chosen()
        if num_sampled:
            choice = self.sampler.choose(
                logits[:num_sampled],
                plan.sample_slots,
                plan.sample_indices,
                plan.sample_lengths,
                self._token_ids,
                None if allowed is None else (allowed.rows, allowed.masks),
            )
            copied = choice.copied(self._to_host)
            chosen = Chosen(choice.token_ids, copied)
            if allowed is not None:
                chosen = replace(chosen, has_grammar=True, late=allowed.late)
        if num_beams:
            beams = self._beam_candidates(plan, logits[num_sampled:first_scored])
            chosen = replace(chosen, beams=tuple(map(self._to_host, beams)))
        if len(logits) > first_scored:
            scores = self._score(plan, logits[first_scored:])
            chosen = replace(chosen, scores=tuple(scores))
        if not len(logits):
            return chosen
        return replace(chosen, peaks=self._to_host(logits.amax(-1)))

    def _beam_candidates(self, plan: StepPlan, logits: torch.Tensor) -> Iterator[torch.Tensor]:
        token_ids, scores = self.sampler.beam_candidates(
            logits,
            plan.beam_slots,
            plan.beam_lengths,
            self._token_ids,
            plan.num_beam_candidates,
        )
        yield token_ids
        yield scores
        requests = (chunk.sequence.request for chunk in plan.chunks)
        if any(request.beams and request.spec.params.logprobs for request in requests):
            yield logits.log_softmax(-1, dtype=torch.float32).gather(-1, token_ids)

    def _score(self, plan: StepPlan, logits: torch.Tensor) -> Iterator[tuple[int, DeviceScores]]:
        """Yields the scores of prompt tokens, with the index of their chunk."""
        row = 0
        for i, chunk in enumerate(plan.chunks):
            if chunk.scored:
                targets = chunk.sequence.tokens[chunk.scored.start : chunk.scored.stop]
                k = chunk.sequence.request.spec.params.prompt_logprobs or 0
                found = score(logits[row : row + len(targets)], targets.astype(np.int64), k)
                yield i, found.copied(self._to_host)
                row += len(targets)

    def result(self, plan: StepPlan, chosen: Chosen) -> StepResult:
        """Returns the result of a step that the device has done."""
        result = StepResult(np.zeros(0, np.int64))
        if chosen.choice is not None:
            sampled = chosen.choice.fetch()
            endings: dict[int, str | None] = {}
            if chosen.has_grammar:
                endings = self._grammars.accept(
                    plan.sample_slots,
                    plan.sample_lengths,
                    self._token_ids,
                    sampled.token_ids,
                    chosen.late,
                )
            result = StepResult(
                sampled.token_ids,
                sampled.logprobs,
                sampled.top_ids,
                sampled.top_logprobs,
                endings=endings,
                late=chosen.late,
            )
        if chosen.beams:
            token_ids, scores, *logprobs = (beams.numpy() for beams in chosen.beams)
            result = replace(
                result,
                beam_token_ids=token_ids,
                beam_scores=scores,
                beam_logprobs=logprobs[0] if logprobs else None,
            )
        if chosen.scores:
            scored = {i: _token_logprobs(scores.fetch()) for i, scores in chosen.scores}
            result = replace(result, prompt_logprobs=scored)
        if chosen.peaks is None:
            return result
        return replace(result, non_finite=_non_finite(plan, chosen.peaks.float().numpy()))


def _non_finite(plan: StepPlan, peaks: Float32Array) -> NonFinite:
    """Returns the rows of a step whose largest logit is not finite."""
    is_broken = ~np.isfinite(peaks)
    if not is_broken.any():
        return ALL_FINITE
    bounds = np.cumsum([len(plan.sample_rows), len(plan.beam_rows)])
    of_samples, of_beams, of_scores = np.split(is_broken, bounds)
    ranges, row = {}, 0
    for i, chunk in enumerate(plan.chunks):
        broken = of_scores[row : row + len(chunk.scored)].nonzero()[0]
        row += len(chunk.scored)
        if len(broken):
            ranges[i] = chunk.scored.start - 1 + int(broken[0])
    rows, beam_rows = (frozenset(of.nonzero()[0].tolist()) for of in (of_samples, of_beams))
    return NonFinite(rows, beam_rows, ranges)


def _token_logprobs(scores: Scores) -> tuple[TokenLogprobs, ...]:
    columns = (scores.logprobs, scores.top_ids, scores.top_logprobs)
    return tuple(
        TokenLogprobs(logprob, tuple(ids), tuple(logprobs))
        for logprob, ids, logprobs in zip(*(c.tolist() for c in columns), strict=True)
    )
