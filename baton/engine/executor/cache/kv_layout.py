"""Layouts of paged KV pools: the places of K and V of each layer in a block, and cache groups.

Layers that see the same tokens form a cache group with a pool of its own. A block is one contiguous
region over all layers of its group, and head-major: in the plain case
`[num_kv_heads, num_layers, 2, block_size, head_dim]`, so that a range of heads is contiguous. Plain
data: the memory is in `kv_pool`.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

# Of each head's K and V in a block, in bytes: what GPU kernels load, and copy, per access.
ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Layout of one layer in a block, in bytes.

    K of head `h`, `[block_size, key_head_dim]`, begins at `key_offset + h * head_stride`, and its
    V, `[block_size, value_head_dim]`, at `value_offset + h * head_stride`.
    """

    key_offset: int
    value_offset: int
    head_stride: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """KV layout: the bytes of one block. Blocks of pools with equal layouts are interchangeable.

    `window`: tokens that a query of these layers sees, its own included; None: all.
    """

    dtype: str
    block_size: int
    block_bytes: int
    layers: tuple[LayerLayout, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape of the K and V of one token in one layer, as the model produces them."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int


def plan_layout(
    shapes: list[KvShape], dtype: torch.dtype, block_size: int, window: int | None = None
) -> KvLayout:
    """Returns the layout of a group of layers, in their order.

    A block has a section for each number of KV heads among the layers, in order of appearance. A
    section is its heads one after the other, a head K and V of each layer of the section. Of a
    section, a range of heads is therefore one contiguous range of bytes.
    """
    layers: dict[int, LayerLayout] = {}
    block_bytes = 0
    for num_kv_heads in dict.fromkeys(shape.num_kv_heads for shape in shapes):
        members = {i: s for i, s in enumerate(shapes) if s.num_kv_heads == num_kv_heads}
        section = _plan_section(list(members.values()), block_size * dtype.itemsize, block_bytes)
        layers |= zip(members, section, strict=True)
        block_bytes += num_kv_heads * section[0].head_stride
    name = str(dtype).removeprefix("torch.")
    return KvLayout(
        name, block_size, block_bytes, tuple(layers[i] for i in range(len(shapes))), window
    )


def _plan_section(shapes: list[KvShape], column_bytes: int, offset: int) -> list[LayerLayout]:
    """Returns the layouts of layers with one number of KV heads, from byte `offset` of a block.

    `column_bytes`: bytes of one number of each token in a block.
    """
    sizes = [
        (_aligned(shape.key_head_dim * column_bytes), _aligned(shape.value_head_dim * column_bytes))
        for shape in shapes
    ]
    head_stride = sum(map(sum, sizes))
    layers = []
    for shape, (key_bytes, value_bytes) in zip(shapes, sizes, strict=True):
        layers.append(
            LayerLayout(
                key_offset=offset,
                value_offset=offset + key_bytes,
                head_stride=head_stride,
                num_kv_heads=shape.num_kv_heads,
                key_head_dim=shape.key_head_dim,
                value_head_dim=shape.value_head_dim,
            )
        )
        offset += key_bytes + value_bytes
    return layers


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def pool_bytes(layout: KvLayout, num_blocks: int) -> int:
    """Returns the bytes of a pool of `num_blocks` blocks and the null block."""
    return (num_blocks + 1) * layout.block_bytes


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Place of a layer's KV: the cache group, and the layer of its pool."""

    group: int
    index: int


def plan_groups(
    shapes: list[KvShape], windows: list[int | None], dtype: torch.dtype, block_size: int
) -> tuple[list[KvLayout], list[LayerPlace]]:
    """Returns a layout per set of layers that see the same tokens, and each layer's place."""
    order = sorted(set(windows), key=lambda w: math.inf if w is None else w, reverse=True)
    members = [[i for i, w in enumerate(windows) if w == window] for window in order]
    layouts = [
        plan_layout([shapes[i] for i in layers], dtype, block_size, window)
        for window, layers in zip(order, members, strict=True)
    ]
    places = {
        layer: LayerPlace(group, index)
        for group, layers in enumerate(members)
        for index, layer in enumerate(layers)
    }
    return layouts, [places[i] for i in range(len(shapes))]


def share_memory(layouts: list[KvLayout], num_bytes: int, most: list[int]) -> list[int]:
    """Returns the blocks of each group that fit into `num_bytes` together.

    Every group gets equally many, but at most its entry of `most`, which all sequences together can
    ever hold; the others share what such a group leaves.
    """
    counts = [0] * len(layouts)
    open_groups = set(range(len(layouts)))
    while open_groups:
        taken = sum(counts[i] * layouts[i].block_bytes for i in range(len(layouts)))
        each = (num_bytes - taken) // sum(layouts[i].block_bytes for i in open_groups)
        bounded = {i for i in open_groups if most[i] <= each}
        for i in bounded or open_groups:
            counts[i] = min(most[i], each)
        open_groups -= bounded or open_groups
    return counts
