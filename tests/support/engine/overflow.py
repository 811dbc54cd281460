"""Checkpoints of finite weights in which one token overflows: what sees it is NaN, nothing else.

Only that token has anything in the first place of the hidden states. In the first layer its V, or
what V is made of, is a product of that place with the largest numbers of float32. A layer norm
overflows by the token's embedding alone.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.engine.checkpoints import FAMILIES, save_random

OVERFLOWING = 7
"""The token. No greedy answer contains it: its logit is 0."""

_LARGEST = 3e38
_OVERFLOWS = ("layers.0.self_attn.v_proj.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight")
_NORM_OVERFLOWS = ("wte.weight", "embed_in.weight")
_ADDED = ("o_proj", "down_proj")  # their outputs are added to the hidden states


class BrokenDrafter:
    """Drafts what overflows, and is always rejected."""

    def propose(self, requests):
        return [np.full(r.max_drafts, OVERFLOWING, np.int32) for r in requests]


def save_overflowing(family: str, folder: Path) -> str:
    """Writes a random checkpoint of a family to a folder, and returns its path."""
    save_random(FAMILIES[family](), folder)
    make_overflow(folder)
    return str(folder)


def make_overflow(folder: Path) -> None:
    """Changes a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        _overflow(model)
    model.save_pretrained(folder)


def _overflow(model: PreTrainedModel) -> None:
    for name, weight in model.named_parameters():
        if name.endswith(_NORM_OVERFLOWS):
            weight[OVERFLOWING] = _LARGEST
        elif "embed" in name:
            weight[:, 0] = weight[OVERFLOWING] = 0.0
            weight[OVERFLOWING, 0] = 1.0
        elif name.endswith(_OVERFLOWS):
            weight[:, 0] = _LARGEST
        elif any(added in name for added in _ADDED):
            weight.select(weight.shape.index(model.config.hidden_size), 0).zero_()
    model.get_output_embeddings().weight[OVERFLOWING] = 0.0
