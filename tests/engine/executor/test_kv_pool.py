"""The layout of a block, and that every view of the pool means the same bytes."""

import itertools
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from baton.engine.executor.cache.kv_layout import ALIGNMENT, KvLayout, KvShape, plan_layout
from baton.engine.executor.cache.kv_pool import KvPool

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
SHAPES = st.lists(
    st.builds(KvShape, st.integers(1, 4), st.integers(1, 12), st.integers(1, 12)),
    min_size=1,
    max_size=4,
)


def places(layout: KvLayout) -> Iterator[tuple[int, int, int, int]]:
    """Yields layer, KV head, first byte and number of bytes of every K and V in a block."""
    itemsize = getattr(torch, layout.dtype).itemsize
    for number, layer in enumerate(layout.layers):
        for head in range(layer.num_kv_heads):
            for offset, head_dim in (
                (layer.key_offset, layer.key_head_dim),
                (layer.value_offset, layer.value_head_dim),
            ):
                start = offset + head * layer.head_stride
                yield number, head, start, layout.block_size * head_dim * itemsize


@given(SHAPES, st.sampled_from(DTYPES), st.integers(1, 16))
def test_plan_layout_gives_aligned_bytes_to_each_head(shapes, dtype, block_size):
    layout = plan_layout(shapes, dtype, block_size)
    layers = [KvShape(m.num_kv_heads, m.key_head_dim, m.value_head_dim) for m in layout.layers]
    assert layers == shapes
    end = 0
    for _, _, start, num_bytes in sorted(places(layout), key=lambda place: place[2]):
        assert start % ALIGNMENT == 0
        assert 0 <= start - end < ALIGNMENT, "two parts overlap, or bytes are wasted"
        end = start + num_bytes
    assert layout.block_bytes % ALIGNMENT == 0
    assert 0 <= layout.block_bytes - end < ALIGNMENT


@given(SHAPES, st.sampled_from(DTYPES), st.integers(1, 16))
def test_plan_layout_makes_each_range_of_heads_contiguous(shapes, dtype, block_size):
    """A range is of the layers with one number of KV heads, in most models all of them."""
    layout = plan_layout(shapes, dtype, block_size)
    for num_kv_heads in {shape.num_kv_heads for shape in shapes}:
        members = {i for i, shape in enumerate(shapes) if shape.num_kv_heads == num_kv_heads}
        (stride,) = {layout.layers[i].head_stride for i in members}
        begin = min(layout.layers[i].key_offset for i in members)
        for first, last in itertools.combinations_with_replacement(range(num_kv_heads), 2):
            inside = range(begin + first * stride, begin + (last + 1) * stride)
            for number, head, start, num_bytes in places(layout):
                is_chosen = number in members and first <= head <= last
                if is_chosen:
                    assert start in inside
                    assert start + num_bytes <= inside.stop
                else:
                    assert start + num_bytes <= inside.start or start >= inside.stop


@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([8, 64, 80, 128]),
    st.integers(1, 16),
    st.sampled_from(DTYPES),
)
def test_plan_layout_is_head_major_and_dense_for_equal_layers(
    num_layers, num_kv_heads, head_dim, block_size, dtype
):
    block_size *= 2  # a head's K is a multiple of the alignment
    layout = plan_layout(
        [KvShape(num_kv_heads, head_dim, head_dim)] * num_layers, dtype, block_size
    )
    pool = KvPool(layout, 2, CPU)
    plain = pool.content.view(dtype).view(3, num_kv_heads, num_layers, 2, block_size, head_dim)
    assert layout.block_bytes == plain[0].nbytes
    for number, cache in enumerate(pool.layers):
        for side, view in enumerate((cache.keys, cache.values)):
            expected = plain[:, :, number, side]
            assert view.data_ptr() == expected.data_ptr()
            assert (view.shape, view.stride()) == (expected.shape, expected.stride())


@given(SHAPES, st.sampled_from(DTYPES), st.integers(1, 5))
def test_kv_pool_views_are_the_bytes_of_the_layout(shapes, dtype, block_size):
    layout = plan_layout(shapes, dtype, block_size)
    pool = KvPool(layout, 3, CPU)
    pool.content.random_(256)
    parts = iter(places(layout))
    for cache, shape in zip(pool.layers, shapes, strict=True):
        assert cache.keys.stride()[:2] == cache.values.stride()[:2]
        for head in range(shape.num_kv_heads):
            for view, head_dim in (
                (cache.keys, shape.key_head_dim),
                (cache.values, shape.value_head_dim),
            ):
                _, _, start, num_bytes = next(parts)
                assert view.shape == (4, shape.num_kv_heads, block_size, head_dim)
                found = view[:, head].contiguous().view(torch.uint8).view(4, -1)
                assert torch.equal(found, pool.content[:, start : start + num_bytes])


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_block_restores_what_read_block_returned(dtype):
    layout = plan_layout([KvShape(2, 8, 8), KvShape(1, 6, 4)], dtype, 4)
    source, target = KvPool(layout, 4, CPU), KvPool(layout, 6, CPU)
    for cache in source.layers:
        cache.keys.copy_(torch.randn(cache.keys.shape))
        cache.values.copy_(torch.randn(cache.values.shape))
    content = source.read_block(2)
    assert len(content) == layout.block_bytes
    assert content.nbytes == layout.block_bytes
    target.write_block(5, content)
    target.write_block(1, bytes(content))
    for mine, theirs in zip(source.layers, target.layers, strict=True):
        for block in (1, 5):
            assert torch.equal(mine.keys[2].float(), theirs.keys[block].float())
            assert torch.equal(mine.values[2].float(), theirs.values[block].float())
        assert not theirs.keys.float()[[0, 2, 3, 4, 6]].any()
        assert not theirs.values.float()[[0, 2, 3, 4, 6]].any()


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
    pool.layers[0].keys[1] = 1.0
    assert any(content)
