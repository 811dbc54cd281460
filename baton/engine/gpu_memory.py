"""What a model takes of a GPU's memory, measured by the largest step there can be."""

from typing import Any

import torch

from baton.engine.pool_size import GpuMemory


class _NoAttention:
    """Stands for attention before there is a cache to attend to."""

    def forward(
        self, _index: int, _layer: Any, query: torch.Tensor, _key: Any, value: torch.Tensor, _: Any
    ) -> torch.Tensor:
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


@torch.inference_mode()
def measure(
    model: Any, device: torch.device, num_tokens: int, num_rows: int, max_len: int
) -> GpuMemory:
    """Runs `num_tokens` tokens and the sampling of `num_rows` of them through a model that has no
    cache yet; it is given one afterwards.

    The model's attention is left out: it works in its output's memory, which is counted.
    """
    model.use(_NoAttention())
    torch.cuda.reset_peak_memory_stats(device)
    positions = torch.arange(num_tokens, device=device) % max_len
    rows = torch.arange(num_rows, device=device)
    logits = model.forward(torch.zeros_like(positions), positions, None, rows)
    # A sampled row is copied to float32, and its probabilities are as large.
    logits.float().softmax(-1)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(
        total=total,
        used_by_others=total - free - torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
    )
