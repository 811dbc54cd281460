"""FlashAttention 3 over Baton's blocks: one call per layer for sequences of any lengths.

The library takes pages as `[num_blocks, block_size, num_kv_heads, head_dim]` of any strides, if the
last is 1: head-major blocks have such a view.
"""

from dataclasses import dataclass

import torch

from baton.engine.executor.attention.library_attention import CachedSequences, LayerScores
from baton.engine.executor.cache.kv_pool import LayerCache
from baton.engine.executor.device_stream import uploader


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """Plan of a step. All tensors are int32.

    Attributes:
        offsets: `[num_ranges + 1]`, where each sequence's queries begin.
        lengths: `[num_ranges]`, tokens of each sequence.
        table: `[num_ranges, blocks]`.
        most_queries: queries of the sequence that has most.
    """

    scores: LayerScores
    offsets: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    most_queries: int


class FlashAttention:
    """FlashAttention 3, as `AttentionLibrary`."""

    def __init__(self, device: torch.device, _dtype: torch.dtype) -> None:
        from flash_attn_interface import flash_attn_with_kvcache

        self._attend = flash_attn_with_kvcache
        self._upload = uploader(device)

    def plan(self, scores: LayerScores, sequences: CachedSequences) -> FlashPlan:
        """Implements `AttentionLibrary.plan`."""
        return FlashPlan(
            scores,
            self._upload(sequences.query_offsets),
            self._upload(sequences.lengths.astype("int32")),
            self._upload(sequences.table),
            int(sequences.num_queries.max()),
        )

    def attend(self, plan: FlashPlan, query: torch.Tensor, layer: LayerCache) -> torch.Tensor:
        """Implements `AttentionLibrary.attend`."""
        scores, window = plan.scores, plan.scores.kind.window
        attended: torch.Tensor = self._attend(
            query,
            layer.keys.transpose(1, 2),
            layer.values.transpose(1, 2),
            cache_seqlens=plan.lengths,
            page_table=plan.table,
            cu_seqlens_q=plan.offsets,
            max_seqlen_q=plan.most_queries,
            softmax_scale=scores.scale,
            causal=True,
            # Tokens to the left of a query's own, which our windows include.
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=scores.softcap or 0.0,
        )
        return attended
