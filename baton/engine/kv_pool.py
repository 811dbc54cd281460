"""The paged KV pool: memory and its layout. Knows nothing of who holds which block.

The pool is block-major, `[num_blocks, block_bytes]`: a block is one contiguous region over all
layers, so that a handoff is a list of (offset, length) and needs no packing. A table per layer
says where its K and V lie in a block; typed, strided views are derived from it. In the plain case
a block is `[num_layers, 2, block_size, num_kv_heads, head_dim]`.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer's part of a block: K `[block_size, num_kv_heads, key_head_dim]` at byte `offset`,
    V `[block_size, num_kv_heads, value_head_dim]` right behind it."""

    offset: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The bytes of one block. Blocks of pools with equal layouts are interchangeable."""

    dtype: str
    block_size: int
    block_bytes: int
    layers: tuple[LayerLayout, ...]


@dataclass(frozen=True, slots=True)
class KvShape:
    """The K and V of one token in one layer, as the model produces them."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int


def plan_layout(shapes: list[KvShape], dtype: torch.dtype, block_size: int) -> KvLayout:
    """Lays the layers out one behind the other.

    Every part begins at a multiple of the row sizes of all layers, and a block is such a multiple
    too, so that the whole pool can be seen as rows of any one layer. For layers of one shape this
    costs nothing.
    """
    rows = [s.num_kv_heads * d for s in shapes for d in (s.key_head_dim, s.value_head_dim)]
    unit = math.lcm(*rows) * dtype.itemsize
    layers, offset = [], 0
    for shape in shapes:
        layers.append(
            LayerLayout(offset, shape.num_kv_heads, shape.key_head_dim, shape.value_head_dim)
        )
        width = shape.num_kv_heads * (shape.key_head_dim + shape.value_head_dim)
        offset = _round_up(offset + block_size * width * dtype.itemsize, unit)
    return KvLayout(str(dtype).removeprefix("torch."), block_size, offset, tuple(layers))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class LayerCache:
    """Views of one layer's K and V over the whole pool.

    Attributes:
        key_blocks: `[num_blocks, block_size * num_kv_heads * key_head_dim]`, to gather blocks from.
        value_blocks: the same of V.
        key_rows: `[num_rows, num_kv_heads * key_head_dim]`, to scatter tokens into; the token at
            `offset` of `block` is row `block * key_rows_per_block + first_key_row + offset`.
        value_rows: the same of V.
    """

    def __init__(self, typed: torch.Tensor, layout: KvLayout, layer: LayerLayout) -> None:
        itemsize = typed.element_size()
        block_elements = layout.block_bytes // itemsize
        key_width = layer.num_kv_heads * layer.key_head_dim
        value_width = layer.num_kv_heads * layer.value_head_dim
        key_start = layer.offset // itemsize
        value_start = key_start + layout.block_size * key_width
        self.num_kv_heads = layer.num_kv_heads
        self.key_blocks = typed[:, key_start:value_start]
        self.value_blocks = typed[:, value_start : value_start + layout.block_size * value_width]
        self.key_rows = typed.view(-1, key_width)
        self.value_rows = typed.view(-1, value_width)
        self.key_rows_per_block = block_elements // key_width
        self.value_rows_per_block = block_elements // value_width
        self.first_key_row = key_start // key_width
        # With unequal key and value widths V may begin between two rows of its own width; the
        # layout's alignment rules that out for equal widths, and rows are not used otherwise.
        self.first_value_row = value_start // value_width
        self.has_rows = value_start % value_width == 0


class KvPool:
    """`num_blocks` blocks of memory on one device.

    One block more, `null_block`, is always zero: it pads tables to one length.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        shape = (num_blocks + 1, layout.block_bytes)
        self._bytes = torch.zeros(shape, dtype=torch.uint8, device=device)
        typed = self._bytes.view(getattr(torch, layout.dtype))
        self.layers = [LayerCache(typed, layout, layer) for layer in layout.layers]

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Zeroes blocks that are about to be filled in part, and read as a whole: what a sequence
        before left in the rest must not be read, since even masked out a NaN spreads."""
        if block_ids:
            self._bytes[block_ids] = 0

    def read_block(self, block_id: int) -> "memoryview[Any]":
        """One block's bytes. On a CPU a view of the pool, valid until the block is released."""
        return memoryview(self._bytes[block_id].cpu().numpy())  # type: ignore[arg-type]

    def write_block(self, block_id: int, content: "bytes | memoryview[Any]") -> None:
        """Fills one block; `content` is exactly `block_bytes` long."""
        source = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
        assert len(source) == self.layout.block_bytes, "content of another length than a block"
        self._bytes[block_id].copy_(source)
