"""The layout of a block, and that every view of the pool means the same bytes."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from baton.engine.cache.kv_pool import KvPool, KvShape, plan_layout

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
SHAPES = st.lists(
    st.builds(KvShape, st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)),
    min_size=1,
    max_size=4,
)


def part_bytes(shape: KvShape, dtype: torch.dtype, block_size: int) -> int:
    width = shape.num_kv_heads * (shape.key_head_dim + shape.value_head_dim)
    return block_size * width * dtype.itemsize


@given(SHAPES, st.sampled_from(DTYPES), st.integers(1, 16))
def test_plan_layout_aligns_unequal_layers(shapes, dtype, block_size):
    layout = plan_layout(shapes, dtype, block_size)
    end = 0
    for layer, shape in zip(layout.layers, shapes, strict=True):
        assert (layer.num_kv_heads, layer.key_head_dim, layer.value_head_dim) == (
            shape.num_kv_heads, shape.key_head_dim, shape.value_head_dim,
        )  # fmt: skip
        assert layer.offset >= end
        end = layer.offset + part_bytes(shape, dtype, block_size)
        for other in shapes:
            for dim in (other.key_head_dim, other.value_head_dim):
                row = other.num_kv_heads * dim * dtype.itemsize
                assert layer.offset % row == 0
                assert layout.block_bytes % row == 0
    assert layout.block_bytes >= end


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 64), st.integers(1, 16))
def test_plan_layout_wastes_nothing_on_equal_layers(num_layers, num_kv_heads, head_dim, block_size):
    shape = KvShape(num_kv_heads, head_dim, head_dim)
    layout = plan_layout([shape] * num_layers, torch.float32, block_size)
    assert layout.block_bytes == num_layers * 2 * block_size * num_kv_heads * head_dim * 4


@given(SHAPES, st.integers(1, 5))
def test_kv_pool_gives_each_layer_its_own_bytes(shapes, block_size):
    layout = plan_layout(shapes, torch.float32, block_size)
    pool = KvPool(layout, 3, CPU)
    expected = {}
    for number, cache in enumerate(pool.layers):
        for side, view in enumerate((cache.key_blocks, cache.value_blocks)):
            filling = torch.rand(view.shape)
            view.copy_(filling)
            expected[number, side] = filling
    for number, (cache, shape) in enumerate(zip(pool.layers, shapes, strict=True)):
        keys, values = expected[number, 0], expected[number, 1]
        assert torch.equal(cache.key_blocks, keys), "another layer wrote here"
        assert torch.equal(cache.value_blocks, values), "another layer wrote here"
        for block in range(4):
            for offset in range(block_size):
                row = cache.key_rows[
                    block * cache.key_rows_per_block + cache.first_key_row + offset
                ]
                width = shape.num_kv_heads * shape.key_head_dim
                assert torch.equal(row, keys[block, offset * width : (offset + 1) * width])
                if cache.has_rows:
                    row = cache.value_rows[
                        block * cache.value_rows_per_block + cache.first_value_row + offset
                    ]
                    width = shape.num_kv_heads * shape.value_head_dim
                    assert torch.equal(row, values[block, offset * width : (offset + 1) * width])


def test_kv_pool_has_rows_for_equal_key_and_value_widths():
    layout = plan_layout([KvShape(2, 7, 7), KvShape(3, 5, 5)], torch.float32, 3)
    assert all(cache.has_rows for cache in KvPool(layout, 2, CPU).layers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_block_restores_what_read_block_returned(dtype):
    layout = plan_layout([KvShape(2, 8, 8), KvShape(1, 6, 4)], dtype, 4)
    source, target = KvPool(layout, 4, CPU), KvPool(layout, 6, CPU)
    for cache in source.layers:
        cache.key_blocks.copy_(torch.randn(cache.key_blocks.shape))
        cache.value_blocks.copy_(torch.randn(cache.value_blocks.shape))
    content = source.read_block(2)
    assert len(content) == layout.block_bytes
    assert content.nbytes == layout.block_bytes
    target.write_block(5, content)
    target.write_block(1, bytes(content))
    for mine, theirs in zip(source.layers, target.layers, strict=True):
        for block in (1, 5):
            assert torch.equal(mine.key_blocks[2].float(), theirs.key_blocks[block].float())
            assert torch.equal(mine.value_blocks[2].float(), theirs.value_blocks[block].float())
        assert not theirs.key_blocks.float()[[0, 2, 3, 4, 6]].any()
        assert not theirs.value_blocks.float()[[0, 2, 3, 4, 6]].any()


@pytest.mark.parametrize("length", [0, 1, 511, 513, 1024])
def test_write_block_rejects_content_of_another_length(length):
    pool = KvPool(plan_layout([KvShape(2, 8, 8)], torch.float32, 4), 2, CPU)
    assert pool.layout.block_bytes == 512
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        pool.write_block(1, b"\xff" * length)
    assert not any(pool.read_block(1))


def test_read_block_returns_a_view_on_cpu():
    pool = KvPool(plan_layout([KvShape(1, 4, 4)], torch.float32, 2), 2, CPU)
    content = pool.read_block(1)
    assert not any(content)
    pool.layers[0].key_blocks[1] = 1.0
    assert any(content)
