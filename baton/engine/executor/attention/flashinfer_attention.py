"""FlashInfer over Baton's blocks: a wrapper per kind of layer and step, planned on the host.

The library takes K and V as two tensors `[num_blocks, num_kv_heads, block_size, head_dim]` ("HND")
of equal strides, which our head-major blocks are.
"""

from typing import Any, Final

import numpy as np
import torch

from baton.engine.executor.attention.library_attention import CachedSequences, LayerScores, offsets
from baton.engine.executor.cache.kv_pool import LayerCache

# What FlashInfer recommends. It holds the partial sums of split contexts: at most two tiles of 128
# rows for each multiprocessor, 35 MB for heads of 256 on an H100.
_WORKSPACE_BYTES: Final = 128 * 2**20


class _Wrapper:
    """FlashInfer's wrapper of one kind of layers, in decode steps or in others."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper = wrapper
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Plans a step, and returns the function that attends it."""
        if self._uploaded is not None:
            # The library writes each plan to the same pinned memory, from which it is copied to the
            # device when the steps before it are done.
            self._uploaded.synchronize()
        self._wrapper.plan(*args, **kwargs)
        if self._uploaded is not None:
            self._uploaded.record()
        return self._wrapper.run


class FlashInfer:
    """FlashInfer, as `AttentionLibrary`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        # One for all wrappers: layers are computed one after the other.
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[LayerScores, bool], _Wrapper] = {}

    def plan(self, scores: LayerScores, sequences: CachedSequences) -> Any:
        """Implements `AttentionLibrary.plan`."""
        kind, is_decode = scores.kind, bool((sequences.num_queries == 1).all())
        pages = _pages(sequences)
        shape = (kind.num_heads, kind.num_kv_heads, kind.head_dim, sequences.block_size)
        rule: dict[str, Any] = {
            "sm_scale": scores.scale,
            # Tokens to the left of a query's own, which our windows include.
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": scores.softcap,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        wrapper = self._wrapper(scores, is_decode)
        if is_decode:
            return wrapper.plan(*pages, *shape, **rule)
        queries = torch.from_numpy(sequences.query_offsets)
        return wrapper.plan(queries, *pages, *shape, causal=True, **rule)

    def attend(self, plan: Any, query: torch.Tensor, layer: LayerCache) -> torch.Tensor:
        """Implements `AttentionLibrary.attend`."""
        attended: torch.Tensor = plan(query, (layer.keys, layer.values))
        return attended

    def _wrapper(self, scores: LayerScores, is_decode: bool) -> _Wrapper:
        if (scores, is_decode) not in self._wrappers:
            self._wrappers[scores, is_decode] = _Wrapper(self._made(is_decode), self._device)
        return self._wrappers[scores, is_decode]

    def _made(self, is_decode: bool) -> Any:
        import flashinfer

        if is_decode:
            # Its kernels for tensor cores have any number of query heads per KV head.
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_tensor_cores=True
            )
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")


def _pages(sequences: CachedSequences) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns where each sequence's blocks begin, `[num_ranges + 1]`, the blocks of all in a row,
    and the tokens in the last one of each, `[num_ranges]`: int32, in host memory."""
    counts = -(-sequences.lengths // sequences.block_size)
    in_last = sequences.lengths - (counts - 1) * sequences.block_size
    is_block = np.arange(sequences.table.shape[1]) < counts[:, None]
    arrays = (offsets(counts), sequences.table[is_block], in_last.astype(np.int32))
    begins, blocks, last = map(torch.from_numpy, arrays)
    return begins, blocks, last
