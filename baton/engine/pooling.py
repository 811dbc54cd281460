"""Pooled outputs: one vector of the hidden states of a prompt, or its score.

A step adds a part for each range of prompts that it computes; the sum of a prompt's parts is its
pooled output, but for the division of a mean and the normalization.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest
from baton.engine.scheduler.scheduling.plan import Float32Array, ScheduledRange
from baton.models.pooling import Pooling
from baton.sampling import SamplingParams

# As in torch's `normalize`: a vector of zeros stays one.
_LEAST_NORM = 1e-12


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


def pooled_request(
    request_id: str,
    token_ids: tuple[int, ...],
    pooling: Pooling,
    *,
    salt: bytes = b"",
    priority: int = 0,
    arrival_time: float = 0.0,
    due: float | None = None,
) -> EngineRequest:
    """Returns the request for the pooled output of a prompt; arguments as of `EngineRequest`."""
    # Rows of all tokens are those of prompt log-probabilities, with which nothing is read from the
    # prefix cache, and none is counted twice after a preemption.
    params = SamplingParams(max_tokens=1, prompt_logprobs=0 if pooling.needs_all_tokens else None)
    return EngineRequest(
        request_id,
        token_ids,
        params,
        len(token_ids),
        salt=salt,
        priority=priority,
        arrival_time=arrival_time,
        first_token_deadline=due,
        is_pooled=True,
    )


def pooled_output(
    pooling: Pooling, updates: Iterable[SequenceUpdate], num_tokens: int
) -> Float32Array:
    """Returns the pooled output of a prompt of `num_tokens`, from all updates of its request."""
    parts = [update.pooled for update in updates if update.pooled is not None]
    total: Float32Array = np.sum(parts, axis=0, dtype=np.float32)
    if pooling.mode == "mean":
        total /= num_tokens
    if pooling.normalizes:
        total /= max(float(np.linalg.norm(total)), _LEAST_NORM)
    return total
