"""Reference implementation of the attention kernels, in torch and float64, sequence by sequence.
Their tests compare with it.
"""

import torch

from baton_kernels.attention.inputs import PagedKv, ScoreRule
from baton_kernels.attention.plan import Ranges


def reference_attention(
    query: torch.Tensor, kv: PagedKv, rule: ScoreRule, tables: torch.Tensor, ranges: Ranges
) -> torch.Tensor:
    """Returns `[num_tokens, num_heads, head_dim]` in float64; zero for tokens in no range."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for i in range(len(ranges)):
        batch_slot, start = int(ranges.batch_slots[i]), int(ranges.starts[i])
        first, count = int(ranges.first_tokens[i]), int(ranges.num_queries[i])
        last_key = 0 if ranges.last_keys is None else int(ranges.last_keys[i])
        keys, values = _context(kv, tables[batch_slot], max(start + count, last_key + 1))
        tokens = slice(first, first + count)
        out[tokens] = _attend(query[tokens].double(), keys, values, start, last_key, rule)
    return out


def _context(
    kv: PagedKv, table: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V of a sequence: `[num_tokens, num_kv_heads, head_dim]` each."""
    parts = []
    for stored, scales in ((kv.keys, kv.key_scales), (kv.values, kv.value_scales)):
        blocks = stored[table[: -(-num_tokens // kv.block_size)].long()].double()
        tokens = blocks.transpose(1, 2).flatten(0, 1)[:num_tokens]
        parts.append(tokens if scales is None else tokens * scales.double()[:, None])
    return parts[0], parts[1]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    last_key: int,
    rule: ScoreRule,
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    positions = start + torch.arange(len(query), device=query.device)[:, None]
    keys_at = torch.arange(len(keys), device=query.device)
    hidden = keys_at > positions.clamp(min=last_key)
    if rule.window is not None:
        hidden |= keys_at <= positions - rule.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if rule.sinks is not None:
        sinks = rule.sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    # A hidden V has a weight of 0, which would make NaN of one that is not finite.
    broken = ~values.isfinite()
    out = torch.einsum("hqk,khd->qhd", weights, values.masked_fill(broken, 0.0))
    sees_broken = torch.einsum("qk,khd->qhd", (~hidden).double(), broken.double()) > 0
    return out.masked_fill(sees_broken, torch.nan)
