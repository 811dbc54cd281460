"""Computes a step plan: builds the flat batch, runs the model, samples. Decides nothing."""

from dataclasses import dataclass
from typing import Protocol

import torch

from baton.engine.attention import AttentionBatch, PagedAttention, QuerySpan
from baton.engine.core.plan import AddedSequence, ScheduledSequence, StepPlan, StepResult
from baton.engine.kv_pool import KvPool
from baton.engine.sampler import SamplingRow, sample


class DecoderModel(Protocol):
    """A model over a flat batch whose K and V go to the pool."""

    def use(self, paged: PagedAttention) -> None: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class _RunnerSequence:
    """The runner's own copy of what it needs of a sequence; kept current from the plans."""

    added: AddedSequence
    token_ids: list[int]
    block_ids: list[int]


class ModelRunner:
    """One model on one device. Remembers sequences from plan to plan until they are dropped."""

    def __init__(self, model: DecoderModel, pool: KvPool, device: torch.device) -> None:
        self._model = model
        self._pool = pool
        self._device = device
        self._sequences: dict[str, _RunnerSequence] = {}
        model.use(PagedAttention(pool))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Computes the plan's tokens and samples where it says so."""
        self._update(plan)
        if not plan.scheduled:
            return StepResult((), ())
        token_ids: list[int] = []
        positions: list[int] = []
        spans: list[QuerySpan] = []
        logit_rows: list[int] = []
        for item in plan.scheduled:
            sequence = self._sequences[item.request_id]
            spans.append(
                QuerySpan(len(token_ids), item.end - item.start, item.end, sequence.block_ids)
            )
            token_ids += sequence.token_ids[item.start : item.end]
            positions += range(item.start, item.end)
            if item.samples:
                logit_rows.append(len(token_ids) - 1)
        batch = AttentionBatch(spans, self._pool, self._device)
        logits = self._model.forward(
            self._tensor(token_ids), self._tensor(positions), batch, self._tensor(logit_rows)
        )
        return self._sample(logits, [s for s in plan.scheduled if s.samples])

    def _update(self, plan: StepPlan) -> None:
        for request_id in plan.dropped:
            self._sequences.pop(request_id, None)
        for added in plan.added:
            self._sequences[added.request_id] = _RunnerSequence(
                added, list(added.token_ids), list(added.block_ids)
            )
        for item in plan.scheduled:
            self._sequences[item.request_id].block_ids += item.new_block_ids

    def _sample(self, logits: torch.Tensor, items: list[ScheduledSequence]) -> StepResult:
        if not items:
            return StepResult((), ())
        sequences = [self._sequences[item.request_id] for item in items]
        rows = [
            SamplingRow(s.added.params, len(s.token_ids) - s.added.num_prompt_tokens)
            for s in sequences
        ]
        token_ids, logprobs = sample(logits, rows)
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.token_ids.append(token_id)
        return StepResult(tuple(token_ids), tuple(logprobs))

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
