"""Containment of K and V that are not finite: a masked key contributes nothing to a result.

torch adds -inf to the score of a masked key and multiplies its V by 0, and both give NaN if the key
or its V is not finite. That shows in the result, which is small: only then are masked keys cleared.
"""

import math
from collections.abc import Callable

import torch

Results = tuple[torch.Tensor, ...]


def without_masked_keys(
    attend: Callable[[torch.Tensor, torch.Tensor], Results],
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor,
) -> Results:
    """Returns the results of `attend(keys, values)`, as if masked keys and their V were finite.

    A query that sees a key or V that is not finite has the result that `attend` gives. Waits for
    the device.

    Args:
        attend: returns results of `[batch, num_kv_heads, num_queries, any]` each.
        keys, values: `[batch, num_kv_heads, num_keys, d]`.
        bias: 0 for keys that a query sees, else -inf: `[batch, 1, num_queries, num_keys]`.
    """
    results = attend(keys, values)
    if math.isfinite(results[0].sum().item()):
        return results
    broken = ~(keys.isfinite().all(-1) & values.isfinite().all(-1))
    if not broken.any():
        return results
    sees_broken = ((bias == 0) & broken[:, :, None]).any(-1, keepdim=True)
    cleared = attend(*(x.masked_fill(broken[..., None], 0.0) for x in (keys, values)))
    return tuple(map(lambda old, new: torch.where(sees_broken, old, new), results, cleared))
