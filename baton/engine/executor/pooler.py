"""Pooling: what each range of a prompt adds to its pooled output."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.executor.device_stream import DeviceStream
from baton.engine.scheduler.plan import NonFinite, ScheduledRange, StepPlan, StepResult
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.sequence import Sequence
from baton.models.pooling import Pooling


class Pooler:
    """Pooler of the hidden states of steps.

    Args:
        head: weights of a classification head, `[1, hidden_size]`; None: the hidden states are the
            output.
    """

    def __init__(self, pooling: Pooling, head: torch.Tensor | None = None) -> None:
        self.pooling = pooling
        self._head = head

    def parts(
        self, chunks: SequenceOf[ScheduledRange], hidden: torch.Tensor, num_sampled: int
    ) -> dict[int, torch.Tensor]:
        """Returns what ranges add to the pooled outputs, `[width]` in float32, by their index.

        Args:
            hidden: rows of the last tokens of prompts, `num_sampled` of them, then those of the
                other tokens of the ranges in order, if the pooling needs all.
        """
        parts, row = {}, num_sampled
        for i, chunk in enumerate(chunks):
            rows = hidden[row : row + len(chunk.scored)]
            row += len(chunk.scored)
            if chunk.num_samples:
                rows = torch.cat([rows, hidden[chunk.first_row : chunk.first_row + 1]])
            if self.pooling.mode == "mean":
                if len(rows):
                    parts[i] = rows.float().sum(0)
            elif self.pooling.mode == "last":
                if chunk.num_samples:
                    parts[i] = self._output(rows[-1])
            elif chunk.scored.start == 1 or chunk.end == 1:
                parts[i] = rows[0].float()
            elif len(rows):
                parts[i] = torch.zeros_like(rows[0], dtype=torch.float32)
        return parts

    def _output(self, hidden: torch.Tensor) -> torch.Tensor:
        output = hidden if self._head is None else torch.nn.functional.linear(hidden, self._head)
        return output.float()


@dataclass(frozen=True, slots=True)
class Pooled:
    """Output of a step, on its way to the host.

    Attributes:
        token_ids: `[num_rows]` on the device: a prompt ends with a token that means nothing.
        ended: the same on the host.
        indices: of ranges,
        values: and what they add to the pooled outputs, `[num_ranges, width]`; None: nothing.
    """

    token_ids: torch.Tensor
    ended: torch.Tensor
    indices: tuple[int, ...]
    values: torch.Tensor | None


class PoolingHead:
    """Head of an engine whose model pools hidden states, as the runner's `Head`."""

    def __init__(self, pooler: Pooler, stream: DeviceStream) -> None:
        self._pooler = pooler
        self._to_host = stream.to_host

    def assign(self, sequence: Sequence) -> None:
        pass

    def reads_tokens(self, batch_slots: Int64Array) -> bool:  # noqa: ARG002
        return False

    def allowed(self, plan: StepPlan) -> None:  # noqa: ARG002
        return None

    def compute(self, plan: StepPlan, logits: torch.Tensor, _allowed: object = None) -> Pooled:
        """Computes what each range of the plan adds to the pooled output of its prompt."""
        num_sampled = len(plan.sample_rows)
        tokens = torch.zeros(num_sampled, dtype=torch.int64, device=logits.device)
        parts = self._pooler.parts(plan.chunks, logits, num_sampled)
        values = self._to_host(torch.stack(list(parts.values()))) if parts else None
        return Pooled(tokens, self._to_host(tokens), tuple(parts), values)

    def result(self, plan: StepPlan, pooled: Pooled) -> StepResult:
        token_ids = pooled.ended.numpy()
        if pooled.values is None:
            return StepResult(token_ids)
        by_index = dict(zip(pooled.indices, pooled.values.numpy(), strict=True))
        broken = {i: plan.chunks[i].start for i, v in by_index.items() if not np.isfinite(v).all()}
        return StepResult(token_ids, pooled=by_index, non_finite=NonFinite(ranges=broken))
