"""M-RoPE: rotary embeddings by positions of three dimensions, which are time, height and width in
the vision-language models of Qwen. Each pair of numbers rotates by one of them.
"""

from typing import Any

import torch


def has_mrope(decoder: Any) -> bool:
    """Returns whether the rotary positions of a decoder of transformers have three dimensions."""
    return hasattr(getattr(decoder, "rotary_emb", None), "mrope_section")


def dimensions_of_pairs(decoder: Any) -> torch.Tensor | None:
    """Returns the dimension by whose position each pair rotates, `[num_pairs]`, from the model's
    own module; None: positions have one dimension."""
    if not has_mrope(decoder):
        return None
    weight = decoder.embed_tokens.weight
    # Position 1 in one dimension each: only the pairs of that dimension rotate.
    units = torch.eye(3, dtype=torch.int64, device=weight.device)[:, :, None]
    _, sin = decoder.rotary_emb(weight.float(), units)
    is_rotated: torch.Tensor = sin[:, 0, : sin.shape[-1] // 2] != 0
    return is_rotated.int().argmax(0)


def angles_at(
    positions: torch.Tensor, table: torch.Tensor, dimensions: torch.Tensor
) -> torch.Tensor:
    """Returns the rows of a rotary table by positions of three dimensions.

    Args:
        positions: `[3, num_tokens]`.
        table: `[max_len, num_pairs, 2]`.
        dimensions: `[num_pairs]`, as of `dimensions_of_pairs`.

    Returns `[num_tokens, num_pairs, 2]`, contiguous.
    """
    pairs = torch.arange(len(dimensions), device=table.device)
    return table[positions[dimensions].t(), pairs].contiguous()  # indexing keeps the order of `t`
