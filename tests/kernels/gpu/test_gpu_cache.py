"""Cache writes, rotary embedding and block copies on a GPU."""

import pytest
import torch

from kernels.block_copy import copy_blocks
from kernels.cache_write import write_kv
from kernels.rotary import HeadNorms, Rotation, reference_rotate, rotate_and_write
from tests.support.kernels.cache_cases import Step, assert_stored, rotary_table, step_of
from tests.support.kernels.comparison import FLOATS, FP8, assert_close, random

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


def large_step(
    gpu: torch.device, num_tokens: int, num_kv_heads: int, head_dim: int, *types: torch.dtype
) -> Step:
    if FP8 in types and torch.cuda.get_device_capability(gpu) < (9, 0):
        pytest.skip("fp8 is refused below compute capability 9.0")
    return step_of(
        num_tokens=num_tokens,
        num_kv_heads=num_kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        dtype=types[0],
        cache_dtype=types[1],
        block_size=16,
        layer=1,
        device=gpu,
        num_blocks=num_tokens // 16 + 50,
    )


@CACHES
@SHAPES
def test_tokens_are_written_to_their_slots_and_nothing_else_is(
    gpu: torch.device,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    step = large_step(gpu, num_tokens, num_kv_heads, head_dim, dtype, cache_dtype)
    write_kv(step.key, step.value, step.cache, step.slots)
    for found, rows in zip(step.written(), (step.key, step.value), strict=True):
        assert_stored(found, rows[step.is_real].double(), cache_dtype)
    assert step.num_numbers() == sum(t[step.is_real].numel() for t in (step.key, step.value))


@CACHES
@SHAPES
@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("has_norm", [False, True])
def test_queries_and_keys_are_rotated_in_place_and_the_cache_is_written(
    gpu: torch.device,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    part: float,
    has_norm: bool,
) -> None:
    step = large_step(gpu, num_tokens, num_kv_heads, head_dim, dtype, cache_dtype)
    query = random(num_tokens, 4 * num_kv_heads, head_dim, dtype=dtype, device=gpu)
    positions = torch.randint(4096, (num_tokens,), device=gpu)
    rotary_dim = int(part * head_dim)
    rotation = Rotation(rotary_table(4096, rotary_dim, gpu), is_adjacent=part < 1.0)
    weights = torch.randn(2, head_dim, device=gpu).to(dtype)
    norms = HeadNorms(weights[0], weights[1], 1e-5) if has_norm else None
    of_query, of_key = (weights[0].double(), weights[1].double()) if norms else (None, None)
    expected = reference_rotate(query.double(), positions, rotation, of_query, 1e-5)
    rotate_and_write(
        query, step.key, step.value, positions, rotation, step.cache, step.slots, norms, query
    )
    assert_close(query, expected)
    key, value = step.written()
    expected = reference_rotate(step.key.double(), positions, rotation, of_key, 1e-5)
    assert_stored(key, expected[step.is_real], cache_dtype)
    assert_stored(value, step.value[step.is_real].double(), cache_dtype)


@pytest.mark.parametrize("block_bytes", [16, 65536, 65552, 2**21])
@pytest.mark.parametrize("way", ["within", "out", "in"])
def test_blocks_are_copied_within_a_pool_and_to_and_from_the_host(
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


def test_pageable_memory_is_refused(gpu: torch.device) -> None:
    on_gpu = torch.zeros(4, 64, dtype=torch.uint8, device=gpu)
    pairs = torch.tensor([[1, 2]], device=gpu)
    with pytest.raises(ValueError, match=r"source is in pageable memory .* pin_memory=True"):
        copy_blocks(torch.zeros(4, 64, dtype=torch.uint8), on_gpu, pairs)
    with pytest.raises(ValueError, match="both in host memory"):
        copy_blocks(*torch.zeros(2, 4, 64, dtype=torch.uint8).pin_memory(), pairs)
