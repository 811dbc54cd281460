"""Rows to sample from and what the sampler of the CPU takes, for the interpreted and GPU tests."""

from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.executor.sampling.sampler import Sampler
from baton.sampling import SamplingParams
from baton_kernels.sampling.rows import SamplingRows
from tests.support.kernels.comparison import Device

# Of many kinds; rows take them in turn. No `top_p` is such that ties make up exactly as much, where
# rounding decides.
KINDS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.9013},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.7017},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 1},
    {"temperature": 1e-30},
    {"temperature": 1.5, "top_p": 0.9531, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.0103},
    {"temperature": 1.0, "top_k": 12, "min_p": 0.3},
    {"temperature": 1e-30, "top_p": 0.5037},
    {"temperature": 1.0, "top_k": 10**9, "top_p": 1.0, "min_p": 1.0},
)


def kinds_of(num_rows: int, first: int = 0) -> list[dict[str, float]]:
    return [KINDS[(first + row) % len(KINDS)] for row in range(num_rows)]


def params_of(kinds: Sequence[dict[str, float]]) -> list[SamplingParams]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(kinds),)).tolist()
    return [
        SamplingParams(**kind, seed=seed % 2**64)  # type: ignore[arg-type]
        for kind, seed in zip(kinds, seeds, strict=True)
    ]


def places(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence indices and positions, some beyond 32 bits."""
    positions = torch.randint(2**20, (num_rows,)) << (torch.arange(num_rows) % 2 * 20)
    return torch.randint(8, (num_rows,)), positions


def rows_of(
    params: Sequence[SamplingParams],
    indices: torch.Tensor,
    positions: torch.Tensor,
    vocab_size: int,
    device: Device = "cpu",
) -> SamplingRows:
    return SamplingRows(
        torch.tensor([p.temperature or 0.0 for p in params], device=device),
        torch.tensor(
            [min(p.top_k or vocab_size, vocab_size) for p in params],
            dtype=torch.int32,
            device=device,
        ),
        torch.tensor([p.top_p or 1.0 for p in params], dtype=torch.float64, device=device),
        torch.tensor([p.min_p or 0.0 for p in params], dtype=torch.float64, device=device),
        torch.from_numpy(np.array([p.seed for p in params], np.uint64).view(np.int64)).to(device),
        indices.to(device),
        positions.to(device),
    )


def chosen_by_the_cpu(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    indices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    sampler = Sampler(num_rows, vocab_size, torch.device("cpu"), frozenset())
    for batch_slot, each in enumerate(params):
        sampler.assign(batch_slot, each, 0)
    history = np.zeros((num_rows, 1), np.int32)
    sampled = sampler.choose(
        logits.cpu(), np.arange(num_rows), indices.numpy(), positions.numpy(), history
    ).fetch()
    return torch.from_numpy(sampled.token_ids)
