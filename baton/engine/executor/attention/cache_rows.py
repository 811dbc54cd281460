"""Scattered writes and reads of paged K or V in torch: one operation for all heads of all tokens.

Places are distances in elements from where the layer's K or V begins in the pool, so that they are
equal for all layers with the same heads. Knows no sequences and computes no attention.
"""

import torch

from baton.engine.executor.cache.kv_pool import LayerCache
from baton.engine.executor.cache.kv_scales import FP8


class CacheRows:
    """K or V of one layer as rows of the pool; a row may begin at any element."""

    def __init__(self, view: torch.Tensor) -> None:
        """Takes a view of the pool, `[num_blocks, num_kv_heads, block_size, head_dim]`."""
        num_blocks, self.num_kv_heads, block_size, self.head_dim = view.shape
        self.block_stride, self.head_stride, _, _ = view.stride()
        self._dtype = view.dtype
        last_block = (num_blocks - 1) * self.block_stride
        last_token = last_block + (block_size - 1) * self.head_dim
        last_head = last_block + (self.num_kv_heads - 1) * self.head_stride
        # Rows overlap, but the places that are written and read never do.
        content = _movable(view)
        self._tokens = content.as_strided(
            (last_token + 1, self.num_kv_heads, self.head_dim), (1, self.head_stride, 1)
        )
        self._heads = content.as_strided((last_head + 1, block_size * self.head_dim), (1, 1))

    def write(self, places: "TokenPlaces", heads: torch.Tensor) -> None:
        """Writes `heads`, `[num_tokens, num_kv_heads, head_dim]`, of the dtype of the cache."""
        self._tokens.index_copy_(0, places.of(self), _movable(heads))

    def read(self, places: "BlockPlaces", dtype: torch.dtype) -> torch.Tensor:
        """Returns whole blocks, `[batch, num_kv_heads, num_keys, head_dim]`; of an fp8 cache
        converted to `dtype`."""
        found = self._heads.index_select(0, places.of(self))
        found = found.view(places.batch, self.num_kv_heads, -1, self.head_dim)
        return found.view(FP8).to(dtype) if self._dtype == FP8 else found


class LayerRows:
    """K and V of one layer as rows, of any head sizes."""

    def __init__(self, cache: LayerCache) -> None:
        self.keys = CacheRows(cache.keys)
        self.values = CacheRows(cache.values)
        self.num_kv_heads = self.keys.num_kv_heads

    def write(self, tokens: "TokenPlaces", key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes K and V, `[num_tokens, num_kv_heads, d]` each."""
        self.keys.write(tokens, key)
        self.values.write(tokens, value)

    def read(self, blocks: "BlockPlaces", dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V of whole blocks, `[batch, num_kv_heads, num_keys, d]` each."""
        return self.keys.read(blocks, dtype), self.values.read(blocks, dtype)


class TokenPlaces:
    """Places of tokens to write: blocks of the pool and offsets in them, `[num_tokens]` each."""

    def __init__(self, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        self._blocks = blocks
        self._offsets = offsets
        self._places: dict[int, torch.Tensor] = {}

    def of(self, rows: CacheRows) -> torch.Tensor:
        """Returns the place of each token in layers of the group, `[num_tokens]`."""
        if rows.head_dim not in self._places:
            self._places[rows.head_dim] = (
                self._blocks * rows.block_stride + self._offsets * rows.head_dim
            )
        return self._places[rows.head_dim]


class BlockPlaces:
    """Places of blocks to read: the table, `[batch, blocks]`, of one cache group."""

    def __init__(self, table: torch.Tensor) -> None:
        self.batch = len(table)
        self._table = table
        self._places: dict[int, torch.Tensor] = {}

    def of(self, rows: CacheRows) -> torch.Tensor:
        """Returns the place of each head of each block, `[batch * num_kv_heads * blocks]`."""
        # Layers of a group with equally many KV heads have the same stride of heads.
        if rows.num_kv_heads not in self._places:
            heads = torch.arange(rows.num_kv_heads, device=self._table.device)[:, None]
            blocks = self._table.long()[:, None] * rows.block_stride
            self._places[rows.num_kv_heads] = (blocks + heads * rows.head_stride).view(-1)
        return self._places[rows.num_kv_heads]


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns fp8 memory as uint8, which torch can scatter and gather; else the tensor."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
