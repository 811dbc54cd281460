"""GPU memory profiling: peak memory of a model, measured by running the largest step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from baton.engine.executor.attention.interface import Attention, RaggedBatch
from baton.engine.executor.memory.pool_size import GpuMemory


@torch.inference_mode()
def measure(
    model: Any,
    attention: Attention,
    largest: RaggedBatch,
    num_rows: int,
    device: torch.device,
    encode_largest: Callable[[], object] | None = None,
) -> GpuMemory:
    """Runs a step, and the sampling of `num_rows` of its tokens, and returns the memory.

    Args:
        model: uses `attention`, whose cache is as large as the step and is counted as the model's.
        largest: the step with the most tokens.
        encode_largest: does the encoder's work that precedes a step; None: there is none.
    """
    torch.cuda.reset_peak_memory_stats(device)
    if encode_largest is not None:
        encode_largest()
    batch = attention.prepare(largest)
    positions = torch.from_numpy(batch.positions).to(device)
    rows = torch.arange(num_rows, device=device)
    logits = model.forward(torch.zeros_like(positions), positions, batch, rows)
    # A sampled row is copied to float32, and its probabilities are as large.
    logits.float().softmax(-1)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(
        total=total,
        used_by_others=total - free - torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
    )


def largest_step(
    num_tokens: int, max_len: int, block_size: int, num_groups: int
) -> tuple[RaggedBatch, int]:
    """Returns a batch of prompts as long as possible, with `num_tokens` tokens in all, and its
    blocks in each cache group."""
    lengths = np.diff([*range(0, num_tokens, max_len), num_tokens]).astype(np.int64)
    per_sequence = -(-min(max_len, num_tokens) // block_size)
    table = 1 + np.arange(len(lengths) * per_sequence, dtype=np.int32).reshape(-1, per_sequence)
    batch_slots = np.arange(len(lengths))
    batch = RaggedBatch(batch_slots, np.zeros_like(batch_slots), lengths, 0, [table] * num_groups)
    return batch, table.size
