"""Size of KV pools: from bytes, from a GPU's memory, for the longest sequence."""

import re

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.executor.cache.kv_layout import KvShape, plan_layout
from baton.engine.executor.memory.pool_size import (
    GpuMemory,
    bytes_for_pools,
    check_holds_longest,
    cpu_bytes,
    longest_bytes,
    num_blocks,
)
from baton.errors import InvalidArgumentError

GIB = 2**30
FULL = plan_layout([KvShape(2, 8, 8)] * 2, torch.float32, 16)
WINDOWED = plan_layout([KvShape(2, 8, 8)] * 2, torch.float32, 16, window=32)


def test_bytes_for_pools_is_what_model_and_others_leave():
    gpu = GpuMemory(total=80 * GIB, used_by_others=2 * GIB, peak=20 * GIB, graphs=3 * GIB)
    assert bytes_for_pools(EngineConfig(gpu_memory_utilization=0.5), gpu, 1) == 17 * GIB
    most = bytes_for_pools(EngineConfig(gpu_memory_utilization=0.98), gpu, 1)
    assert most <= (78.4 - 2 - 23) * GIB
    assert bytes_for_pools(EngineConfig(kv_cache_bytes=7), gpu, 1) == 7
    assert bytes_for_pools(EngineConfig(), None, 8) == 8


def test_bytes_for_pools_names_the_users_of_a_full_gpu():
    gpu = GpuMemory(total=24 * GIB, used_by_others=4 * GIB, peak=18 * GIB, graphs=GIB)
    sentence = (
        "gpu_memory_utilization: is 0.9, which allows 22118 MiB of 24576; the model, the largest "
        "step and CUDA graphs take 19456 and others on this GPU 4096"
    )
    with pytest.raises(InvalidArgumentError, match=re.escape(sentence)):
        bytes_for_pools(EngineConfig(), gpu, 1)


@pytest.mark.parametrize(
    ("longest", "available", "expected"),
    [
        (3 * GIB, 100 * GIB, 12 * GIB),
        (3 * GIB, 47 * GIB, 6 * GIB),
        (3 * GIB, 12 * GIB, 3 * GIB),
        (3 * GIB, 11 * GIB, 3 * GIB // 2),
        (3 * GIB, GIB, GIB // 2),
        (2**20, 100 * GIB, GIB // 2),
        (3 * GIB, 0, GIB // 2),
    ],
)
def test_cpu_bytes_hold_the_longest_sequences_there_is_room_for(longest, available, expected):
    assert cpu_bytes(longest, available) == expected


def test_cpu_bytes_are_equal_for_a_little_less_memory():
    assert cpu_bytes(3 * GIB, 20 * GIB) == cpu_bytes(3 * GIB, 17 * GIB)


def test_longest_bytes_are_those_of_all_groups():
    expected = 7 * FULL.block_bytes + (1 + -(-(31 + 20) // 16)) * WINDOWED.block_bytes
    assert longest_bytes([FULL, WINDOWED], 100, 20) == expected


@pytest.mark.parametrize("layout", [FULL, WINDOWED])
def test_check_holds_longest_names_the_blocks_needed(layout):
    needed = 7 if layout is FULL else 1 + -(-(31 + 20) // 16)
    check_holds_longest([needed], [layout], 100, 20)
    with pytest.raises(InvalidArgumentError, match=f"takes {needed} KV blocks and the pool has"):
        check_holds_longest([needed - 1], [layout], 100, 20)


def test_num_blocks_divides_the_bytes_among_groups():
    config = EngineConfig(max_num_seqs=1)
    full, windowed = num_blocks(config, [FULL, WINDOWED], 10**6, 20, 2**20)
    assert windowed == 2 * (1 + -(-(31 + 20) // 16))
    taken = full * FULL.block_bytes + windowed * WINDOWED.block_bytes
    assert 2**20 - FULL.block_bytes < taken <= 2**20
