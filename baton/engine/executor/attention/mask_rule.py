"""Mask rule of a layer, recognised from transformers' mask function.

transformers builds masks from a function (batch, head, query, key) -> bool. It is evaluated here on
chosen positions and described; at run time only the description is used, never the function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from baton.errors import UnsupportedModelError

MaskFunction = Callable[[int, int, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Causal mask; with a sliding window, only the last `window` tokens, the query's included."""

    window: int | None = None


def recognise(mask_function: MaskFunction, max_len: int) -> MaskRule:
    """Returns the mask rule for sequences of up to `max_len` tokens.

    Raises `UnsupportedModelError` if it is neither causal nor a causal sliding window.
    """
    keys = torch.arange(max_len)
    last = _row(mask_function, max_len - 1, keys)
    num_seen = int(last.sum())
    rule = MaskRule(window=num_seen if num_seen < max_len else None)
    for query in sorted({0, 1, num_seen - 1, num_seen, max_len // 2, max_len - 1}):
        if 0 <= query < max_len:
            expected = keys <= query
            if rule.window is not None:
                expected &= keys > query - rule.window
            if not torch.equal(_row(mask_function, query, keys), expected):
                raise UnsupportedModelError(
                    "the model's attention mask is neither causal nor a causal sliding window "
                    f"(query {query} sees other keys); such masks are not implemented"
                )
    return rule


def _row(mask_function: MaskFunction, query: int, keys: torch.Tensor) -> torch.Tensor:
    try:
        row = mask_function(0, 0, torch.tensor(query), keys)
    except (IndexError, RuntimeError, TypeError) as error:
        raise UnsupportedModelError(
            "the model's attention mask depends on the batch's content, which is not implemented"
        ) from error
    return torch.as_tensor(row).expand(len(keys)).bool()
