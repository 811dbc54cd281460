"""Chooses the next token of each sequence from its logits, batched over the step.

Order of operations as in transformers' logits processors: temperature, top-k, top-p, draw.
"""

from dataclasses import dataclass

import torch

from baton.engine.random import uniform
from baton.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits is sampled by. `position` is that of the token to be chosen, counted
    from the beginning of the output."""

    params: SamplingParams
    position: int
    sequence_index: int = 0


def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> tuple[list[int], list[float]]:
    """One token and its log-probability (nats, of the untouched distribution) per row.

    Args:
        logits: `[num_rows, vocab_size]`; not changed.

    Log-probabilities are computed only if a row asks; else they are 0.
    """
    token_ids = logits.argmax(-1)
    random = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if random:
        token_ids[random] = _draw(logits[random].float(), [rows[i] for i in random])
    logprobs = [0.0] * len(rows)
    if any(row.params.logprobs for row in rows):
        chosen = logits.float().log_softmax(-1).gather(-1, token_ids[:, None])
        logprobs = chosen.squeeze(-1).tolist()
    return token_ids.tolist(), logprobs


def _draw(logits: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Inverse-transform sampling, in the order of the vocabulary: `[num_rows]`."""
    device = logits.device
    temperature = torch.tensor([r.params.temperature for r in rows], device=device)
    # Relative to the largest, so that no temperature, however small, makes more than one infinity.
    logits = logits - logits.amax(-1, keepdim=True)
    logits = logits / temperature.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    if any(r.params.top_k > 0 or r.params.top_p < 1.0 for r in rows):
        logits = _truncate(logits, rows)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    draws = uniform(
        [r.params.seed for r in rows],
        [r.sequence_index for r in rows],
        [r.position for r in rows],
        device,
    )
    # Scaled by the last sum, so that rounding can never point past the last token.
    targets = draws[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    # Logits that are not numbers choose no token; any id will do, as long as it is one.
    return chosen.clamp_max(logits.shape[-1] - 1)


def _truncate(logits: torch.Tensor, rows: list[SamplingRow]) -> torch.Tensor:
    """Keeps the `top_k` most likely tokens and, of those, the fewest whose probabilities sum to
    `top_p`; the rest become -inf. The most likely token always stays."""
    vocab_size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab_size, device=logits.device)
    top_k = torch.tensor(
        [min(r.params.top_k or vocab_size, vocab_size) for r in rows], device=logits.device
    )
    top_p = torch.tensor([r.params.top_p for r in rows], device=logits.device)
    ordered = ordered.masked_fill(ranks >= top_k[:, None], -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # Rounding brings `before` to 1 early; a row that asks for all tokens keeps them all.
    is_tail = (before >= top_p[:, None]) & (top_p < 1.0)[:, None] & (ranks > 0)
    ordered = ordered.masked_fill(is_tail, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
