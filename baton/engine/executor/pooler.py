"""Pooler: what each range of a prompt adds to its pooled output."""

from collections.abc import Sequence as SequenceOf

import torch

from baton.engine.scheduler.scheduling.plan import ScheduledRange
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
