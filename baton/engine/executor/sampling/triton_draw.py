"""Random sampling by a Triton kernel: the rules of `draw`, for logits of any float dtype."""

import numpy as np
import torch

from baton.engine.executor.device_stream import uploader
from baton.engine.executor.sampling.batch_state import Int64Array, Rows
from baton_kernels.sampling.rows import SamplingRows
from baton_kernels.sampling.sampling import sample


def draw(
    logits: torch.Tensor, rows: Rows, sequence_indices: Int64Array, positions: Int64Array
) -> torch.Tensor:
    """Draws one token per row, `[num_rows]`; the most likely for a temperature of 0.

    Args:
        logits: `[num_rows, vocab_size]`, not changed.
        positions: output positions of the tokens to draw.
    """
    upload, numbers = uploader(logits.device), rows.numbers
    selected = SamplingRows(
        temperature=upload(numbers["temperature"].copy()),
        top_k=upload(numbers["top_k"].astype(np.int32)),
        top_p=upload(numbers["top_p"].copy()),
        min_p=upload(numbers["min_p"].copy()),
        seeds=upload(numbers["seed"].astype(np.int64)),
        sequence_indices=upload(sequence_indices),
        positions=upload(positions),
    )
    return sample(logits, selected)
