"""Pooled outputs: one vector of the hidden states of a prompt, or its score.

A step adds a part for each range of prompts that it computes; the sum of a prompt's parts is its
pooled output, but for the division of a mean and the normalization.
"""

from collections.abc import Iterable

import numpy as np

from baton.engine.outputs import SequenceUpdate
from baton.engine.request import EngineRequest
from baton.engine.scheduler.plan import Float32Array
from baton.models.pooling import Pooling
from baton.sampling import SamplingParams

# As in torch's `normalize`: a vector of zeros stays one.
_LEAST_NORM = 1e-12


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
