"""Pools in shared memory, and whole lists of blocks read, written and copied at once."""

import fcntl
import gc
import itertools
import mmap
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.executor.cache.block_copy import as_rows, copy_rows, runs
from baton.engine.executor.cache.kv_layout import KvLayout, KvShape, plan_layout, pool_bytes
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.cache.shared_memory import SharedMemory, map_readonly

CPU = torch.device("cpu")
LAYOUT = plan_layout([KvShape(2, 8, 8)], torch.float32, 4)


def filled(num_blocks: int, layout: KvLayout = LAYOUT, *, shared: bool = False) -> KvPool:
    memory = SharedMemory.allocate("test", pool_bytes(layout, num_blocks)) if shared else None
    pool = KvPool(layout, num_blocks, CPU, memory)
    pool.content[1:] = torch.randint(256, pool.content[1:].shape, dtype=torch.uint8)
    return pool


def test_shared_pool_is_mapped_with_equal_bytes():
    layout, num_blocks = LAYOUT, 5
    pool = KvPool(
        layout, num_blocks, CPU, SharedMemory.allocate("test", pool_bytes(layout, num_blocks))
    )
    assert not pool.content.any()
    pool.layers[0].keys[1, 0, 3] = 1.0
    seen = map_readonly(pool.shared.fd, pool_bytes(layout, num_blocks))
    assert bytes(seen) == pool.content.numpy().tobytes()
    pool.layers[0].values[2, 1, 1] = 2.0
    assert bytes(seen) == pool.content.numpy().tobytes()


def test_shared_memory_is_sealed_against_writes_and_resizing():
    memory = SharedMemory.allocate("test", 8192)
    memory.seal()
    memory.seal()
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(memory.fd, 4096)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(memory.fd, 16384)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.pwrite(memory.fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, 8192)
    with pytest.raises(OSError, match="Operation not permitted"):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, 0)
    seen = map_readonly(memory.fd, 8192)
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1
    memory.content[0] = 7
    assert seen[0] == 7


@pytest.mark.parametrize("size", [4096, 8191, 8193, 16384])
def test_map_readonly_rejects_memory_of_another_size(size):
    memory = SharedMemory.allocate("test", 8192)
    with pytest.raises(ValueError, match=f"8192 bytes where {size}"):
        map_readonly(memory.fd, size)


def test_map_readonly_rejects_unsealed_memory():
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(ValueError, match="not sealed"):
            map_readonly(fd, 4096)
    finally:
        os.close(fd)


def test_shared_memory_is_closed_with_its_last_reference():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(10):
        filled(4, shared=True)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


places = st.lists(st.integers(0, 19), unique=True, max_size=20)


@given(places=places)
def test_runs_are_maximal_and_consecutive(places):
    found = runs(np.array(places, np.int64))
    assert [i for start, stop in found for i in range(start, stop)] == list(range(len(places)))
    for start, stop in found:
        assert places[start:stop] == list(range(places[start], places[start] + stop - start))
    for (_, stop), (start, _) in itertools.pairwise(found):
        assert places[start] != places[stop - 1] + 1


@given(data=st.data(), row_bytes=st.integers(1, 9), stage=st.integers(1, 64))
def test_copy_rows_copies_sources_to_targets(data, row_bytes, stage):
    sources = data.draw(places)
    targets = data.draw(st.permutations(range(20)))[: len(sources)]
    content = np.random.default_rng(0).integers(0, 255, 20 * row_bytes, np.uint8)
    source, target = as_rows(content, row_bytes), as_rows(np.zeros_like(content), row_bytes)
    expected = [b"\0" * row_bytes] * 20
    for there, here in zip(sources, targets, strict=True):
        expected[here] = bytes(source[there])
    copy_rows(source, np.array(sources, np.int64), target, np.array(targets, np.int64), stage)
    assert [bytes(row) for row in target] == expected


@given(data=st.data())
def test_read_and_write_blocks_equal_one_by_one(data):
    there = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    here = data.draw(st.permutations(range(1, 13)))[: len(there)]
    source, target = filled(12), KvPool(LAYOUT, 12, CPU)
    content = b"".join(source.read_blocks(there))
    assert content == b"".join(bytes(source.read_block(block)) for block in there)
    cut = data.draw(st.integers(0, len(there))) * LAYOUT.block_bytes
    target.write_blocks(here, [content[:cut], content[cut:]])
    for mine, theirs in zip(here, there, strict=True):
        assert target.read_block(mine) == source.read_block(theirs)
    assert not target.content[[b for b in range(13) if b not in here]].any()


def test_read_blocks_merges_adjacent_blocks():
    pool = filled(8)
    assert [len(p) for p in pool.read_blocks([2, 3, 4, 7, 6])] == [
        n * LAYOUT.block_bytes for n in (3, 1, 1)
    ]


@pytest.mark.parametrize("length", [0, 511, 513, 1023])
def test_write_blocks_rejects_content_of_another_length(length):
    pool = KvPool(LAYOUT, 3, CPU)
    with pytest.raises(AssertionError):
        pool.write_blocks([1, 2], [b"\xff" * length])
    assert not pool.content.any()
