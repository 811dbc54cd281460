"""Cache writes, rotary embedding and block copies on a GPU."""

import pytest
import torch

from baton_kernels.block_copy import copy_blocks
from baton_kernels.rows.cache_write import write_kv
from baton_kernels.rows.rotary import Rotation
from tests.kernels.gpu.conftest import skip_without_fp8
from tests.support.kernels.cache_cases import Step, check_rotation, rotary_table, step_of
from tests.support.kernels.comparison import FLOATS, FP8

pytestmark = pytest.mark.gpu
SHAPES = pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_dim"),
    [(1, 8, 128), (5000, 8, 128), (777, 1, 64), (777, 8, 80), (300, 10, 96), (300, 4, 256)],
)
CACHES = pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(dtype, dtype) for dtype in FLOATS] + [(torch.bfloat16, FP8), (torch.float16, FP8)],
    ids=str,
)


@pytest.fixture
def step(
    gpu: torch.device,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> Step:
    skip_without_fp8(gpu, cache_dtype == FP8)
    return step_of(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        dtype=dtype,
        cache_dtype=cache_dtype,
        block_size=16,
        layer=1,
        device=gpu,
        num_blocks=num_tokens // 16 + 50,
    )


@CACHES
@SHAPES
def test_write_kv_writes_only_slots_of_tokens(step: Step) -> None:
    write_kv(step.key, step.value, step.cache, step.slots)
    step.check()


@CACHES
@SHAPES
@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_write_rotates_in_place_and_fills_cache(
    step: Step, gpu: torch.device, part: float, has_norm: bool
) -> None:
    _, num_kv_heads, head_dim = step.key.shape
    table = rotary_table(4096, int(part * head_dim), gpu)
    check_rotation(step, 4 * num_kv_heads, Rotation(table, is_adjacent=part < 1.0), has_norm)


@pytest.mark.parametrize("block_bytes", [16, 65536, 65552, 2**21])
@pytest.mark.parametrize("way", ["within", "out", "in"])
def test_copy_blocks_moves_within_pool_and_to_and_from_host(
    gpu: torch.device, block_bytes: int, way: str
) -> None:
    on_gpu = torch.randint(256, (100, block_bytes), dtype=torch.uint8, device=gpu)
    on_host = torch.randint(256, (60, block_bytes), dtype=torch.uint8).pin_memory()
    source, target = {
        "within": (on_gpu, on_gpu),
        "out": (on_gpu, on_host),
        "in": (on_host, on_gpu),
    }[way]
    ids = torch.randperm(60)
    pairs = torch.stack([ids[:30], ids[30:]], dim=1)
    expected = target.clone()
    expected[pairs[:, 1].to(target.device)] = source[pairs[:, 0].to(source.device)].to(
        target.device
    )
    copy_blocks(source, target, pairs.to(gpu))
    torch.cuda.synchronize()
    assert torch.equal(target, expected)


def test_copy_blocks_refuses_pageable_memory(gpu: torch.device) -> None:
    on_gpu = torch.zeros(4, 64, dtype=torch.uint8, device=gpu)
    pairs = torch.tensor([[1, 2]], device=gpu)
    with pytest.raises(ValueError, match=r"source is in pageable memory .* pin_memory=True"):
        copy_blocks(torch.zeros(4, 64, dtype=torch.uint8), on_gpu, pairs)
    with pytest.raises(ValueError, match="both in host memory"):
        copy_blocks(*torch.zeros(2, 4, 64, dtype=torch.uint8).pin_memory(), pairs)
