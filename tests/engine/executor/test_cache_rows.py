"""Writes and reads of paged K and V, against indexing of the pool token by token."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from baton.engine.executor.attention.cache_rows import BlockPlaces, LayerRows, TokenPlaces
from baton.engine.executor.cache.kv_layout import KvShape, plan_layout
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.cache.kv_scales import FP8

CPU = torch.device("cpu")
NUM_BLOCKS = 6
SHAPES = st.lists(
    st.builds(KvShape, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    min_size=1,
    max_size=4,
)


@given(
    SHAPES,
    st.sampled_from([torch.float32, torch.bfloat16, FP8]),
    st.integers(1, 5),
    st.lists(st.integers(0, 29), unique=True, max_size=12),
    st.integers(1, 3),
)
def test_layer_rows_write_and_read_tokens_of_unequal_layers(
    shapes, dtype, block_size, numbers, batch
):
    pool = KvPool(plan_layout(shapes, dtype, block_size), NUM_BLOCKS, CPU)
    numbers = torch.tensor([n for n in numbers if n < NUM_BLOCKS * block_size], dtype=torch.long)
    blocks, offsets = 1 + numbers // block_size, numbers % block_size
    tokens = TokenPlaces(blocks, offsets)
    table = torch.randint(NUM_BLOCKS + 1, (batch, 4), dtype=torch.int32)
    places = BlockPlaces(table)
    written = []
    for shape, cache in zip(shapes, pool.layers, strict=True):
        key, value = (
            torch.randn(len(numbers), shape.num_kv_heads, head_dim).to(dtype)
            for head_dim in (shape.key_head_dim, shape.value_head_dim)
        )
        LayerRows(cache).write(tokens, key, value)
        written.append((key.float(), value.float()))
    for cache, expected in zip(pool.layers, written, strict=True):
        found = LayerRows(cache).read(places, torch.float32)
        for view, heads, read in zip((cache.keys, cache.values), expected, found, strict=True):
            plain = torch.zeros(view.shape)
            for block, offset, of_token in zip(blocks, offsets, heads, strict=True):
                plain[block, :, offset] = of_token
            assert torch.equal(view.float(), plain), "written elsewhere, too"
            of_batch = plain[table.long()].transpose(1, 2).flatten(2, 3)
            assert torch.equal(read.float(), of_batch)


@pytest.mark.parametrize("place", [-1, NUM_BLOCKS + 1])
def test_layer_rows_refuse_blocks_beyond_the_pool(place):
    pool = KvPool(plan_layout([KvShape(2, 8, 8)] * 2, torch.float32, 4), NUM_BLOCKS, CPU)
    rows, block = LayerRows(pool.layers[1]), torch.tensor([place])
    with pytest.raises(IndexError):
        rows.write(TokenPlaces(block, torch.tensor([0])), *torch.zeros(2, 1, 2, 8))
    with pytest.raises(IndexError):
        rows.read(BlockPlaces(block[None]), torch.float32)
